"""The rules of megagate's own models, layer by layer.

`hf` and `megatron` are what the names on the two sides begin with, `config` is config.json.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagate.checkpoint.families.base import Rule, Weight
from megagate.errors import UserError
from megagate.gate.config import GateConfig, GateInput, GatePosition
from megagate.gate.layout import QKVLayout
from megagate.model.pattern import ATTENTION, DELTA_NET, EXPERTS


def pair(hf: str, megatron: str, *shape: int) -> Rule:
    return Rule((Weight(hf, shape),), (Weight(megatron, shape),))


def layer(config: dict[str, Any], kind: str, hf: str, megatron: str) -> Iterator[Rule]:
    """Yield the rules of one of Megatron's layers, named by its symbol; `hf` is the block that has it."""
    is_attention = kind in (ATTENTION, DELTA_NET)
    norms = (
        ("input_layernorm", "input_layernorm") if is_attention else ("post_attention_layernorm", "pre_mlp_layernorm")
    )
    yield from norm(config, f"{hf}.{norms[0]}", f"{megatron}.{norms[1]}", config["hidden_size"])
    if kind == ATTENTION:
        yield from attention(config, f"{hf}.self_attn", f"{megatron}.self_attention")
    elif kind == DELTA_NET:
        yield from delta_net(config, f"{hf}.linear_attn", f"{megatron}.self_attention")
    elif kind == EXPERTS:
        yield from experts(config, f"{hf}.mlp", f"{megatron}.mlp")
    else:
        yield from mlp(config, f"{hf}.mlp", f"{megatron}.mlp", config["intermediate_size"], config["linear_bias"])


def norm(config: dict[str, Any], hf: str, megatron: str, size: int) -> Iterator[Rule]:
    yield pair(f"{hf}.weight", f"{megatron}.weight", size)
    if config["norm"] == "LayerNorm":
        yield pair(f"{hf}.bias", f"{megatron}.bias", size)


def attention(config: dict[str, Any], hf: str, megatron: str) -> Iterator[Rule]:
    gate, hidden = GateConfig(**config["gate"]), config["hidden_size"]
    heads, groups, channels = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    layout = QKVLayout(heads, groups, channels, gate)
    rows = {"q_proj": heads * channels, "gate_proj": groups * layout.gate_rows}
    rows |= {"k_proj": groups * channels, "v_proj": groups * channels}
    for kind, columns in [("weight", (hidden,))] + ([("bias", ())] if config["qkv_bias"] else []):
        qkv = _QKV(layout)
        yield Rule(
            tuple(Weight(f"{hf}.{name}.{kind}", (count, *columns)) for name, count in rows.items() if count),
            (Weight(f"{megatron}.linear_qkv.{kind}", (layout.total_rows, *columns)),),
            qkv.merge,
            qkv.split,
        )
    if gate.position == GatePosition.OUTPUT:
        yield pair(f"{hf}.gate_proj.weight", f"{megatron}.linear_gate.weight", hidden, hidden)
    if gate.input == GateInput.CONSTANT:
        yield _by_head(f"{hf}.gate_constant", f"{megatron}.gate_constant", heads, layout.gate_channels)
    if gate.sdpa_output_norm:
        yield _by_head(f"{hf}.sdpa_norm.weight", f"{megatron}.sdpa_norm_weight", heads, channels)
    if config["qk_norm"]:
        yield from norm(config, f"{hf}.q_norm", f"{megatron}.q_layernorm", channels)
        yield from norm(config, f"{hf}.k_norm", f"{megatron}.k_layernorm", channels)
    yield pair(f"{hf}.o_proj.weight", f"{megatron}.linear_proj.weight", hidden, heads * channels)
    if config["linear_bias"]:
        yield pair(f"{hf}.o_proj.bias", f"{megatron}.linear_proj.bias", hidden)


