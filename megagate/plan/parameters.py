"""The parameters of a model, tensor by tensor, as one rank of any layout holds them.

It is a list written from the arguments alone, so that a plan needs no model; tests hold it against Megatron's models
name for name. Letters in comments: H hidden size, d channels per head.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from megagate.gate.config import GateInput, GatePosition, gate_config_from_args
from megagate.gate.layout import layout_from_args
from megagate.model.pattern import ATTENTION, BOUNDARY, DELTA_NET, DENSE, EXPERTS


@dataclass(frozen=True)
class Tensor:
    """A parameter as one rank holds it."""

    name: str
    """The end of Megatron's name; the layer is not in it."""
    shape: tuple[int, ...]
    part: str
    """What it is counted under, for example "attention"."""
    is_expert: bool = False
    """Whether it is reduced over the ranks that hold the same experts."""
    is_shared: bool = False
    """Whether it is an embedding that two pipeline stages hold."""
    gate: int = 0
    """How many of its elements are the gate's, padding included."""

    @property
    def size(self) -> int:
        """The number of its elements."""
        product = 1
        for length in self.shape:
            product *= length
        return product


def chunk_tensors(
    args: argparse.Namespace, layers: str, first: bool, last: bool, *, tensor: int, expert: int, expert_tensor: int
) -> list[Tensor]:
    """Return the parameters of a model chunk in Megatron's order.

    Args:
        args: checked arguments of the run; their parallel sizes are not read.
        layers: the chunk's part of the hybrid layer pattern.
        first: whether it is the model's first, which holds the embedding.
        last: whether it is the model's last, which holds the output layer.
        tensor: tensor-parallel size.
        expert: expert-parallel size.
        expert_tensor: expert-tensor-parallel size.
    """
    held: list[Tensor] = []
    tied = not args.untie_embeddings_and_output_weights
    vocabulary = (args.padded_vocab_size // tensor, args.hidden_size)
    if first:
        held.append(Tensor("word_embeddings.weight", vocabulary, "embedding", is_shared=tied and not last))
        if args.position_embedding_type == "learned_absolute":
            shape = (args.max_position_embeddings, args.hidden_size)
            held.append(Tensor("position_embeddings.weight", shape, "embedding"))
    kinds = {
        ATTENTION: lambda: _attention(args, tensor),
        DELTA_NET: lambda: _delta_net(args, tensor),
        DENSE: lambda: _dense(args, tensor),
        EXPERTS: lambda: _experts(args, tensor, expert, expert_tensor),
    }
    known = {symbol: list(kinds[symbol]()) for symbol in set(layers)}
    for symbol in layers:
        held += known[symbol]
    if last:
        held += _norm(args, "final_norm", args.hidden_size)
        if not (tied and first):
            held.append(Tensor("output_layer.weight", vocabulary, "output layer", is_shared=tied))
    return held


def model_tensors(args: argparse.Namespace) -> list[Tensor]:
    """Return the parameters of the whole model, each once, as a single rank would hold them."""
    layers = args.hybrid_layer_pattern.replace(BOUNDARY, "")
    return chunk_tensors(args, layers, True, True, tensor=1, expert=1, expert_tensor=1)


def count(args: argparse.Namespace) -> tuple[int, int]:
    """Return the number of the model's parameters, and of those that one token passes through.

    Both count embeddings, the padding of the vocabulary and of a gate's rows, and shared experts in full; the second
    counts the routed experts' parameters at top-k / experts of their number.
    """
    held = model_tensors(args)
    total, routed = sum(tensor.size for tensor in held), sum(tensor.size for tensor in held if tensor.is_expert)
    if not routed:
        return total, total
    return total, total - routed + routed * args.moe_router_topk // args.num_experts


def _norm(args: argparse.Namespace, name: str, size: int, part: str = "norms") -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (size,), part)
    if args.normalization == "LayerNorm":
        yield Tensor(f"{name}.bias", (size,), part)


def _linear(name: str, rows: int, columns: int, bias: bool, part: str, gate_rows: int = 0) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (rows, columns), part, gate=gate_rows * columns)
    if bias:
        yield Tensor(f"{name}.bias", (rows,), part, gate=gate_rows)


