"""Which modules a model is built of: Megatron's own, except where there is a gate or Megatron's would not do."""

from unittest import mock

import pytest
import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from megagate.errors import UserError
from megagate.gate import PRESETS, GateConfig
from megagate.model import builder
from megagate.model.attention import GatedSelfAttention
from megagate.model.router import Router
from megagate.model.specs import hybrid_stack_spec


def config(**settings) -> TransformerConfig:
    settings = {"transformer_impl": "local"} | settings
    return TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, **settings)


@pytest.mark.parametrize("preset", PRESETS)
def test_only_the_baseline_has_megatrons_the_attention_class(preset: str) -> None:
    attention = hybrid_stack_spec(config(), PRESETS[preset]).submodules.attention_layer.submodules.self_attention
    if preset == "baseline":
        assert attention.module is SelfAttention
        assert "gate" not in attention.params
    else:
        assert attention.module is GatedSelfAttention
        assert attention.params["gate"] == PRESETS[preset]


@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_head_norms_follow_the_config(qk_layernorm: bool) -> None:
    spec = hybrid_stack_spec(config(qk_layernorm=qk_layernorm), GateConfig())
    submodules = spec.submodules.attention_layer.submodules.self_attention.submodules
    assert (submodules.q_layernorm is not None) == (submodules.k_layernorm is not None) == qk_layernorm


def test_expert_layers_only_for_experts() -> None:
    dense = hybrid_stack_spec(config(), GateConfig()).submodules
    experts = hybrid_stack_spec(config(num_moe_experts=2), GateConfig()).submodules
    assert not hasattr(dense.moe_layer, "submodules")
    assert experts.moe_layer.submodules.mlp.keywords["submodules"].router is Router


@pytest.mark.parametrize("preset", PRESETS)
def test_the_config_says_whether_the_attention_output_changes(preset: str) -> None:
    with mock.patch.object(builder, "core_transformer_config_from_args", lambda args: config()):
        built = builder.transformer_config(None, PRESETS[preset])
    assert built.attention_output_gate == preset.startswith("sdpa")


def test_expert_parameters_reduce_over_expert_groups() -> None:
    experts = SequentialMLP.__new__(SequentialMLP)
    torch.nn.Module.__init__(experts)
    experts.linear = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), experts)
    assert builder.separate_expert_parameters([model]) == [model]
    assert [getattr(parameter, "allreduce", True) for parameter in model.parameters()] == [True, True, False, False]


def test_without_transformer_engine_its_layers_are_refused() -> None:
    """Megatron would build them of mock objects."""
    with pytest.raises(UserError, match="--transformer-impl transformer_engine needs Transformer Engine"):
        hybrid_stack_spec(config(transformer_impl="transformer_engine"), GateConfig())
