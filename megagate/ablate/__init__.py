"""Grids of runs that differ in a few settings: trained, measured and tabulated, each cell once.

`grid` reads what is to be run, `cell` runs one of it, `runner` all of it, `table` shows what came of it, and `command`
is tools/ablate.py.
"""