def _attention(args: argparse.Namespace, tensor: int) -> Iterator[Tensor]:
    gate, layout = gate_config_from_args(args), layout_from_args(args)
    width = args.num_attention_heads * layout.kv_channels
    gate_rows = layout.total_rows - (args.num_attention_heads + 2 * layout.num_query_groups) * layout.kv_channels
    yield from _norm(args, "input_layernorm", args.hidden_size)
    if gate.input == GateInput.CONSTANT:
        size = args.num_attention_heads * layout.gate_channels // tensor
        yield Tensor("gate_constant", (size,), "attention", gate=size)
    if gate.sdpa_output_norm:
        yield Tensor("sdpa_norm_weight", (width // tensor,), "attention", gate=width // tensor)
    yield from _linear("linear_proj", args.hidden_size, width // tensor, args.add_bias_linear, "attention")
    bias = args.add_bias_linear or args.add_qkv_bias
    rows = layout.total_rows // tensor
    yield from _linear("linear_qkv", rows, args.hidden_size, bias, "attention", gate_rows // tensor)
    if args.qk_layernorm:
        yield from _norm(args, "q_layernorm", layout.kv_channels)
        yield from _norm(args, "k_layernorm", layout.kv_channels)
    if gate.position == GatePosition.OUTPUT:
        size = args.hidden_size
        yield Tensor("linear_gate.weight", (size, size), "attention", gate=size * size)


def _delta_net(args: argparse.Namespace, tensor: int) -> Iterator[Tensor]:
    part = "linear attention"
    keys = args.linear_num_key_heads * args.linear_key_head_dim
    values = args.linear_num_value_heads * args.linear_value_head_dim
    heads = args.linear_num_value_heads
    yield from _norm(args, "input_layernorm", args.hidden_size)
    yield Tensor("dt_bias", (heads // tensor,), part)
    yield Tensor("A_log", (heads // tensor,), part)
    # Queries and keys, values and the output gate, write strength and decay of each head.
    rows = (2 * keys + 2 * values + 2 * heads) // tensor
    yield from _linear("in_proj", rows, args.hidden_size, False, part)
    yield Tensor("conv1d.weight", ((2 * keys + values) // tensor, 1, args.linear_conv_kernel_dim), part)
    yield from _norm(args, "out_norm", args.linear_value_head_dim, part)
    yield from _linear("out_proj", args.hidden_size, values // tensor, False, part)


def _mlp(args: argparse.Namespace, prefix: str, channels: int, bias: bool, part: str) -> Iterator[Tensor]:
    yield from _linear(f"{prefix}linear_fc1", channels * (2 if args.swiglu else 1), args.hidden_size, bias, part)
    yield from _linear(f"{prefix}linear_fc2", args.hidden_size, channels, bias, part)


def _dense(args: argparse.Namespace, tensor: int) -> Iterator[Tensor]:
    yield from _norm(args, "pre_mlp_layernorm", args.hidden_size)
    yield from _mlp(args, "mlp.", args.ffn_hidden_size // tensor, args.add_bias_linear, "dense MLP")


def _experts(args: argparse.Namespace, tensor: int, expert: int, expert_tensor: int) -> Iterator[Tensor]:
    yield from _norm(args, "pre_mlp_layernorm", args.hidden_size)
    yield Tensor("router.weight", (args.num_experts, args.hidden_size), "router")
    channels = args.moe_ffn_hidden_size // expert_tensor
    for index in range(args.num_experts // expert):
        for held in _mlp(args, f"local_experts.{index}.", channels, args.add_bias_linear, "experts"):
            yield Tensor(held.name, held.shape, held.part, is_expert=True)
    if args.moe_shared_expert_intermediate_size:
        if args.moe_shared_expert_gate:
            yield Tensor("shared_experts.gate_weight", (1, args.hidden_size), "shared expert")
        channels = args.moe_shared_expert_intermediate_size // tensor
        yield from _mlp(args, "shared_experts.", channels, args.add_bias_linear, "shared expert")
