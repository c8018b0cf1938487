"""megagate's own models, for those that no public architecture holds: any gate, and all that the torch backend trains.

The other side is `megagate/checkpoint/exported/modeling_megagate.py`, which is written beside the weights. Its rows are
in the usual order (by head, then channel), the gate's are a weight of their own, and headwise gates have no padding.

Megatron numbers attention and feed-forward layers one after another; here an attention layer and the feed-forward layer
after it are one block.
"""

import argparse
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from megagate.checkpoint.families import megagate_rules as rules_of
from megagate.checkpoint.families.base import Rule
from megagate.checkpoint.families.yarn import yarn_arguments, yarn_parameters
from megagate.errors import UserError
from megagate.gate.config import GateConfig, describe, gate_config_from_args
from megagate.gate.layout import query_groups
from megagate.model.pattern import ATTENTION, BOUNDARY, DELTA_NET, DENSE, EXPERTS

MODEL_TYPE = "megagate"
MODELING_FILE = Path(__file__).parent.parent / "exported" / "modeling_megagate.py"

NOT_HELD: dict[str, tuple[tuple[Any, ...], str]] = {
    "apply_residual_connection_post_layernorm": ((False,), "residual connections start after the norm"),
    "apply_query_key_layer_scaling": ((False,), "attention logits are scaled by layer"),
    "rotary_interleaved": ((False,), "rotary embedding pairs neighbouring channels"),
    "softmax_type": (("vanilla",), "the softmax of attention has an offset"),
    "use_mup": ((False,), "activations and logits are scaled"),
    "glu_linear_offset": ((0.0,), "the linear half of a gated MLP has an offset"),
    "activation_func_clamp_value": ((None,), "the activation of the MLP is clamped"),
    "moe_latent_size": ((None,), "experts work in a latent space"),
    "moe_apply_probs_on_input": ((False,), "the router's weights apply to the input of experts"),
    "moe_router_group_topk": ((None, 0), "experts are chosen by groups"),
    "moe_router_force_load_balancing": ((False,), "experts are chosen at random"),
    "moe_router_force_biased": ((None,), "the choice of experts is biased at random"),
    "mtp_num_layers": ((None, 0), "there are layers for multi-token prediction"),
}
"""Arguments that can change the model to one that the modeling file does not know: values that do not, and a reason."""

ROUTING = ("sinkhorn", "quantile_balancing")
"""Values of --moe-router-load-balancing-type that choose experts otherwise than by the largest scores."""

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "silu": {"swiglu": True},
    "quick_gelu": {"quick_geglu": True, "bias_gelu_fusion": False},
    "relu2": {"squared_relu": True, "bias_gelu_fusion": False},
    "gelu": {"bias_gelu_fusion": False},
    "gelu_pytorch_tanh": {"bias_gelu_fusion": True},  # Megatron's fused kernel has the approximation
}
"""transformers' name of an activation -> Megatron's arguments."""

GATED_ACTIVATIONS = ("silu", "quick_gelu")

GATE_AXES = tuple(axis.name for axis in fields(GateConfig) if not axis.name.startswith("switch_head_"))
"""The axes of a gate that the modeling file knows."""

SAME: dict[str, str] = {
    "hidden_size": "hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "initializer_range": "init_method_std",
    "num_attention_heads": "num_attention_heads",
    "head_dim": "kv_channels",
    "qk_norm": "qk_layernorm",
    "qkv_bias": "add_qkv_bias",
    "linear_bias": "add_bias_linear",
    "norm": "normalization",
    "norm_eps": "layernorm_epsilon",
    "zero_centered_norms": "layernorm_zero_centered_gamma",
    "intermediate_size": "ffn_hidden_size",
}
"""Keys of config.json -> arguments with the same meaning and values."""

SAME_FOR_EXPERTS: dict[str, str] = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "shared_expert_gate": "moe_shared_expert_gate",
    "router_score_function": "moe_router_score_function",
    "router_softmax_before_topk": "moe_router_pre_softmax",
    "router_scaling_factor": "moe_router_topk_scaling_factor",
    "router_expert_bias": "moe_router_enable_expert_bias",
}

