"""Qwen3-Next, and the text model of Qwen3.5-MoE: gated attention and Gated DeltaNet by turns, and a shared expert.

q_proj has, head by head, the d rows of the queries and the d rows of their gate. Norms have w - 1 in both models, but
for the output norm of Gated DeltaNet, which has w in both. That layer's projections are, in Qwen3-Next, in blocks of a
key head and the value heads that share it; Qwen3.5 has them one after another, as Megatron has.

transformers and megagate have no multi-token prediction, so its weights (mtp.*) are left out.
"""

import argparse
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megagate.checkpoint.families.base import Rule, Weight
from megagate.checkpoint.families.parts import equal, interleaved, mlp_rules
from megagate.checkpoint.families.qwen3 import (
    FULL,
    LINEAR,
    Qwen3,
    check_attention,
    expert_arguments,
    feed_forward_rules,
)
from megagate.checkpoint.families.settings import (
    ANY,
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
from megagate.gate.config import PRESETS
from megagate.model.pattern import DELTA_NET, EXPERTS

LINEAR_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""The sizes of Gated DeltaNet, which config.json and Megatron name alike, and their defaults."""

OUTSIDE = ("tie_word_embeddings", "quantization_config")
"""Keys of Qwen3.5 that stand beside the settings of the text model, and win there."""


class Qwen3Next(Qwen3):
    """Qwen3NextForCausalLM of transformers."""

    name = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    dropped: Mapping[str, str] = {
        "mtp.": "multi-token prediction, which neither transformers nor megagate has; an export has them as they are"
    }
    positions: Mapping[str, Any] = SCALED
    carried = ("mtp.",)
    """Beginnings of names among `dropped` that an export writes as the import has found them."""

    def recognises(self, config: dict[str, Any]) -> bool:
        """Whether a config.json is of this family."""
        return config.get("model_type") == self.name and not any(key in config for key in GATE_KEYS)

    def arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the model's arguments; see `Family`."""
        settings = Settings(config, self)
        check_attention(settings)
        settings.require("attn_output_gate", True, "but the gate is always there in this family")
        arguments = {
            **decoder_arguments(settings),
            **rotary_arguments(settings, partial=0.25),
            **self.feed_forward_arguments(settings),
            "kv_channels": settings.get("head_dim", 256),
            "qk_layernorm": True,
            "apply_layernorm_1p": True,
            "gate_preset": "sdpa-elementwise",
        }
        if arguments.get("num_experts"):
            size = settings.get("shared_expert_intermediate_size", 512)
            arguments |= {"moe_shared_expert_intermediate_size": size, "moe_shared_expert_gate": True}
        is_linear = [int(kind == LINEAR) for kind in layer_types(settings)]
        if any(is_linear):
            arguments |= {name: settings.get(name, default) for name, default in LINEAR_SIZES.items()}
            arguments |= {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": is_linear}
        return arguments

    def feed_forward_arguments(self, settings: Settings) -> dict[str, Any]:
        """Return the arguments of dense layers and routed experts."""
        arguments = {"ffn_hidden_size": settings.get("intermediate_size", 5632)}
        if settings.get("num_experts", 512):
            arguments |= expert_arguments(settings, settings.get("norm_topk_prob", True), 512, 10, 512)
        return arguments

    def config(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the config.json of the model; see `Family`."""
        self.check(args)
        config = {
            **decoder_config(args, self.name, self.architecture),
            **{name: getattr(args, name) or default for name, default in LINEAR_SIZES.items()},
            "layer_types": [LINEAR if block.attention == DELTA_NET else FULL for block in blocks(args)],
            "attn_output_gate": True,
            "num_experts": args.num_experts or 0,
        }
        if args.num_experts:
            config |= {
                "num_experts_per_tok": args.moe_router_topk,
                "moe_intermediate_size": args.moe_ffn_hidden_size,
                "shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
            }
        return config | self.feed_forward_config(args)

    def feed_forward_config(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return what config.json says of dense layers, and of the router."""
        return {
            "intermediate_size": args.ffn_hidden_size,
            "norm_topk_prob": not args.moe_router_pre_softmax,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [block.index for block in blocks(args) if block.feed_forward != EXPERTS],
        }

    def check(self, args: argparse.Namespace) -> None:
        """Raise UserError for a model that the family cannot hold."""
        other = {"layernorm_zero_centered_gamma": True, "rotary_percent": ANY} | dict(self.positions)
        if args.num_experts:
            other |= {"moe_shared_expert_intermediate_size": ANY, "moe_shared_expert_gate": True}
            if not args.moe_shared_expert_intermediate_size:
                raise UserError(f"the family {self.name} cannot hold experts without a shared expert")
        check_plain(args, self.name, other)
        check_gate(args, self.name, PRESETS["sdpa-elementwise"])

    def prefix(self, names: Collection[str]) -> str:
        """Return the prefix of the text model's tensors."""
        return "model."

    def gate_blocks(self, args: argparse.Namespace) -> int:
        """Return into how many blocks of queries and their gate q_proj falls."""
        return args.num_attention_heads

    def attention(self, args: argparse.Namespace, block: Block, hf: str) -> Iterator[Rule]:
        """Yield the rules of a block's attention; hf is the prefix of the block."""
        if block.attention == DELTA_NET:
            yield from self.delta_net_rules(args, f"{hf}linear_attn.", f"{block.attention_prefix}self_attention.")
        else:
            yield from super().attention(args, block, hf)

    def feed_forward(self, args: argparse.Namespace, block: Block, hf: str, names: Collection[str]) -> Iterator[Rule]:
        """Yield the rules of a block's dense layer or experts; hf is the prefix of the block."""
        yield from feed_forward_rules(args, block, f"{hf}mlp.", names)
        if block.feed_forward == EXPERTS:
            shared, hidden = f"{block.feed_forward_prefix}mlp.shared_experts.", args.hidden_size
            yield equal(f"{hf}mlp.shared_expert_gate.weight", f"{shared}gate_weight", 1, hidden)
            size = args.moe_shared_expert_intermediate_size
            yield from mlp_rules(f"{hf}mlp.shared_expert.", shared, hidden, size)

    def delta_net_rules(self, args: argparse.Namespace, hf: str, megatron: str) -> Iterator[Rule]:
        """Yield the rules of a Gated DeltaNet layer."""
        parts = delta_net_parts(args, megatron)
        yield from self.projection_rules(args, hf, parts)
        key, value = (parts[name].shape[0] for name in ("key", "value"))
        width = args.linear_conv_kernel_dim
        taps = {"query": key, "key": key, "value": value}
        yield interleaved(
            Weight(f"{hf}conv1d.weight", (2 * key + value, 1, width)),
            [Weight(f"{megatron}conv1d.weight.{name}", (rows, 1, width)) for name, rows in taps.items()],
        )
        for name in ("dt_bias", "A_log"):
            yield equal(f"{hf}{name}", f"{megatron}{name}", args.linear_num_value_heads)
        yield equal(f"{hf}norm.weight", f"{megatron}out_norm.weight", args.linear_value_head_dim)
        yield equal(f"{hf}out_proj.weight", f"{megatron}out_proj.weight", args.hidden_size, value)

    def projection_rules(self, args: argparse.Namespace, hf: str, parts: dict[str, Weight]) -> Iterator[Rule]:
        """Yield the rules of the projections of a Gated DeltaNet layer."""
        for name, inside in (("qkvz", ("query", "key", "value", "z")), ("ba", ("beta", "alpha"))):
            weights = [parts[part] for part in inside]
            yield interleaved(fused(f"{hf}in_proj_{name}.weight", weights), weights, args.linear_num_key_heads)


class Qwen35Moe(Qwen3Next):
    """The text model of Qwen3.5-MoE: Qwen3_5MoeForCausalLM of transformers, alone or in a model with vision."""

    name = "qwen3_5_moe"
    architecture = "Qwen3_5MoeForCausalLM"
    positions: Mapping[str, Any] = {}  # its rotary embedding has sections of its own, which YaRN is not tested with
    dropped: Mapping[str, str] = {
        **Qwen3Next.dropped,
        "model.visual.": "the vision encoder: only the text model is converted",
    }

    def recognises(self, config: dict[str, Any]) -> bool:
        """Whether a config.json is of this family."""
        return config.get("model_type") in ("qwen3_5_moe", "qwen3_5_moe_text") and not any(
            key in config for key in GATE_KEYS
        )

    def arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the model's arguments; see `Family`."""
        text = config.get("text_config")
        if text is None:
            return super().arguments(config)
        outside: dict[str, Any] = {key: config[key] for key in OUTSIDE if key in config}
        return super().arguments({**text, **outside, "model_type": config.get("model_type")})

    def feed_forward_arguments(self, settings: Settings) -> dict[str, Any]:
        """Return the arguments of the routed experts, which all blocks have."""
        arguments = expert_arguments(settings, True, 256, 8, 512)
        return {**arguments, "ffn_hidden_size": arguments["moe_ffn_hidden_size"]}

    def config(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the config.json of the model; see `Family`."""
        return {**super().config(args), "model_type": "qwen3_5_moe_text"}

    def feed_forward_config(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return nothing more: there are no dense layers, and only one kind of router."""
        return {}

    def check(self, args: argparse.Namespace) -> None:
        """Raise UserError for a model that the family cannot hold."""
        super().check(args)
        if any(block.feed_forward != EXPERTS for block in blocks(args)):
            raise UserError(f"the family {self.name} cannot hold a model with dense feed-forward layers")
        if args.moe_router_pre_softmax:
            raise UserError(f"the family {self.name} cannot hold a model whose moe_router_pre_softmax is true")

    def prefix(self, names: Collection[str]) -> str:
        """Return the prefix of the text model's tensors: it may be part of a model with vision."""
        return "model.language_model." if "model.language_model.embed_tokens.weight" in names else "model."

    def projection_rules(self, args: argparse.Namespace, hf: str, parts: dict[str, Weight]) -> Iterator[Rule]:
        """Yield the rules of the projections of a Gated DeltaNet layer."""
        for name, inside in (("qkv", ("query", "key", "value")), ("z", ("z",)), ("b", ("beta",)), ("a", ("alpha",))):
            weights = [parts[part] for part in inside]
            yield interleaved(fused(f"{hf}in_proj_{name}.weight", weights), weights)


def layer_types(settings: Settings) -> list[str]:
    """Return the kind of attention of each block; `check_attention` has looked at those that are given."""
    count = settings.get("num_hidden_layers")
    interval = settings.get("full_attention_interval", 4)
    if not isinstance(interval, int) or interval < 1:
        raise UserError(f"full_attention_interval is {interval!r} in config.json: it must be 1 or more")
    return settings.get("layer_types", [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(count)])


def delta_net_parts(args: argparse.Namespace, megatron: str) -> dict[str, Weight]:
    """Return the parts that Megatron's checkpoint has of the projection of Gated DeltaNet."""
    key = args.linear_num_key_heads * args.linear_key_head_dim
    value = args.linear_num_value_heads * args.linear_value_head_dim
    heads = args.linear_num_value_heads
    rows = {"query": key, "key": key, "value": value, "z": value, "beta": heads, "alpha": heads}
    return {name: Weight(f"{megatron}in_proj.weight.{name}", (size, args.hidden_size)) for name, size in rows.items()}


def fused(name: str, parts: list[Weight]) -> Weight:
    """Return the tensor called `name` that has the rows of all parts."""
    return Weight(name, (sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
