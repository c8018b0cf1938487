"""What a config.json and Megatron's arguments say of a model, as far as families have it in common.

Whatever changes what a model computes is either converted here or refused, with the reason.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megagate.checkpoint.families.base import Family
from megagate.checkpoint.families.yarn import yarn_arguments, yarn_parameters
from megagate.errors import UserError
from megagate.gate.config import GateConfig, describe, gate_config_from_args
from megagate.gate.layout import query_groups
from megagate.model.pattern import ATTENTION, BOUNDARY, DELTA_NET, DENSE, EXPERTS

GATE_KEYS = ("headwise_attn_output_gate", "elementwise_attn_output_gate")
"""The keys by which the official repository's models differ from those of transformers with the same model_type."""

WITHOUT_COUNTERPART = (
    "attention_multiplier",
    "attention_out_bias",
    "attention_sinks",
    "attn_logit_softcapping",
    "clip_qkv",
    "dual_chunk_attention_config",
    "embedding_multiplier",
    "final_logit_softcapping",
    "first_k_dense_replace",
    "logit_scale",
    "logits_scaling",
    "mlp_bias",
    "n_group",
    "n_shared_experts",
    "num_shared_experts",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "routed_scaling_factor",
    "scale_depth",
    "scale_emb",
    "scoring_func",
    "swiglu_limit",
    "topk_group",
)
"""Keys by which other models, and forks of these, change what is computed; no family here has them."""