DELTA_NET_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
"""Keys of config.json and arguments alike."""

ROUTER_DTYPES = {"float32": "fp32", "float64": "fp64", None: None}
POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none"}

FLAGS = {"layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}
"""Arguments whose flags have another name."""

NEGATIVE_FLAGS = {
    "add_bias_linear": "disable_bias_linear",
    "bias_gelu_fusion": "no_bias_gelu_fusion",
    "yarn_correction_range_round_to_int": "no_yarn_correction_range_round_to_int",
}
"""Arguments that are true unless their flag is given."""


@dataclass(frozen=True)
class MegagateFamily:
    """Holds every gate, dense and expert layers, Gated DeltaNet, and any order of these."""

    name: str = MODEL_TYPE
    files: tuple[Path, ...] = (MODELING_FILE,)
    """What belongs beside the weights."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Nothing is left out on import."""

    def recognises(self, config: dict[str, Any]) -> bool:
        """Whether megagate wrote this config.json."""
        return config.get("model_type") == MODEL_TYPE

    def config(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return config.json; `MegagateConfig` in the modeling file says what the keys mean.

        Raises:
            UserError: the model has something that the modeling file does not know.
        """
        _check_held(args)
        layers = args.hybrid_layer_pattern.replace(BOUNDARY, "")
        activation = _activation(args)
        gate = [(axis, value) for axis, value in asdict(gate_config_from_args(args)).items() if axis in GATE_AXES]
        config = {
            "architectures": ["MegagateForCausalLM"],
            "model_type": MODEL_TYPE,
            "auto_map": {
                "AutoConfig": f"{MODELING_FILE.stem}.MegagateConfig",
                "AutoModel": f"{MODELING_FILE.stem}.MegagateModel",
                "AutoModelForCausalLM": f"{MODELING_FILE.stem}.MegagateForCausalLM",
            },
            "dtype": str(args.params_dtype).removeprefix("torch."),
            "vocab_size": args.tokenizer_vocab_size,
            "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
            "hybrid_layer_pattern": layers,
            "gate": {axis: str(value) if isinstance(value, StrEnum) else value for axis, value in gate},
            "num_key_value_heads": query_groups(args),
            "hidden_act": activation,
            "gated_mlp": activation in GATED_ACTIVATIONS,
            **_positions(args, layers),
            **_window(args, layers),
            **{key: getattr(args, name) for key, name in SAME.items()},
        }
        if EXPERTS in layers:
            config |= {key: getattr(args, name) for key, name in SAME_FOR_EXPERTS.items()}
            config["shared_expert_intermediate_size"] = args.moe_shared_expert_intermediate_size or 0
            config["router_dtype"] = {name: key for key, name in ROUTER_DTYPES.items()}[args.moe_router_dtype]
        if DELTA_NET in layers:
            config |= {name: getattr(args, name) for name in DELTA_NET_SIZES}
        return config

    def arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the flags of the model that megagate wrote as `config`.

        Raises:
            UserError: megagate did not write it.
        """
        if not self.recognises(config):
            raise UserError(f"config.json has model_type {config.get('model_type')!r}, not {MODEL_TYPE!r}")
        try:
            return self._arguments(config)
        except KeyError as error:
            raise UserError(f"config.json lacks {error}, or has it as a value: megagate did not write it so") from error

    def check_understood(self, config: dict[str, Any], args: argparse.Namespace) -> None:
        """Check that a config, of which one may have changed keys, is the one of the model that `args` describe.

        Raises:
            UserError: a key has a value that has no counterpart.
        """
        for key, value in self.config(args).items():
            if key not in ("architectures", "auto_map", "dtype") and config.get(key) != value:
                raise UserError(f"config.json has {key} {config.get(key)!r}, but what can be represented is {value!r}")

    def _arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        layers, rows = config["hybrid_layer_pattern"], config["vocab_size"]
        arguments: dict[str, Any] = {
            **{name: config[key] for key, name in SAME.items()},
            **{axis if axis.startswith("sdpa_") else f"gate_{axis}": value for axis, value in config["gate"].items()},
            **ACTIVATIONS[config["hidden_act"]],
            "vocab_size": rows,
            "make_vocab_size_divisible_by": min(rows & -rows, 128),  # so that no row is padding
            "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
            "group_query_attention": True,
            "num_query_groups": config["num_key_value_heads"],
            **_position_arguments(config),
            **_layer_arguments(config),
        }
        if config["sliding_window"]:
            arguments["window_size"] = f"{config['sliding_window'] - 1},0"
        if EXPERTS in layers:
            arguments |= {name: config[key] for key, name in SAME_FOR_EXPERTS.items()}
            arguments["moe_shared_expert_intermediate_size"] = config["shared_expert_intermediate_size"] or None
            arguments["moe_router_dtype"] = ROUTER_DTYPES[config["router_dtype"]]
        if DELTA_NET in layers:
            arguments |= {name: config[name] for name in DELTA_NET_SIZES}
            arguments["experimental_attention_variant"] = "gated_delta_net"
        return _as_flags(arguments)

    def rules(self, args: argparse.Namespace, config: dict[str, Any], names: Collection[str] = ()) -> Iterator[Rule]:
        """Yield the rules, in the order of the layers; `config` alone determines them."""
        rows, hidden = config["vocab_size"], config["hidden_size"]
        yield rules_of.pair("model.embed_tokens.weight", "embedding.word_embeddings.weight", rows, hidden)
        if config["position_embedding"] == "learned":
            shape = (config["max_position_embeddings"], hidden)
            yield rules_of.pair("model.embed_positions.weight", "embedding.position_embeddings.weight", *shape)
        number = 0
        for index, block in enumerate(_blocks(config["hybrid_layer_pattern"])):
            for layer in block:
                yield from rules_of.layer(config, layer, f"model.layers.{index}", f"decoder.layers.{number}")
                number += 1
        yield from rules_of.norm(config, "model.norm", "decoder.final_norm", hidden)
        if not config["tie_word_embeddings"]:
            yield rules_of.pair("lm_head.weight", "output_layer.weight", rows, hidden)


FAMILY = MegagateFamily()


# ---------------------------------------------------------------------------------------------------------------------
# From arguments to config.json


def _check_held(args: argparse.Namespace) -> None:
    for name, (values, reason) in NOT_HELD.items():
        if getattr(args, name, values[0]) not in values:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"the model was trained with {flag} ({reason}), which megagate's export does not know")
    unknown = set(args.hybrid_layer_pattern) - {ATTENTION, DELTA_NET, DENSE, EXPERTS, BOUNDARY}
    if unknown:
        raise UserError(f"megagate's export does not know the layers {', '.join(sorted(unknown))} of the layer pattern")
    if ATTENTION not in args.hybrid_layer_pattern:
        raise UserError("megagate's export needs an attention layer (*), since it counts tokens in that layer's cache")
    gate = gate_config_from_args(args)
    if gate.is_switch_head:
        raise UserError(f"megagate's export does not know Switch-Head, which the model has ({describe(gate)})")
    balancing = args.moe_router_load_balancing_type
    for routing in ROUTING:
        if args.num_experts and routing in (balancing if isinstance(balancing, list) else [balancing]):
            raise UserError(f"megagate's export does not know --moe-router-load-balancing-type {routing}")
    if args.position_embedding_type not in (*POSITIONS.values(), "yarn"):
        raise UserError(f"megagate's export does not know --position-embedding-type {args.position_embedding_type}")


def _activation(args: argparse.Namespace) -> str:
    if args.swiglu:
        return "silu"
    if args.quick_geglu:
        return "quick_gelu"
    if args.squared_relu:
        return "relu2"
    return "gelu_pytorch_tanh" if args.bias_gelu_fusion else "gelu"


def _blocks(layers: str) -> list[str]:
    """Return the layers of each block: an attention layer with the feed-forward layer after it, or either alone."""
    return re.findall(r"[*G][-E]?|[-E]", layers)


def _by_block(layers: str, values: Sequence[int]) -> list[int]:
    """Return the value of each block's first layer."""
    result, start = [], 0
    for block in _blocks(layers):
        result.append(int(values[start]))
        start += len(block)
    return result


def _window(args: argparse.Namespace, layers: str) -> dict[str, Any]:
    """Megatron counts the tokens before the query; transformers the query too."""
    before, chosen = (args.window_size or (-1, 0))[0], args.window_attn_skip_freq
    if before < 0:
        return {"sliding_window": None, "sliding_layers": None}
    if isinstance(chosen, int):
        chosen = [(number + 1) % chosen != 0 for number in range(len(layers))]
    return {"sliding_window": before + 1, "sliding_layers": _by_block(layers, chosen) if chosen else None}


def _positions(args: argparse.Namespace, layers: str) -> dict[str, Any]:
    kind, without = args.position_embedding_type, args.no_rope_freq
    if kind not in ("rope", "yarn"):
        name = {value: key for key, value in POSITIONS.items()}[kind]
        return {"position_embedding": name, "rope_parameters": None, "rope_layers": None}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(args.rotary_base)}
    if kind == "yarn":
        rope = yarn_parameters(args)
    elif args.rotary_seq_len_interpolation_factor:
        rope |= {"rope_type": "linear", "factor": float(args.rotary_seq_len_interpolation_factor)}
    rope["partial_rotary_factor"] = args.rotary_percent
    if isinstance(without, int):
        without = [(number + 1) % without == 0 for number in range(len(layers))]
    with_rope = [1 - value for value in _by_block(layers, without)] if without else None
    return {"position_embedding": "rope", "rope_parameters": rope, "rope_layers": with_rope}


