"""What Transformer Engine and FP8 do not go with, one entry for each: the check, its sentence, and the docs' table.

docs/transformer_engine.md shows `REFUSALS` as a table; tests hold it against this list and try each example.
"""

import argparse
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megagate.errors import UserError
from megagate.gate.config import GateConfig, GatePrecision
from megagate.gate.layout import layout_from_args, query_groups
from megagate.model.attention import projects_apart
from megagate.model.pattern import BOUNDARY, DENSE, EXPERTS, layer_pattern
from megagate.plan.parameters import chunk_tensors

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
"""The values of --fp8-recipe that are offered."""

FP8_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj")
"""Linear layers whose matrix products are in FP8."""


@dataclass(frozen=True)
class Refusal:
    """A combination of flags that is refused, with "COMBINATION WHY: INSTEAD" for a sentence."""

    combination: str
    why: str
    instead: str
    applies: Callable[[argparse.Namespace, GateConfig], bool]
    example: str
    """Flags, added to those of a gated model on Transformer Engine, that are refused for it."""

    @property
    def sentence(self) -> str:
        """What the user reads."""
        return f"{self.combination} {self.why}: {self.instead}"


def _on_te(args: argparse.Namespace) -> bool:
    return args.transformer_impl == "transformer_engine"


def _is_padded(args: argparse.Namespace, gate: GateConfig) -> bool:
    layout = layout_from_args(args)
    return gate.is_padded and layout.gate_rows_padded > layout.gate_rows


def _attention_is_fp8(args: argparse.Namespace) -> bool:
    return args.fp8_dot_product_attention or args.fp8_multi_head_attention


def _heads_fit(args: argparse.Namespace) -> bool:
    channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    return channels % 16 == 0 and channels <= 128


REFUSALS = (
    Refusal(
        "--fp8-format with --transformer-impl local",
        "needs Transformer Engine",
        "leave one of the two out",
        lambda args, gate: bool(args.fp8) and not _on_te(args),
        "--fp8-format hybrid --transformer-impl local",
    ),
    Refusal(
        "--fp8-recipe custom",
        "is untried with gates",
        f"use one of {', '.join(RECIPES)}",
        lambda args, gate: bool(args.fp8) and args.fp8_recipe not in RECIPES,
        "--fp8-format hybrid --fp8-recipe custom",
    ),
    Refusal(
        "--fp8-dot-product-attention, --fp8-multi-head-attention or --fp8-param-gather without --fp8-format",
        "has no effect",
        "add --fp8-format hybrid",
        lambda args, gate: not args.fp8 and (_attention_is_fp8(args) or args.fp8_param_gather),
        "--fp8-dot-product-attention",
    ),
    Refusal(
        "--fp8-multi-head-attention with a gate, norm or activation on the attention output",
        "cannot be right, since it rounds that output to FP8 for linear_proj, which then gets something else",
        "use --fp8-dot-product-attention, which keeps the output in bf16",
        lambda args, gate: args.fp8_multi_head_attention and gate.acts_on_sdpa_output,
        "--fp8-format hybrid --fp8-multi-head-attention",
    ),
    Refusal(
        "--fp8-multi-head-attention with another --fp8-recipe than delayed",
        "has no effect in Megatron",
        "use --fp8-dot-product-attention, or --fp8-recipe delayed",
        lambda args, gate: args.fp8_multi_head_attention and args.fp8_recipe != "delayed",
        "--fp8-format hybrid --fp8-multi-head-attention --fp8-recipe tensorwise --gate-preset value-elementwise",
    ),
    Refusal(
        "--fp8-dot-product-attention with --fp8-recipe blockwise",
        "has no effect, since that recipe has no attention",
        "leave it out, or use --fp8-recipe delayed, tensorwise or mxfp8",
        lambda args, gate: args.fp8_dot_product_attention and args.fp8_recipe == "blockwise",
        "--fp8-format e4m3 --fp8-recipe blockwise --fp8-dot-product-attention",
    ),
    Refusal(
        "attention in FP8 with heads of more than 128 channels, or not of a multiple of 16,",
        "has no kernel",
        "leave out --fp8-dot-product-attention and --fp8-multi-head-attention, or change --kv-channels",
        lambda args, gate: _attention_is_fp8(args) and not _heads_fit(args),
        "--fp8-format hybrid --fp8-dot-product-attention --kv-channels 72",
    ),
    Refusal(
        "--first-last-layers-bf16 with --fp8-recipe delayed",
        "would lose the history of the scales between layers",
        "use --fp8-recipe tensorwise, blockwise or mxfp8",
        lambda args, gate: bool(args.fp8) and args.first_last_layers_bf16 and args.fp8_recipe == "delayed",
        "--fp8-format hybrid --first-last-layers-bf16",
    ),
    Refusal(
        "--fp8-param-gather with a gate whose rows are padded",
        "has no bf16 weight in which the padding could be set to zero",
        "leave it out, or choose a --gate-row-alignment that divides the rows of the gate in a KV group",
        lambda args, gate: args.fp8_param_gather and _is_padded(args, gate),
        "--fp8-format hybrid --fp8-param-gather --gate-preset sdpa-headwise",
    ),
    Refusal(
        "--fp8-param-gather with --gate-precision bf16 or fp32",
        "has no bf16 weight from which the gate could be computed",
        "leave one of the two out",
        lambda args, gate: args.fp8_param_gather and args.gate_precision in ("bf16", "fp32"),
        "--fp8-format hybrid --fp8-param-gather --gate-precision fp32",
    ),
    Refusal(
        "--fp8-param-gather with --use-cpu-initialization",
        "has no bf16 weight to be drawn",
        "leave one of the two out",
        lambda args, gate: args.fp8_param_gather and args.use_cpu_initialization,
        "--fp8-format hybrid --fp8-param-gather --use-cpu-initialization",
    ),
    Refusal(
        "--reset-attention-mask with Transformer Engine",
        "has no effect, since its causal attention takes no mask",
        "leave it out, or use --transformer-impl local",
        lambda args, gate: args.reset_attention_mask and _on_te(args),
        "--reset-attention-mask",
    ),
    Refusal(
        "--cross-entropy-loss-fusion without --bf16",
        "would round the gradient of the logits to bf16",
        "leave it out",
        lambda args, gate: args.cross_entropy_loss_fusion and not args.bf16 and _on_te(args),
        "--cross-entropy-loss-fusion",
    ),
    Refusal(
        "--gate-precision without a gate",
        "has no effect",
        "choose a --gate-preset with one, or leave it out",
        lambda args, gate: args.gate_precision is not None and not gate.has_gate,
        "--gate-precision fp32 --gate-preset baseline",
    ),
    Refusal(
        "--gate-precision fp8 without --fp8-format",
        "has no FP8 to be computed in",
        "add --fp8-format hybrid",
        lambda args, gate: args.gate_precision == GatePrecision.FP8 and not args.fp8,
        "--gate-precision fp8",
    ),
    Refusal(
        "--gate-precision fp8 with a gate that has no rows in linear_qkv",
        "has no effect, since only linear_qkv is in FP8",
        "leave it out",
        lambda args, gate: args.gate_precision == GatePrecision.FP8 and not gate.is_fused,
        "--fp8-format hybrid --gate-precision fp8 --gate-preset output-elementwise",
    ),
    Refusal(
        "--delay-wgrad-compute with --fp8-format and --gate-precision bf16 or fp32",
        "would lose the gate's gradient, since the delayed one is put in its place",
        "leave out --delay-wgrad-compute",
        lambda args, gate: args.delay_wgrad_compute and projects_apart(args, gate, args.gate_precision),
        "--fp8-format hybrid --gate-precision fp32 --delay-wgrad-compute",
    ),
    Refusal(
        "--gate-precision bf16 without --bf16",
        "has no bf16 tensors to act on",
        "add --bf16, or leave it out",
        lambda args, gate: args.gate_precision == GatePrecision.BF16 and not args.bf16,
        "--gate-precision bf16",
    ),
)
"""In the order in which they are looked at; the first that applies is what the user reads."""


