"""What holds on a machine with a GPU, and how fast: `tools/gpu_check.py`; docs/gpu_check.md says how to run it.

`command` runs the parts, each in a process of its own; a module beside it is a part or two. Every part runs on the CPU
platform too, but for those that time CUDA kernels, so that the script is not broken when a GPU appears.
"""
