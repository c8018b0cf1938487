"""The paper's attention gate without Megatron: its axes and presets, its math in plain torch, its row layout.

Start with `config` for what a gate can be, `functional` for what it computes, and `layout` for where its weights lie.
"""

from megagate.gate.config import (
    PRESETS,
    SWITCH_HEAD_PRESETS,
    GateActivation,
    GateCombine,
    GateConfig,
    GateGranularity,
    GateInput,
    GatePosition,
    GatePrecision,
    GateSharing,
    SdpaOutputActivation,
    add_gate_arguments,
    describe,
    gate_config_from_args,
    preset,
    preset_name,
)
from megagate.gate.layout import QKVActivations, QKVLayout, QKVWeights

__all__ = [
    "PRESETS",
    "SWITCH_HEAD_PRESETS",
    "GateActivation",
    "GateCombine",
    "GateConfig",
    "GateGranularity",
    "GateInput",
    "GatePosition",
    "GatePrecision",
    "GateSharing",
    "QKVActivations",
    "QKVLayout",
    "QKVWeights",
    "SdpaOutputActivation",
    "add_gate_arguments",
    "describe",
    "gate_config_from_args",
    "preset",
    "preset_name",
]