def check_backend(args: argparse.Namespace, gate: GateConfig) -> None:
    """Check what is asked of Transformer Engine and of the gate's precision.

    Args:
        args: parsed and completed, with the backend chosen.
        gate: the gate that they describe.

    Raises:
        UserError: the first thing that does not fit.
    """
    for refusal in REFUSALS:
        if refusal.applies(args, gate):
            raise UserError(refusal.sentence)
    if args.fp8:
        _check_tokens(args)
        for problem in misaligned(args):
            raise UserError(problem)


def alignment(recipe: str) -> int:
    """Return the number that tokens, rows and inputs of a matrix in FP8 must be a multiple of."""
    return 32 if recipe == "mxfp8" else 16


def misaligned(args: argparse.Namespace) -> Iterator[str]:
    """Yield a sentence for each linear layer that is no multiple of the recipe's alignment on each rank."""
    number = alignment(args.fp8_recipe)
    given = copy.copy(args)
    given.padded_vocab_size = 0  # of layers that are not asked for
    given.moe_ffn_hidden_size = args.moe_ffn_hidden_size or args.ffn_hidden_size
    unknown = {DENSE: args.ffn_hidden_size is None, EXPERTS: given.moe_ffn_hidden_size is None}
    layers = set(layer_pattern(args).replace(BOUNDARY, ""))
    layers -= {symbol for symbol, is_unknown in unknown.items() if is_unknown}  # Megatron's own widths fit
    sizes = {"tensor": args.tensor_model_parallel_size, "expert": args.expert_model_parallel_size}
    held = chunk_tensors(
        given, "".join(sorted(layers)), False, False, **sizes, expert_tensor=args.expert_tensor_parallel_size
    )
    weights = {tensor.name.removesuffix(".weight"): tensor.shape for tensor in held if tensor.name.endswith(".weight")}
    for layer, shape in weights.items():
        if layer.rpartition(".")[2] in FP8_LINEARS and any(size % number for size in shape):
            rows, inputs = shape
            mend = "choose another parallel size or width"
            if layer == "linear_qkv" and layout_from_args(args).gate.is_padded and inputs % number == 0:
                mend = f"--gate-row-alignment {_row_alignment(args, number)} fits (a checkpoint's shape follows it)"
            yield (
                f"{layer} is {rows} x {inputs} on each rank, and --fp8-recipe {args.fp8_recipe} needs multiples of "
                f"{number}: {mend}, or leave out --fp8-format"
            )


def _row_alignment(args: argparse.Namespace, number: int) -> int:
    """Return a row alignment with which linear_qkv fits on these ranks."""
    tensor, groups = args.tensor_model_parallel_size, query_groups(args)
    return number * tensor // math.gcd(groups, tensor)


def _check_tokens(args: argparse.Namespace) -> None:
    parallel = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    tokens, number = args.seq_length * args.micro_batch_size // parallel, alignment(args.fp8_recipe)
    if tokens % number:
        raise UserError(
            f"a rank has {tokens} tokens of a micro batch, and --fp8-recipe {args.fp8_recipe} needs a multiple of "
            f"{number}: change --seq-length, --micro-batch-size or the parallel sizes, or leave out --fp8-format"
        )
