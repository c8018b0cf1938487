"""Bytes that a rank keeps from the forward to the backward pass of one micro batch, by layer and part.

Each term is a tensor that autograd saves in the torch backend, counted once where several operators save it. Tests hold
the sum against what torch's saved-tensor hooks see, with --no-gate-fusion, and the gate in one kernel, as GPUs compute
it, against what a layer keeps in Triton's interpreter. Gated DeltaNet is the exception: its kernels on GPUs are others
than on the CPU, so its sum is an estimate from their source and not held against a measurement.

Letters: H hidden size, q and g local query heads and KV groups, d channels per head, t channels of a gate's score.
"""

import argparse
from collections import Counter

from megagate.gate.config import (
    GateActivation,
    GateCombine,
    GateConfig,
    GateInput,
    GatePosition,
    GatePrecision,
    GateSharing,
    SdpaOutputActivation,
    gate_config_from_args,
)
from megagate.gate.layout import layout_from_args
from megagate.model.pattern import ATTENTION, DELTA_NET, DENSE, EXPERTS
from megagate.plan.layout import Layout

FP32, INT64 = 4, 8
DELTA_CHUNK = 64
"""Tokens after which the kernels of Gated DeltaNet keep a state."""


def chunk_activations(args: argparse.Namespace, layout: Layout, layers: str, first: bool, last: bool) -> Counter[str]:
    """Return the bytes of one micro batch in one model chunk, by part.

    Args:
        args: validated arguments.
        layout: of the run.
        layers: the chunk's part of the hybrid layer pattern.
        first: whether it is the model's first.
        last: whether it is the model's last.
    """
    total: Counter[str] = Counter()
    if first:
        total["embedding"] += layout.tokens * INT64
    if args.recompute_granularity == "full":
        total += _fully_recomputed(args, layout, layers)
    else:
        known = {symbol: layer_activations(args, layout, symbol) for symbol in set(layers)}
        for symbol in layers:
            total += known[symbol]
    if last:
        total += _norm(args, layout)
        total["output layer"] += layout.sharded_tokens * args.hidden_size * args.params_dtype.itemsize
        # The logarithms of all probabilities, the targets, and whether this rank holds them.
        total["output layer"] += layout.tokens * (args.padded_vocab_size // layout.tensor * FP32 + INT64 + 1)
    return total


def layer_activations(args: argparse.Namespace, layout: Layout, symbol: str) -> Counter[str]:
    """Return the bytes of one micro batch in one layer, named by its symbol in the pattern, by part."""
    recomputed = args.recompute_modules if args.recompute_granularity == "selective" else None
    recomputed = recomputed or ()
    kinds = {ATTENTION: _attention, DELTA_NET: _delta_net, DENSE: _dense, EXPERTS: _experts}
    total = _norm(args, layout) + kinds[symbol](args, layout, recomputed)
    if args.hidden_dropout:
        total["dropout"] += layout.sharded_tokens * args.hidden_size
    return total


def _fully_recomputed(args: argparse.Namespace, layout: Layout, layers: str) -> Counter[str]:
    """Return what --recompute-granularity full keeps: inputs of groups of layers, of all or of the first layers."""
    hidden = layout.sharded_tokens * args.hidden_size * args.params_dtype.itemsize
    if args.distribute_saved_activations:
        hidden //= layout.tensor
    every = args.recompute_num_layers or 1
    total: Counter[str] = Counter()
    if args.recompute_method == "block":
        total["recomputed layers' input"] += min(every, len(layers)) * hidden
        for symbol in layers[every:]:
            total += layer_activations(args, layout, symbol)
    else:
        total["recomputed layers' input"] += -(-len(layers) // every) * hidden
    return total


def _norm(args: argparse.Namespace, layout: Layout) -> Counter[str]:
    statistics = 1 if args.normalization == "RMSNorm" else 2
    return Counter(norms=layout.sharded_tokens * (args.hidden_size * args.params_dtype.itemsize + statistics * FP32))


def _attention(args: argparse.Namespace, layout: Layout, recomputed: tuple[str, ...]) -> Counter[str]:
    gate, rows = gate_config_from_args(args), layout_from_args(args)
    width, tokens, channels = args.params_dtype.itemsize, layout.tokens, rows.kv_channels
    heads = args.num_attention_heads // layout.tensor
    groups = max(1, rows.num_query_groups // layout.tensor)
    query, key = tokens * heads * channels * width, tokens * groups * channels * width
    # Where ranks share a KV group, each gathers all rows.
    mixed_rows = rows.total_rows if layout.tensor > rows.num_query_groups else rows.total_rows // layout.tensor
    saved = layout.sharded_tokens * args.hidden_size * width + tokens * mixed_rows * width
    is_gated = gate.position == GatePosition.QUERY
    # Flattening the groups of the queries copies them, unless a gate has made a new tensor of them.
    copied = not args.recompute_gate if is_gated else groups > 1
    if args.qk_layernorm:
        saved += query * copied + tokens * (heads + groups) * FP32
    is_rotary = args.position_embedding_type in ("rope", "yarn")
    if is_rotary:
        rotated = int(channels * args.rotary_percent)
        saved += 4 * layout.sequence // layout.context * rotated * width  # cosines and sines for queries and keys
    rotated_or_normed = args.qk_layernorm or is_rotary
    if rotated_or_normed or copied:
        saved += query
    if "core_attn" in recomputed:
        saved += key if rotated_or_normed else 0  # values are rows of linear_qkv
    else:
        if layout.context > 1:
            saved += 2 * key * layout.context  # of the whole sequence
            saved += _masks(layout, width)
            saved += query  # the chunks of the result are joined
        elif rotated_or_normed:
            saved += key
        saved += tokens * heads * FP32  # logarithms of the softmax' sums
    saved += query  # the result
    total = Counter(attention=saved)
    is_gathered = layout.context > 1 and "core_attn" not in recomputed  # attention keeps copies of keys and values
    total["gate"] = _gate(gate, args, layout, heads, groups, rows.gate_channels, is_gathered)
    return total


def _masks(layout: Layout, width: int) -> int:
    """Return the bytes of the masks of a rank's two chunks of queries, made for the rank with the longest keys."""
    length = layout.sequence // (2 * layout.context)
    keys = length * (2 * layout.context + 1)  # of chunk i and of chunk 2c-1-i, the same for all i
    return length * keys * width


def _gate(
    gate: GateConfig,
    args: argparse.Namespace,
    layout: Layout,
    heads: int,
    groups: int,
    score_channels: int,
    is_gathered: bool,
) -> int:
    """Return the bytes of gated tensors, and of scores, which the fused kernel does not keep."""
    width, channels, rebuilt = args.params_dtype.itemsize, args.kv_channels, args.recompute_gate
    if gate.sdpa_output_norm:
        product = layout.tokens * heads * channels
        return 0 if rebuilt else product * (2 * FP32 + width) + layout.tokens * heads * FP32
    if gate.sdpa_output_activation != SdpaOutputActivation.NONE:
        return 0 if rebuilt else layout.tokens * heads * channels * width
    if not gate.has_gate:
        return 0
    is_fused, adds = _is_fused(args, gate), gate.combine == GateCombine.ADD
    if gate.position == GatePosition.OUTPUT:
        count, scores = 1, layout.sharded_tokens * args.hidden_size
        # Neither what is gated nor its logits are views of a tensor that is kept anyway; the product goes into a sum.
        has_gated = not adds or (rebuilt and not is_fused)
        kept = scores * width * (has_gated + (is_fused or rebuilt))
    else:
        count = heads if gate.is_on_query_heads else groups
        scores = layout.tokens * count * score_channels
        # How often the product is kept: as the output projection's or attention's input, or as a norm's.
        is_value = gate.position in (GatePosition.VALUE, GatePosition.KEY_VALUE)
        read = gate.position == GatePosition.SDPA or (is_value and not is_gathered)
        normed = args.qk_layernorm and gate.position in (GatePosition.KEY, GatePosition.KEY_VALUE)
        kept = 0 if rebuilt else layout.tokens * count * channels * width * (read + normed)
        if gate.position == GatePosition.KEY_VALUE:
            scores *= 2  # computed for keys and for values
    if gate.input == GateInput.CONSTANT:
        scores = heads * score_channels
    shared = gate.sharing == GateSharing.HEAD_SHARED
    activated = 0 if gate.activation == GateActivation.IDENTITY else scores  # what the activation saves
    if is_fused and not (shared and layout.tensor > 1):
        return kept
    score_width = width if args.gate_precision == GatePrecision.BF16 else FP32
    if shared and (is_fused or rebuilt):  # the mean over heads is an input of what is fused or rebuilt
        return kept + (activated + scores // count) * score_width
    if rebuilt:
        return kept
    multiplied = 0 if adds else scores // count if shared else scores
    if gate.activation == GateActivation.SIGMOID and not shared:
        multiplied = 0  # the sigmoid has saved its result already
    if gate.switch_head_top_k < gate.switch_head_experts:
        multiplied = scores  # zero for some experts
        kept += scores  # and for which, a byte each
    return kept + (activated + multiplied) * score_width


def _is_fused(args: argparse.Namespace, gate: GateConfig) -> bool:
    """Return whether a GPU computes the gate in the kernel of `megagate.gate.fused`, which saves its inputs alone."""
    computed_once = gate.sharing == GateSharing.HEAD_SHARED and gate.input == GateInput.CONSTANT
    has_kernel = not (computed_once or gate.is_switch_head)
    return has_kernel and args.gate_fusion and args.gate_precision != GatePrecision.BF16


def _delta_net(args: argparse.Namespace, layout: Layout, recomputed: tuple[str, ...]) -> Counter[str]:
    """Estimate: input, mixed rows, convolved rows, normalised queries and keys, states by chunk, gated norm."""
    width, tokens = args.params_dtype.itemsize, layout.tokens
    keys = args.linear_num_key_heads * args.linear_key_head_dim // layout.tensor
    values = args.linear_num_value_heads * args.linear_value_head_dim // layout.tensor
    heads = args.linear_num_value_heads // layout.tensor
    repeated = heads * args.linear_key_head_dim  # queries and keys, once for each value head
    saved = layout.sharded_tokens * args.hidden_size * width
    saved += tokens * (2 * keys + 2 * values + 2 * heads) * width  # the projection
    saved += tokens * (2 * keys + values) * width  # convolved
    saved += tokens * 2 * repeated * width + tokens * values * width
    saved += tokens * heads * (DELTA_CHUNK * width + 4 * FP32)  # within chunks; decays and strengths
    saved += tokens // DELTA_CHUNK * heads * args.linear_key_head_dim * args.linear_value_head_dim * width
    saved += tokens * 2 * values * width  # the rule's result, and what the output projection reads
    return Counter({"linear attention": saved})


def _mlp(args: argparse.Namespace, tokens: int, channels: int) -> int:
    """Return the bytes between the two linear layers: the activation's input and its result."""
    return tokens * channels * (3 if args.swiglu else 2) * args.params_dtype.itemsize


def _dense(args: argparse.Namespace, layout: Layout, recomputed: tuple[str, ...]) -> Counter[str]:
    hidden = layout.sharded_tokens * args.hidden_size * args.params_dtype.itemsize
    between = 0 if "mlp" in recomputed else _mlp(args, layout.tokens, args.ffn_hidden_size // layout.tensor)
    return Counter({"dense MLP": hidden + between})


def _experts(args: argparse.Namespace, layout: Layout, recomputed: tuple[str, ...]) -> Counter[str]:
    width, tokens, experts, top_k = (
        args.params_dtype.itemsize,
        layout.sharded_tokens,
        args.num_experts,
        args.moe_router_topk,
    )
    total = Counter(router=tokens * args.hidden_size * width)
    if "moe" in recomputed:
        return total
    total["router"] += tokens * top_k * (INT64 + FP32)  # which experts, and their probabilities
    if args.moe_z_loss_coeff:
        total["router"] += tokens * (experts + 1) * FP32
    if args.moe_router_load_balancing_type != "none" and args.moe_aux_loss_coeff:
        total["router"] += tokens * experts * FP32
    total["dispatch"] += tokens * top_k * 3 * INT64  # where each row comes from
    # Every rank gets as many rows as it sends where experts are used alike; an expert-tensor group gathers them.
    rows = tokens * top_k * layout.expert_tensor
    channels = args.moe_ffn_hidden_size // layout.expert_tensor
    total["experts"] += rows * ((args.hidden_size + 2 * channels) * width + FP32)
    shared = args.moe_shared_expert_intermediate_size
    if shared and "shared_experts" not in recomputed:
        total["shared expert"] += _mlp(args, layout.tokens, shared // layout.tensor)
        if args.moe_shared_expert_gate:
            total["shared expert"] += tokens * (args.hidden_size + 1) * width
    return total
