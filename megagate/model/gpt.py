"""Megatron's GPTModel of the same layers: attention and feed-forward layer are one TransformerLayer, not two.

Megatron overlaps the all-to-all of experts with computation in a GPTModel only. The modules are those of the hybrid
stack; a checkpoint has the names of Megatron's own GPTModel.
"""

import argparse
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models import GPTModelConfig

from megagate.model.backends import BACKENDS
from megagate.model.pattern import expert_blocks
from megagate.model.specs import NORM_NAMES


def gpt_config(args: argparse.Namespace, config: TransformerConfig, stack: ModuleSpec) -> GPTModelConfig:
    """Return the configuration of a GPTModel.

    Args:
        args: validated, with `--model-impl gpt`.
        config: of its layers.
        stack: the hybrid stack's spec, whose modules the layers are built of.
    """
    model = gpt_config_from_args(args, config)

    def layers(_: GPTModelConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        return layers_of_stage(config, stack, vp_stage)

    model.transformer_layer_spec = layers
    return model


def layers_of_stage(config: TransformerConfig, stack: ModuleSpec, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the spec of the blocks that this rank holds, of one virtual stage if there are several."""
    specs = {experts: _block(stack, experts) for experts in (False, True) if _feed_forward(stack, experts)}
    has_experts = expert_blocks(config.num_layers, config.moe_layer_freq, config.num_moe_experts)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    blocks = [specs[experts] for experts in has_experts[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=blocks, layer_norm=BACKENDS[config.transformer_impl]().layer_norm())


def _feed_forward(stack: ModuleSpec, experts: bool) -> Any:
    layer = stack.submodules.moe_layer if experts else stack.submodules.mlp_layer
    return layer.submodules if isinstance(layer, ModuleSpec) else None


def _block(stack: ModuleSpec, experts: bool) -> ModuleSpec:
    """Return the spec of a block: an attention layer and a feed-forward layer in one."""
    attention, feed_forward = stack.submodules.attention_layer.submodules, _feed_forward(stack, experts)
    # A GPTModel's checkpoint has a norm under the linear layer after it, but for the norm before a router.
    linears = ("self_attention.linear_qkv.",) if experts else ("self_attention.linear_qkv.", "mlp.linear_fc1.")
    names = {own: fused for own, fused in NORM_NAMES if fused.startswith(linears)}
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=attention.input_layernorm,
            self_attention=attention.self_attention,
            self_attn_bda=attention.self_attn_bda,
            pre_mlp_layernorm=feed_forward.pre_mlp_layernorm,
            mlp=feed_forward.mlp,
            mlp_bda=feed_forward.mlp_bda,
            sharded_state_dict_keys_map=names,
        ),
    )
