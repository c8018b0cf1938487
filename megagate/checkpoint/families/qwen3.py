"""Qwen3, dense and with experts: softmax attention with norms of queries and keys, and no gate.

The router of transformers takes the softmax over all experts, then the top k, and divides by their sum if
`norm_topk_prob` is set. Megatron's takes the top k, then the softmax over these, which is the same as with the
division; with --moe-router-pre-softmax it is the same as without.
"""

import argparse
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megagate.checkpoint.families.base import Rule
from megagate.checkpoint.families.parts import (
    attention_rules,
    embedding_rule,
    equal,
    expert_rules,
    head_rules,
    mlp_rules,
)
from megagate.checkpoint.families.settings import (
    GATE_KEYS,
    SCALED,
    Block,
    Settings,
    blocks,
    check_gate,
    check_plain,
    decoder_arguments,
    decoder_config,
    rotary_arguments,
)
from megagate.errors import UserError
from megagate.gate.config import GateConfig
from megagate.model.pattern import DELTA_NET, EXPERTS

LINEAR, FULL = "linear_attention", "full_attention"
NO_WINDOW = "but a sliding window cannot be represented"


def check_attention(settings: Settings) -> None:
    """Refuse biases and windows of the attention.

    Raises:
        UserError: there are some.
    """
    settings.require("attention_bias", False, "but a bias of o_proj alone cannot be represented")
    settings.require("use_sliding_window", False, NO_WINDOW)
    kinds = settings.config.get("layer_types") or []
    if "sliding_attention" in kinds:
        raise UserError(f"config.json has layer_types with 'sliding_attention', {NO_WINDOW}")
    if other := sorted(set(kinds) - {FULL, LINEAR}):
        raise UserError(f"config.json has layer_types with {other[0]!r}, which cannot be represented")
    if kinds and len(kinds) != (count := settings.get("num_hidden_layers")):
        raise UserError(f"config.json has {len(kinds)} layer_types for {count} layers: give {count}")


def check_no_delta_net(args: argparse.Namespace, family: str) -> None:
    """Raise UserError where a model has linear attention."""
    if any(block.attention == DELTA_NET for block in blocks(args)):
        raise UserError(f"the family {family} cannot hold Gated DeltaNet layers")


def expert_arguments(settings: Settings, normalized: bool, count: int, top_k: int, size: int) -> dict[str, Any]:
    """Return the arguments of the routed experts and of which blocks have them.

    Args:
        settings: of the model.
        normalized: whether the weights of the chosen experts sum to 1.
        count: experts where the config does not say.
        top_k: experts per token, likewise.
        size: of an expert, likewise.

    Raises:
        UserError: no block has experts, or Megatron refuses so few.
    """
    top_k = settings.get("num_experts_per_tok", top_k)
    dense, step = settings.get("mlp_only_layers", []), settings.get("decoder_sparse_step", 1)
    count = settings.config.get("num_local_experts") or settings.get("num_experts", count)
    if not count or not step:
        raise UserError(f"config.json has num_experts {count} and decoder_sparse_step {step}, which must be positive")
    layers = range(settings.get("num_hidden_layers"))
    has_experts = [int(layer not in dense and (layer + 1) % step == 0) for layer in layers]
    if not any(has_experts):
        raise UserError("config.json has experts, but mlp_only_layers and decoder_sparse_step leave no layer for them")
    if top_k == 1 and normalized:
        raise UserError("config.json has one expert per token whose weight is always 1, for which Megatron has no way")
    return {
        "num_experts": count,
        "moe_router_topk": top_k,
        "moe_ffn_hidden_size": settings.get("moe_intermediate_size", size),
        "moe_layer_freq": 1 if all(has_experts) else has_experts,
        "moe_router_pre_softmax": not normalized,
    }


def feed_forward_rules(args: argparse.Namespace, block: Block, hf: str, names: Collection[str]) -> Iterator[Rule]:
    """Yield the rules of a block's dense layer, or of its router and routed experts; hf is the prefix of the layer."""
    megatron = f"{block.feed_forward_prefix}mlp."
    if block.feed_forward == EXPERTS:
        yield equal(f"{hf}gate.weight", f"{megatron}router.weight", args.num_experts, args.hidden_size)
        yield from expert_rules(args, f"{hf}experts.", f"{megatron}experts.experts.", names)
    else:
        yield from mlp_rules(hf, megatron, args.hidden_size, args.ffn_hidden_size)