WITHOUT_EFFECT = frozenset(
    {
        *("architectures", "dtype", "model_type", "torch_dtype", "transformers_version", "use_cache", "_name_or_path"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type", "is_encoder_decoder"),
        *("initializer_range", "max_window_layers", "output_router_logits", "router_aux_loss_coef", "sliding_window"),
        *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "vision_config"),
        *(
            "full_attention_interval",
            "image_token_id",
            "video_token_id",
            "vision_start_token_id",
            "vision_end_token_id",
        ),
        *("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "language_model_only"),
    }
)
"""Keys that do not change what a model computes, or only with another key that is read."""

READ = frozenset(
    {
        *GATE_KEYS,
        *("attention_bias", "attention_dropout", "attn_output_gate", "decoder_sparse_step", "head_dim", "hidden_act"),
        *("hidden_size", "intermediate_size", "layer_types", "max_position_embeddings", "mlp_only_layers"),
        *("moe_intermediate_size", "norm_topk_prob", "num_attention_heads", "num_experts", "num_experts_per_tok"),
        *("num_hidden_layers", "num_key_value_heads", "num_local_experts", "partial_rotary_factor", "qkv_bias"),
        *("quantization_config", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "text_config"),
        *("shared_expert_intermediate_size", "tie_word_embeddings", "use_qk_norm", "use_sliding_window", "vocab_size"),
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads"),
        *("att_impl_type", "moe_layers_enum", "moe_num_experts", "moe_router_activation", "moe_router_scaling_factor"),
        *("moe_top_k", "need_fp32_gate", "norm_expert_weight", "num_attention_groups", "num_nextn_predict_layers"),
        *("partial_rotary_factors", "share_expert_dim", "swiglu_limits", "swiglu_limits_shared"),
        *("use_head_wise_attn_gate", "use_moe_router_bias", "use_rope_layers", "yarn_only_types"),
    }
)
"""Keys that a family converts or refuses."""


def ignored_keys(config: dict[str, Any]) -> list[str]:
    """Return the keys of a config.json, other than empty ones, of which no family knows what they mean."""
    text = config.get("text_config") or {}
    known = READ | WITHOUT_EFFECT
    return sorted(
        key for key, value in (config | text).items() if key not in known and value not in (None, False, [], {})
    )


class Settings:
    """The settings of a config.json.

    A key that is missing or null has the default that the caller gives, which is that of the class in transformers.

    Raises:
        UserError: the config is not of the family; names the keys that decide.
    """

    def __init__(self, config: dict[str, Any], family: Family) -> None:
        if not family.recognises(config):
            keys = "".join(f" and {key}" for key in GATE_KEYS if key in config)
            raise UserError(
                f"config.json has model_type {config.get('model_type')!r}{keys}, which is not of the family "
                f"{family.name}: take another --family, or leave the flag out"
            )
        self.config = config
        self.family = family.name

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or its default; without one the key must be there."""
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise UserError(f"config.json has no {key}, which a model of the family {self.family} needs")
        return value

    def require(self, key: str, allowed: Any, why: str) -> None:
        """Refuse any value of a key, which may be missing, other than the allowed one.

        Raises:
            UserError: it has another one; says why.
        """
        value = self.config.get(key)
        if value is not None and value != allowed:
            raise UserError(f"config.json has {key} {value!r}, {why}")


def rotary_arguments(settings: Settings, partial: float | None = None) -> dict[str, Any]:
    """Return the arguments of the rotary embedding, from where transformers 5 or 4 keeps them.

    Args:
        settings: of the model.
        partial: the share of a head's channels that are turned, where the config does not say; None in families that
            turn all of them, whatever it says.

    Raises:
        UserError: positions are scaled otherwise than by YaRN, or differ by layer.
    """
    config = settings.config
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UserError(f"config.json has {rope!r} for the rotary embedding, which must be a JSON object")
    if any(isinstance(value, dict) for value in rope.values()):
        raise UserError("config.json has rotary embeddings that differ by layer, which Megatron does not have")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise UserError(f"config.json scales the rotary embedding (rope_type {kind!r}), which cannot be represented")
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    if kind == "default" and rope.get("factor", 1) not in (1, None):
        raise UserError(
            f"config.json has a factor for the rotary embedding, but rope_type {kind!r}: correct one of them"
        )
    if theta % 1:  # infinity too
        raise UserError(f"config.json has rope_theta {theta}, but Megatron's --rotary-base is a whole number")
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or partial or 1.0
    if partial is None and share != 1:
        raise UserError(f"config.json has partial_rotary_factor {share}, which the family {settings.family} ignores")
    if kind == "yarn":
        scaled = yarn_arguments(rope, settings.get("max_position_embeddings", 32768))
    else:
        scaled = {"position_embedding_type": "rope"}
    return scaled | {"rotary_base": int(theta), "rotary_percent": float(share)}


def rotary_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keys for the rotary embedding, for transformers 5 and for what reads those of transformers 4."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(args.rotary_base)}
    if args.position_embedding_type == "yarn":
        rope = yarn_parameters(args)
    keys: dict[str, Any] = {"rope_theta": float(args.rotary_base), "rope_parameters": rope}
    if args.position_embedding_type == "yarn":
        keys["rope_scaling"] = rope
    if args.rotary_percent != 1:
        rope["partial_rotary_factor"] = keys["partial_rotary_factor"] = args.rotary_percent
    return keys


SCALED = {"position_embedding_type": ("rope", "yarn")}
"""For `check_plain`: a family whose class in transformers has YaRN as Megatron has it."""


def vocabulary_arguments(size: int) -> dict[str, Any]:
    """Return arguments for as many rows of the embedding; where TP divides them none is padding."""
    return {"vocab_size": size, "make_vocab_size_divisible_by": min(size & -size, 128)}


def decoder_arguments(settings: Settings, groups: str = "num_key_value_heads") -> dict[str, Any]:
    """Return the arguments that decoders with RMSNorm, SwiGLU, grouped queries and no biases share.

    `groups` is the key for the number of KV groups.
    """
    settings.require("hidden_act", "silu", "but only silu, in a gated feed-forward layer, can be represented")
    if settings.config.get("quantization_config"):
        raise UserError("config.json has quantization_config: quantised weights cannot be converted, take the original")
    for key in WITHOUT_COUNTERPART:
        value = settings.config.get(key)
        if value and (value is True or value != 1):
            raise UserError(f"config.json has {key} {value!r}, which the family {settings.family} does not have")
    return {
        "num_layers": settings.get("num_hidden_layers"),
        "hidden_size": settings.get("hidden_size"),
        "num_attention_heads": settings.get("num_attention_heads"),
        "group_query_attention": True,
        "num_query_groups": settings.get(groups),
        "max_position_embeddings": settings.get("max_position_embeddings", 32768),
        "normalization": "RMSNorm",
        "norm_epsilon": settings.get("rms_norm_eps", 1e-6),
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not settings.get("tie_word_embeddings", False),
        "attention_dropout": float(settings.get("attention_dropout", 0.0)),
        "hidden_dropout": 0.0,
        **vocabulary_arguments(settings.get("vocab_size")),
    }


def decoder_config(args: argparse.Namespace, kind: str, architecture: str) -> dict[str, Any]:
    """Return the keys of a config.json that belong to `decoder_arguments`."""
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": args.tokenizer_vocab_size,
        "hidden_size": args.hidden_size,
        "num_hidden_layers": len(blocks(args)),
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": query_groups(args),
        "head_dim": args.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": args.max_position_embeddings,
        "rms_norm_eps": args.layernorm_epsilon,
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "attention_bias": False,
        "attention_dropout": args.attention_dropout,
        **rotary_config(args),
    }


PLAIN: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rotary_percent": 1.0,
    "no_rope_freq": None,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "qk_layernorm": True,
    "qk_l2_norm": False,
    "softmax_type": "vanilla",
    "window_size": None,
    "multi_latent_attention": False,
    "swiglu": True,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "mtp_num_layers": None,
    "use_mup": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
    "moe_mlp_glu_interleave_size": None,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_force_load_balancing": False,
    "moe_router_force_biased": None,
}
"""Arguments that change what a model computes -> the value that means a plain Qwen3."""

ROUTING = ("sinkhorn", "quantile_balancing")
"""Ways of balancing experts that change which are chosen; the others are losses."""

ANY = object()


def check_plain(args: argparse.Namespace, family: str, other: Mapping[str, Any] | None = None) -> None:
    """Check that a model is one that a family can hold.

    Args:
        args: of the model, as in a checkpoint.
        family: for the message.
        other: values that the family has instead of those in `PLAIN`, several in a tuple; with `ANY` it has them all.

    Raises:
        UserError: an argument has another value.
    """
    for name, expected in (PLAIN | dict(other or {})).items():
        value = getattr(args, name, expected)
        if expected is None and not (any(value) if isinstance(value, list) else value):
            continue
        if expected is not ANY and value not in (expected if isinstance(expected, tuple) else (expected,)):
            raise UserError(f"the family {family} cannot hold this model: {name} is {value!r}, not {expected!r}")
    if args.num_experts and getattr(args, "moe_router_load_balancing_type", None) in ROUTING:
        raise UserError(
            f"the family {family} cannot hold this model: its moe_router_load_balancing_type changes which experts "
            "are chosen"
        )


def check_gate(args: argparse.Namespace, family: str, *allowed: GateConfig) -> None:
    """Raise UserError unless the model's gate is one of those allowed, whatever its row alignment."""
    gate = gate_config_from_args(args)
    if gate not in [replace(option, row_alignment=gate.row_alignment) for option in allowed]:
        raise UserError(f"the family {family} cannot hold a model with the gate {describe(gate)}")


@dataclass(frozen=True)
class Block:
    """A transformer block: an attention layer and a feed-forward layer of the hybrid pattern."""

    index: int
    attention: str
    """The layer's symbol."""
    feed_forward: str

    @property
    def hf(self) -> str:
        """The prefix of the block's tensors in a Hugging Face checkpoint, under that of the model."""
        return f"layers.{self.index}."

    @property
    def attention_prefix(self) -> str:
        """The prefix of the attention layer's tensors in Megatron's."""
        return f"decoder.layers.{2 * self.index}."

    @property
    def feed_forward_prefix(self) -> str:
        """The prefix of the feed-forward layer's."""
        return f"decoder.layers.{2 * self.index + 1}."


def blocks(args: argparse.Namespace) -> list[Block]:
    """Return the blocks of a model's hybrid layer pattern.

    Raises:
        UserError: the layers are no blocks.
    """
    layers = args.hybrid_layer_pattern.replace(BOUNDARY, "")
    pairs = [layers[index : index + 2] for index in range(0, len(layers), 2)]
    known = [attention + feed_forward for attention in (ATTENTION, DELTA_NET) for feed_forward in (DENSE, EXPERTS)]
    if not set(pairs) <= set(known):
        raise UserError(
            f"the layers {args.hybrid_layer_pattern!r} are not blocks of attention and a feed-forward layer, which is "
            "all that Hugging Face models have"
        )
    return [Block(index, *pair) for index, pair in enumerate(pairs)]
