"""Compile the kernels for a GPU that is not there, and print the width of every access to its memory.

    python tests/gate/compile_kernels.py 90

A line is: kernel, gate, accesses. The shapes are the 15A2B model's, in bf16.
"""

import re
import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import megagate.gate
from megagate.gate import GateConfig, QKVLayout, fused, kernels

GATES = {
    "elementwise": GateConfig(position="sdpa"),
    "headwise": GateConfig(position="sdpa", granularity="headwise"),
    "shared": GateConfig(position="sdpa", sharing="head-shared"),
    "constant": GateConfig(position="sdpa", input="constant"),
    "added": GateConfig(position="sdpa", combine="add", activation="silu"),
}
TOKENS, HEADS, GROUPS, CHANNELS = 512, 32, 4, 128


class NoGpu:
    """What Triton asks a driver for when it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(sys.argv[1]), 32)


class Compiled:
    """A kernel that is compiled, and not run, when it is launched."""

    def __init__(self, kernel: Any, gate: str) -> None:
        self.kernel, self.gate = kernel, gate

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            code = self.kernel.warmup(*args, grid=grid, **kwargs).asm["ptx"]
            print(self.kernel.__name__, self.gate, *re.findall(r"(?:ld|st)\.global(?:\.v\d)?", code))

        return launch


driver.set_active(NoGpu())
for name, gate in GATES.items():
    stand_in = SimpleNamespace(forward=Compiled(kernels.forward, name), backward=Compiled(kernels.backward, name))
    sys.modules["megagate.gate.kernels"] = megagate.gate.kernels = stand_in  # type: ignore[attr-defined, assignment]
    layout = QKVLayout(HEADS, GROUPS, CHANNELS, gate)
    y = torch.empty(TOKENS, 1, GROUPS, HEADS // GROUPS, CHANNELS, dtype=torch.bfloat16, requires_grad=True)
    logits = layout.split(torch.empty(TOKENS, 1, layout.total_rows, dtype=torch.bfloat16)).gate
    if logits is None:
        logits = torch.empty(1, 1, GROUPS, HEADS // GROUPS, CHANNELS, dtype=torch.bfloat16)
    result = fused.fused_gate(y, logits, gate)
    result.backward(torch.empty_like(result))
