"""Step-3.5: a headwise gate in a projection of its own, g_proj [q, H], and experts chosen by sigmoid scores and a bias.

The released model, Step-3.5-Flash, cannot be represented: three of four layers attend within a window, with more heads
and another rotary embedding than the fourth, and some layers clamp their activations. A model of its kind whose layers
are alike can. Its norms have w - 1. Its files have the experts of a layer stacked, and the shared expert beside them.
"""

import argparse
from collections.abc import Collection, Iterator
from typing import Any

from megagate.checkpoint.families.base import Rule, Weight
from megagate.checkpoint.families.parts import attention_rules, equal, mlp_rules, stacked
from megagate.checkpoint.families.qwen3 import Qwen3, check_no_delta_net
from megagate.checkpoint.families.settings import (
    ANY,
    Block,
    Settings,
    blocks,
    check_gate,
    check_plain,
    decoder_arguments,
    decoder_config,
)
from megagate.errors import UserError
from megagate.gate.config import PRESETS
from megagate.model.pattern import EXPERTS


class Step(Qwen3):
    """Step3p5ForCausalLM, of the model's own files and of vLLM; transformers has only the later model with vision."""

    name = "step3p5"

    def recognises(self, config: dict[str, Any]) -> bool:
        """Whether a config.json is of this family."""
        return config.get("model_type") == self.name

    def arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the model's arguments; see `Family`."""
        settings = Settings(config, self)
        check_alike(settings)
        blocks = range(settings.get("num_hidden_layers"))
        listed = config.get("moe_layers_enum")
        chosen = set(blocks[1:]) if listed is None else {int(layer) for layer in str(listed).split(",") if layer}
        scale = settings.get("moe_router_scaling_factor", 1.0)
        return {
            **decoder_arguments(settings, "num_attention_groups"),
            "kv_channels": settings.get("head_dim"),
            "position_embedding_type": "rope",
            "rotary_base": same_value(settings, "rope_theta", 10000.0, whole=True),
            "rotary_percent": same_value(settings, "partial_rotary_factors", 1.0),
            "ffn_hidden_size": settings.get("intermediate_size"),
            "qk_layernorm": True,
            "apply_layernorm_1p": True,
            "gate_preset": "sdpa-headwise",
            "num_experts": settings.get("moe_num_experts"),
            "moe_router_topk": settings.get("moe_top_k"),
            "moe_ffn_hidden_size": settings.get("moe_intermediate_size"),
            "moe_shared_expert_intermediate_size": settings.get("share_expert_dim"),
            "moe_layer_freq": [int(layer in chosen) for layer in blocks],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": scale,
        }

    def config(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the config.json of the model; see `Family`."""
        self.check(args)
        config = decoder_config(args, self.name, "Step3p5ForCausalLM")
        layers = len(blocks(args))
        for key in ("num_key_value_heads", "rope_parameters", "partial_rotary_factor"):
            config.pop(key, None)
        return config | {
            "num_attention_groups": args.num_query_groups,
            "rope_theta": float(args.rotary_base),
            "partial_rotary_factors": [args.rotary_percent] * layers,
            "layer_types": ["full_attention"] * layers,
            "att_impl_type": "GQA",
            "use_head_wise_attn_gate": True,
            "intermediate_size": args.ffn_hidden_size,
            "moe_num_experts": args.num_experts,
            "moe_top_k": args.moe_router_topk,
            "moe_intermediate_size": args.moe_ffn_hidden_size,
            "share_expert_dim": args.moe_shared_expert_intermediate_size,
            "moe_layers_enum": ",".join(str(block.index) for block in blocks(args) if block.feed_forward == EXPERTS),
            "moe_router_activation": "sigmoid",
            "moe_router_scaling_factor": args.moe_router_topk_scaling_factor or 1.0,
            "norm_expert_weight": True,
            "use_moe_router_bias": True,
            "need_fp32_gate": True,
        }

    def check(self, args: argparse.Namespace) -> None:
        """Raise UserError for a model that the family cannot hold."""
        if not args.num_experts or not args.moe_shared_expert_intermediate_size:
            raise UserError(f"the family {self.name} cannot hold a model without experts, of which one is shared")
        other = {
            "layernorm_zero_centered_gamma": True,
            "rotary_percent": ANY,
            "moe_shared_expert_intermediate_size": ANY,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": ANY,
        }
        check_plain(args, self.name, other)
        check_gate(args, self.name, PRESETS["sdpa-headwise"])
        check_no_delta_net(args, self.name)

    def attention(self, args: argparse.Namespace, block: Block, hf: str) -> Iterator[Rule]:
        """Yield the rules of a block's attention; hf is the prefix of the block."""
        megatron = f"{block.attention_prefix}self_attention."
        yield from attention_rules(args, f"{hf}self_attn.", megatron, gate_name="g_proj")

    def feed_forward(self, args: argparse.Namespace, block: Block, hf: str, names: Collection[str]) -> Iterator[Rule]:
        """Yield the rules of a block's dense layer or experts; hf is the prefix of the block."""
        megatron, hidden = f"{block.feed_forward_prefix}mlp.", args.hidden_size
        if block.feed_forward != EXPERTS:
            yield from mlp_rules(f"{hf}mlp.", megatron, hidden, args.ffn_hidden_size)
            return
        count, size = args.num_experts, args.moe_ffn_hidden_size
        yield equal(f"{hf}moe.gate.weight", f"{megatron}router.weight", count, hidden)
        yield equal(f"{hf}moe.router_bias", f"{megatron}router.expert_bias", count)
        experts = f"{megatron}experts.experts."
        for expert in range(count):
            halves = [Weight(f"{hf}moe.{name}_proj.weight", (size, hidden), expert) for name in ("gate", "up")]
            yield stacked(halves, Weight(f"{experts}linear_fc1.weight", (2 * size, hidden), expert))
            second = Weight(f"{experts}linear_fc2.weight", (hidden, size), expert)
            yield Rule((Weight(f"{hf}moe.down_proj.weight", second.shape, expert),), (second,))
        shared = args.moe_shared_expert_intermediate_size
        yield from mlp_rules(f"{hf}share_expert.", f"{megatron}shared_experts.", hidden, shared)


def check_alike(settings: Settings) -> None:
    """Check that all layers are alike, and that the router is the one that Megatron has.

    Raises:
        UserError: one thing that cannot be represented.
    """
    layers = settings.get("num_hidden_layers")
    if set(settings.get("layer_types")[:layers]) != {"full_attention"}:
        raise UserError(
            "config.json has layer_types with 'sliding_attention', and layers that attend within a window have heads "
            "and rotary embeddings of their own in this family, which Megatron has not"
        )
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        if any(settings.get(key, [])[:layers]):
            raise UserError(f"config.json has {key}, by which some layers clamp activations: Megatron has one for all")
    if settings.config.get("rope_scaling"):
        raise UserError("config.json has rope_scaling, which cannot be represented")
    if settings.get("num_nextn_predict_layers", 0):
        raise UserError("config.json has num_nextn_predict_layers, but there is no multi-token prediction here")
    if not all(settings.get("use_rope_layers", [])[:layers]):
        raise UserError("config.json has use_rope_layers that leave out layers, which cannot be represented")
    settings.require("attention_bias", False, "but a bias of the attention cannot be represented")
    settings.require("att_impl_type", "GQA", "but only grouped queries can be represented")
    needed = {"use_head_wise_attn_gate": True, "moe_router_activation": "sigmoid", "norm_expert_weight": True}
    for key, value in (needed | {"use_moe_router_bias": True}).items():
        if settings.get(key, False) != value:
            raise UserError(f"config.json has {key} {settings.get(key, False)!r}, but only {value!r} is converted")


def same_value(settings: Settings, key: str, default: float, whole: bool = False) -> float:
    """Return a number that a config gives once or for each layer.

    Raises:
        UserError: it differs by layer, or is not whole where it must be.
    """
    value = settings.get(key, default)
    values = set(value[: settings.get("num_hidden_layers")] if isinstance(value, list) else [value])
    if len(values) != 1:
        raise UserError(f"config.json has {key} that differs by layer, which Megatron does not have")
    (number,) = values
    if whole and number != int(number):
        raise UserError(f"config.json has {key} {number}, which must be whole")
    return int(number) if whole else float(number)