class Qwen3:
    """Qwen3ForCausalLM of transformers."""

    name = "qwen3"
    dropped: Mapping[str, str] = {}

    def recognises(self, config: dict[str, Any]) -> bool:
        """Whether a config.json is of this family; the official repository's models have its keys for the gate."""
        return config.get("model_type") == self.name and not any(key in config for key in GATE_KEYS)

    def arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the model's arguments; see `Family`."""
        settings = Settings(config, self)
        check_attention(settings)
        if LINEAR in (config.get("layer_types") or []):
            raise UserError(f"config.json has layer_types with {LINEAR!r}, which the family {self.name} does not have")
        return {
            **decoder_arguments(settings),
            **rotary_arguments(settings),
            "kv_channels": self.head_dim(settings),
            "ffn_hidden_size": settings.get("intermediate_size"),
            "qk_layernorm": True,
            "gate_preset": "baseline",
        }

    def head_dim(self, settings: Settings) -> int:
        """Return d."""
        return settings.get("head_dim", 128)

    def config(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the config.json of the model; see `Family`."""
        self.check(args)
        return {
            **decoder_config(args, "qwen3", "Qwen3ForCausalLM"),
            "intermediate_size": args.ffn_hidden_size,
            "use_sliding_window": False,
            "sliding_window": None,
        }

    def check(self, args: argparse.Namespace) -> None:
        """Raise UserError for a model that the family cannot hold."""
        check_plain(args, self.name, {"num_experts": None} | SCALED)
        check_gate(args, self.name, GateConfig())
        check_no_delta_net(args, self.name)

    def prefix(self, names: Collection[str]) -> str:
        """Return the prefix of the model's tensors, but for those of its head."""
        return "model."

    def gate_blocks(self, args: argparse.Namespace) -> int:
        """Return into how many blocks of queries and their gate q_proj falls; 0 without a gate."""
        return 0

    def rules(self, args: argparse.Namespace, config: dict[str, Any], names: Collection[str] = ()) -> Iterator[Rule]:
        """Yield the rules of all weights; see `Family`."""
        model, hidden = self.prefix(names), args.hidden_size
        yield embedding_rule(args, f"{model}embed_tokens.weight", names)
        for block in blocks(args):
            hf = f"{model}{block.hf}"
            yield equal(f"{hf}input_layernorm.weight", f"{block.attention_prefix}input_layernorm.weight", hidden)
            yield from self.attention(args, block, hf)
            norm = f"{block.feed_forward_prefix}pre_mlp_layernorm.weight"
            yield equal(f"{hf}post_attention_layernorm.weight", norm, hidden)
            yield from self.feed_forward(args, block, hf, names)
        yield from head_rules(args, f"{model}norm.weight")

    def attention(self, args: argparse.Namespace, block: Block, hf: str) -> Iterator[Rule]:
        """Yield the rules of a block's attention; hf is the prefix of the block."""
        megatron = f"{block.attention_prefix}self_attention."
        yield from attention_rules(args, f"{hf}self_attn.", megatron, self.gate_blocks(args))

    def feed_forward(self, args: argparse.Namespace, block: Block, hf: str, names: Collection[str]) -> Iterator[Rule]:
        """Yield the rules of a block's dense layer or experts; hf is the prefix of the block."""
        yield from feed_forward_rules(args, block, f"{hf}mlp.", names)


class Qwen3Moe(Qwen3):
    """Qwen3MoeForCausalLM of transformers."""

    name = "qwen3_moe"

    def arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the model's arguments; see `Family`."""
        settings = Settings(config, self)
        normalized = settings.get("norm_topk_prob", False)
        return {**super().arguments(config), **expert_arguments(settings, normalized, 128, 8, 768)}

    def head_dim(self, settings: Settings) -> int:
        """Return d, which follows from the other sizes if it is not given."""
        return settings.get("head_dim", settings.get("hidden_size") // settings.get("num_attention_heads"))

    def config(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the config.json of the model; see `Family`."""
        return {
            **super().config(args),
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": self.name,
            "num_experts": args.num_experts,
            "num_experts_per_tok": args.moe_router_topk,
            "moe_intermediate_size": args.moe_ffn_hidden_size,
            "norm_topk_prob": not args.moe_router_pre_softmax,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [block.index for block in blocks(args) if block.feed_forward != EXPERTS],
        }

    def check(self, args: argparse.Namespace) -> None:
        """Raise UserError for a model that the family cannot hold."""
        if not args.num_experts:
            raise UserError(f"the family {self.name} cannot hold a model without experts")
        check_plain(args, self.name, SCALED)
        check_gate(args, self.name, GateConfig())
        check_no_delta_net(args, self.name)
