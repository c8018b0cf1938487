"""Weights that a run multiplies in FP8: how many a rank holds, and the bytes that they take.

Transformer Engine quantizes each weight of its linear layers once a step, by row for the forward and by column for the
backward pass, and keeps both until the next one: beside the bf16 weight, or in its place under Megatron's
--fp8-param-gather. All of this is from their source, and not held against a measurement.
"""

import argparse
from collections import Counter
from dataclasses import dataclass

from megagate.model.pattern import BOUNDARY
from megagate.plan.layout import Layout
from megagate.plan.parameters import chunk_tensors
from megagate.pretrain.refusals import FP8_LINEARS

WAYS = 2
"""By row and by column."""
MXFP8_BLOCK = 32
"""Values that share a scale of one byte; those of other recipes take next to nothing."""


@dataclass(frozen=True)
class Fp8Weights:
    """How a run has its FP8 weights."""

    recipe: str
    alone: bool
    """Whether there is no bf16 weight beside them."""
    ends_in_bf16: bool
    """Whether the first and last layers are in bf16."""

    @property
    def width(self) -> float:
        """Bytes of a weight, in both ways."""
        return WAYS * (1 + (1 / MXFP8_BLOCK if self.recipe == "mxfp8" else 0))

    @property
    def gathered_width(self) -> int | None:
        """Bytes in which data-parallel ranks hand over a new weight; None for those of a bf16 run."""
        return 1 if self.alone and self.recipe != "mxfp8" else None  # whose two ways have scales of their own

    @property
    def note(self) -> str:
        """What a plan has to say of them."""
        if self.alone:
            weights = "weights of linear layers are in FP8 only (--fp8-param-gather): by row and by column, a byte each"
        else:
            weights = (
                "weights stay in bf16, since --fp8-param-gather is not given, with FP8 copies by row and by column"
            )
        return f"{weights}; activations are counted as in bf16"


def fp8_weights(args: argparse.Namespace) -> Fp8Weights | None:
    """Return how a run has its FP8 weights, from its validated arguments; None for a run without FP8."""
    if not args.fp8:
        return None
    return Fp8Weights(args.fp8_recipe, args.fp8_param_gather, args.first_last_layers_bf16)


def count_fp8(args: argparse.Namespace, fp8: Fp8Weights, layout: Layout, pipeline_rank: int) -> Counter[bool]:
    """Return how many weights of a pipeline rank's are multiplied in FP8: of experts (True), and others."""
    stages = args.hybrid_layer_pattern.split(BOUNDARY)
    layers = "".join(stages)
    first, end = 0, len(layers)
    if fp8.ends_in_bf16:
        first, end = args.num_layers_at_start_in_bf16, end - args.num_layers_at_end_in_bf16
    sizes = {"tensor": layout.tensor, "expert": layout.expert, "expert_tensor": layout.expert_tensor}
    found: Counter[bool] = Counter()
    for index in range(pipeline_rank, len(stages), layout.pipeline):
        start = sum(map(len, stages[:index]))
        kept = layers[max(first, start) : max(0, min(end, start + len(stages[index])))]
        for tensor in chunk_tensors(args, kept, False, False, **sizes):
            layer, _, kind = tensor.name.rpartition(".")
            if kind == "weight" and layer.rpartition(".")[2] in FP8_LINEARS:
                found[tensor.is_expert] += tensor.size
    return found
