"""What the rest of megagate needs to know about the machine: nothing, once this package is imported.

Importing it on a machine without CUDA activates the CPU platform (`megagate.platform.cpu`), and hides a package called
apex that is not NVIDIA's (`megagate.platform.apex`). It must come before the first import of `megatron`, which binds
some of the replaced functions by name when it is imported.
"""

import torch

from megagate.platform import apex, cpu

apex.hide_unrelated()
if not torch.cuda.is_available():
    cpu.activate()


def on_cpu() -> bool:
    """Whether this process runs on the CPU platform."""
    return cpu.is_active()
