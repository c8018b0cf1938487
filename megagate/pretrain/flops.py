"""The gate's share of the floating-point operations that Megatron logs as throughput and progress.

Megatron's formula for hybrid models knows attention without a gate only, that for a GPTModel Megatron's own gate.
Like them, this counts matrix multiplications and nothing else: two operations for a multiplication with its addition,
three times for forward and backward.
"""

import argparse
import functools

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, get_hybrid_layer_counts
from megatron.training import training

from megagate.gate.config import GatePosition, gate_config_from_args
from megagate.gate.layout import query_groups
from megagate.model.pattern import is_gpt, layer_pattern

_original = training.num_floating_point_operations


def apply() -> None:
    """Let Megatron's training loop count the gate's operations; idempotent."""
    training.num_floating_point_operations = num_floating_point_operations


def gate_floating_point_operations(args: argparse.Namespace, tokens: float) -> float:
    """Return the operations that all gates of the model need for `tokens` tokens, forward and backward.

    Padding rows, and what is done element by element, are not counted.
    """
    gate = gate_config_from_args(args)
    if not gate.is_fused and gate.position != GatePosition.OUTPUT:
        return 0
    if is_gpt(args) and args.attention_output_gate:
        return 0  # Megatron's formula for a GPTModel knows its own gate
    weights = gate.added_parameters(args.hidden_size, args.num_attention_heads, query_groups(args), args.kv_channels)
    layers = get_hybrid_layer_counts(layer_pattern(args))[Symbols.ATTENTION]
    return 3 * 2 * tokens * weights * layers


@functools.wraps(_original)
def num_floating_point_operations(
    args: argparse.Namespace,
    batch_size: int,
    seqlen_squared_sum_in_batch: float | None = None,
    total_real_tokens_in_batch: float | None = None,
) -> float:
    """Return Megatron's count for a batch, and the gate's."""
    tokens = total_real_tokens_in_batch
    if tokens is None:
        tokens = batch_size * args.seq_length
    megatrons = _original(args, batch_size, seqlen_squared_sum_in_batch, total_real_tokens_in_batch)
    return float(megatrons + gate_floating_point_operations(args, tokens))
