"""Floating-point operations of a model, split by part, as a rank executes them.

What a run logs as throughput, and what MFU is a share of, is `megagate.pretrain.flops`: Megatron's count with the gate.
Here the same matrix products are counted one by one from the list of parameters, with what that count leaves out: the
router, the padding of a gate's rows, the part of attention that its backward pass computes again, and recomputation.
Two operations for a multiplication with its addition.
"""

import argparse
from collections import Counter

from megagate.gate.config import GatePosition, gate_config_from_args
from megagate.model.pattern import ATTENTION, BOUNDARY, DELTA_NET
from megagate.plan.layout import Layout
from megagate.plan.parameters import chunk_tensors

CORE_ATTENTION, DELTA_RULE = "core attention", "delta rule"
FLASH_BACKWARD = 2.5
"""The flash backward pass has 5 matrix products where the forward has 2 (Dao 2023, arXiv 2307.08691)."""

FORWARD_OF = {
    "core_attn": (CORE_ATTENTION,),
    "mlp": ("dense MLP",),
    "moe": ("router", "experts", "shared expert"),
    "shared_experts": ("shared expert",),
}
"""What --recompute-modules computes again, beside element by element operations."""


def forward_operations(
    args: argparse.Namespace, layers: str, first: bool, last: bool, *, causal: bool = True
) -> Counter[str]:
    """Return the operations for one token in the forward pass of some layers, by part, over all tensor-parallel ranks.

    Args:
        args: validated arguments.
        layers: a part of the hybrid layer pattern.
        first: whether the embedding is before them; it has no operations.
        last: whether the output layer is after them.
        causal: count what a kernel computes that skips the future, half of the square of all positions.
    """
    total: Counter[str] = Counter()
    # One expert of each layer stands for those that a token goes to.
    for tensor in chunk_tensors(args, layers, first, last, tensor=1, expert=args.num_experts or 1, expert_tensor=1):
        if len(tensor.shape) == 1 or tensor.part == "embedding":
            continue
        size = tensor.size * args.moe_router_topk if tensor.is_expert else tensor.size
        total[tensor.part] += 2 * (size - tensor.gate)
        total["gate"] += 2 * tensor.gate
    if first and last and not args.untie_embeddings_and_output_weights:
        total["output layer"] += 2 * args.padded_vocab_size * args.hidden_size
    width = args.num_attention_heads * args.kv_channels
    keys = args.seq_length // 2 if causal else args.seq_length
    total[CORE_ATTENTION] += layers.count(ATTENTION) * 2 * 2 * width * keys
    if DELTA_NET in layers:  # Megatron's count of the rule: four products with the state of each head
        state = args.linear_num_value_heads * args.linear_key_head_dim * args.linear_value_head_dim
        total[DELTA_RULE] += layers.count(DELTA_NET) * 2 * 4 * state
    return +total


def backward_operations(forward: Counter[str]) -> Counter[str]:
    """Return the operations of the backward pass: two products for each of the forward pass, more in attention."""
    return Counter(
        {part: int(count * (FLASH_BACKWARD if part == CORE_ATTENTION else 2)) for part, count in forward.items()}
    )


def recomputed_operations(
    args: argparse.Namespace, layers: str, forward: Counter[str], *, causal: bool = True
) -> Counter[str]:
    """Return the operations of the forward pass of some layers, for one token, that recomputation repeats."""
    if args.recompute_granularity == "selective":
        parts = {part for module in args.recompute_modules for part in FORWARD_OF.get(module, ())}
        return Counter({part: count for part, count in forward.items() if part in parts})
    if args.recompute_granularity != "full":
        return Counter()
    recomputed = layers[: args.recompute_num_layers] if args.recompute_method == "block" else layers
    return forward_operations(args, recomputed, False, False, causal=causal)


def rank_operations(args: argparse.Namespace, layout: Layout, pipeline_rank: int) -> dict[str, Counter[str]]:
    """Return what one rank executes for one micro batch: "forward", "backward" and "recompute", each by part."""
    totals: dict[str, Counter[str]] = {name: Counter() for name in ("forward", "backward", "recompute")}
    for layers, first, last in layout.chunks(args.hybrid_layer_pattern, pipeline_rank):
        forward = forward_operations(args, layers, first, last)
        totals["forward"] += forward
        totals["backward"] += backward_operations(forward)
        totals["recompute"] += recomputed_operations(args, layers, forward)
    whole = gate_config_from_args(args).position == GatePosition.OUTPUT and not layout.sequence_parallel
    for parts in totals.values():
        for part in parts:
            ranks = 1 if whole and part == "gate" else layout.tensor
            parts[part] = parts[part] * layout.tokens // ranks
    return totals


def per_token(args: argparse.Namespace) -> Counter[str]:
    """Return the operations for one token of the whole model, forward and backward, without recomputation, by part.

    As in MFU, attention's backward pass counts twice its forward pass.
    """
    forward = forward_operations(args, args.hybrid_layer_pattern.replace(BOUNDARY, ""), True, True)
    return Counter({part: 3 * count for part, count in forward.items()})
