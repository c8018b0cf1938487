"""Builds the layers of Transformer Engine that `tools/gpu_check.py` compares with the reference: `python -m` this.

Nothing is computed.
"""

import sys

from tests.te import machine

# isort: split
import torch

from megagate.gate import PRESETS, QKVLayout
from megagate.gpu_check import presets
from megagate.gpu_check.machine import Machine
from megagate.gpu_check.trainer import process_group


def main() -> None:
    """Give every parameter of every preset's layer its weights."""
    assert presets.HAVE_TE
    fused = 0
    with process_group(Machine(is_cuda=False, seconds=0)):
        machine.pretend(machine.HOPPER)
        for gate in PRESETS.values():
            parameters = dict(presets.build(gate, torch.bfloat16, "transformer_engine").named_parameters())
            layout = QKVLayout(presets.HEADS, presets.GROUPS, presets.CHANNELS, gate)
            weights = presets.random_weights(gate, layout, torch.Generator(), torch.bfloat16)
            norm = "linear_qkv.layer_norm_weight" in parameters
            fused += norm
            given = presets.by_parameter(layout, weights, torch.ones(presets.HIDDEN) if norm else None)
            assert given.keys() == parameters.keys()
            for name, value in given.items():
                assert value.numel() == parameters[name].numel(), name
    print(f"{len(PRESETS)} layers, {fused} with a fused norm", file=sys.__stdout__)


if __name__ == "__main__":
    main()