# ---------------------------------------------------------------------------------------------------------------------
# From config.json to flags


def _position_arguments(config: dict[str, Any]) -> dict[str, Any]:
    if config["position_embedding"] != "rope":
        return {"position_embedding_type": POSITIONS[config["position_embedding"]]}
    rope = config["rope_parameters"]
    arguments = {"position_embedding_type": "rope", "rotary_base": int(rope["rope_theta"])}
    arguments["rotary_percent"] = rope.get("partial_rotary_factor", 1.0)
    if rope["rope_type"] == "yarn":
        return arguments | yarn_arguments(rope, config["max_position_embeddings"])
    if rope["rope_type"] not in ("default", "linear"):
        raise UserError(f"rope_type {rope['rope_type']!r} in config.json has no counterpart in Megatron")
    if rope["rope_type"] == "linear":
        arguments["rotary_seq_len_interpolation_factor"] = int(rope["factor"])
    return arguments


def _layer_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Return which layers there are and what differs between them: by block, if each has two layers, else by layer."""
    layers, with_rope = config["hybrid_layer_pattern"], config["rope_layers"]
    blocks = _blocks(layers)
    settings: dict[str, list[int] | None] = {
        "no_rope_freq": [1 - value for value in with_rope] if with_rope else None,
        "window_attn_skip_freq": config["sliding_layers"],
    }
    if any(len(block) != 2 for block in blocks):
        for name, values in settings.items():
            if values:
                settings[name] = [value for value, block in zip(values, blocks, strict=True) for _ in block]
        return {"hybrid_layer_pattern": layers, **settings}
    if EXPERTS in layers:
        settings["moe_layer_freq"] = [int(block[1] == EXPERTS) for block in blocks]
    if DELTA_NET in layers:
        settings["linear_attention_freq"] = [int(block[0] == DELTA_NET) for block in blocks]
    return {"num_layers": len(blocks), **settings}


def _as_flags(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as a recipe has them, without those that are None."""
    flags: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in NEGATIVE_FLAGS:
            flags[NEGATIVE_FLAGS[name]] = not value
        elif value is not None:
            flags[FLAGS.get(name, name)] = value
    return flags