@dataclass(frozen=True)
class _QKV:
    """The rows of linear_qkv as parts: query, gate where it is there, key, value."""

    layout: QKVLayout

    def merge(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        query, *gate, key, value = parts
        return [self.layout.merge_weight(query, gate[0] if gate else None, key, value)]

    def split(self, merged: Sequence[Tensor]) -> Sequence[Tensor]:
        (weight,) = merged
        padding = self.layout.padding_row_mask().to(weight.device)
        if not weight.is_meta and weight[padding].count_nonzero():
            raise UserError("padding rows of the gate in linear_qkv are not zero: the checkpoint is damaged")
        return [part for part in self.layout.split_weight(weight) if part is not None]


def _by_head(hf: str, megatron: str, heads: int, channels: int) -> Rule:
    return Rule(
        (Weight(hf, (heads, channels)),),
        (Weight(megatron, (heads * channels,)),),
        lambda tensors: [tensors[0].flatten()],
        lambda tensors: [tensors[0].unflatten(0, (heads, channels))],
    )


def delta_net(config: dict[str, Any], hf: str, megatron: str) -> Iterator[Rule]:
    hidden, width = config["hidden_size"], config["linear_conv_kernel_dim"]
    value_heads, value_channels = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = value_heads * value_channels
    sizes = {"query": keys, "key": keys, "value": values, "z": values, "beta": value_heads, "alpha": value_heads}
    for name, size in sizes.items():
        yield pair(f"{hf}.{_short(name)}_proj.weight", f"{megatron}.in_proj.weight.{name}", size, hidden)
    for name in ("query", "key", "value"):
        yield pair(f"{hf}.{_short(name)}_conv.weight", f"{megatron}.conv1d.weight.{name}", sizes[name], 1, width)
    yield pair(f"{hf}.A_log", f"{megatron}.A_log", value_heads)
    yield pair(f"{hf}.dt_bias", f"{megatron}.dt_bias", value_heads)
    yield from norm(config, f"{hf}.norm", f"{megatron}.out_norm", value_channels)
    yield pair(f"{hf}.o_proj.weight", f"{megatron}.out_proj.weight", hidden, values)


def _short(name: str) -> str:
    return name[0]  # query, key, value, z, beta, alpha


def mlp(
    config: dict[str, Any], hf: str, megatron: str, size: int, bias: bool, expert: int | None = None
) -> Iterator[Rule]:
    """Megatron stacks the gate's projection on the other one."""
    hidden = config["hidden_size"]
    projections = ["gate_proj", "up_proj"] if config["gated_mlp"] else ["up_proj"]
    for kind, columns in [("weight", (hidden,))] + ([("bias", ())] if bias else []):
        yield Rule(
            tuple(Weight(f"{hf}.{name}.{kind}", (size, *columns)) for name in projections),
            (Weight(f"{megatron}.linear_fc1.{kind}", (len(projections) * size, *columns), expert),),
            lambda tensors: [torch.cat(list(tensors))],
            lambda tensors: tensors[0].split(size),
        )
    for kind, shape in [("weight", (hidden, size))] + ([("bias", (hidden,))] if bias else []):
        yield Rule(
            (Weight(f"{hf}.down_proj.{kind}", shape),), (Weight(f"{megatron}.linear_fc2.{kind}", shape, expert),)
        )


def experts(config: dict[str, Any], hf: str, megatron: str) -> Iterator[Rule]:
    hidden, experts = config["hidden_size"], config["num_experts"]
    yield pair(f"{hf}.router.weight", f"{megatron}.router.weight", experts, hidden)
    if config["linear_bias"]:
        yield pair(f"{hf}.router.bias", f"{megatron}.router.bias", experts)
    if config["router_expert_bias"]:
        yield pair(f"{hf}.router.expert_bias", f"{megatron}.router.expert_bias", experts)
    size, bias = config["moe_intermediate_size"], config["linear_bias"]
    for expert in range(experts):
        yield from mlp(config, f"{hf}.experts.{expert}", f"{megatron}.experts.experts", size, bias, expert)
    if config["shared_expert_intermediate_size"]:
        size = config["shared_expert_intermediate_size"]
        yield from mlp(config, f"{hf}.shared_expert", f"{megatron}.shared_experts", size, bias=False)
        if config["shared_expert_gate"]:
            yield pair(f"{hf}.shared_expert_gate.weight", f"{megatron}.shared_experts.gate_weight", 1, hidden)
