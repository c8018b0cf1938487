"""The layouts that a run could have on some GPUs, from the fastest on, and why the others were rejected."""

import argparse
import copy
import itertools
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from megagate.errors import UserError
from megagate.gate.config import gate_config_from_args
from megagate.model.pattern import BOUNDARY
from megagate.plan.estimate import Estimate, different_stages, estimate
from megagate.plan.gpus import GIB, Gpu
from megagate.plan.layout import Layout, layout_of
from megagate.plan.memory import StaticMemory, gradient_width, rank_memory, stage_static
from megagate.plan.parameters import model_tensors
from megagate.pretrain.layout import check_layout

MICRO_BATCHES = (1, 2, 4)
LONG_SEQUENCE = 8192
"""From here on the sequence is worth cutting over ranks."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    layout: Layout
    recompute: str
    memory: int
    """Bytes on the fullest rank."""
    estimate: Estimate

    def flags(self, recipe: Collection[str]) -> str:
        """Return what to add to the command line of a recipe with these keys."""
        layout = self.layout
        sizes = {
            "tensor-model-parallel-size": layout.tensor,
            "pipeline-model-parallel-size": layout.pipeline,
            "num-virtual-stages-per-pipeline-rank": layout.virtual if layout.virtual > 1 else None,
            "context-parallel-size": layout.context,
            "expert-model-parallel-size": layout.expert,
            "micro-batch-size": layout.micro_batch,
        }
        flags = [f"--{name} {size}" for name, size in sizes.items() if size is not None]
        if layout.sequence_parallel:
            flags.append("--sequence-parallel")
        flags += RECOMPUTE[self.recompute]
        given = {flag.split()[0].removeprefix("--") for flag in flags}
        omitted = [key for key in MAY_BE_OMITTED if key in recipe and key not in given]
        return " ".join([*flags, *(["--omit", *omitted] if omitted else [])])


RECOMPUTE = {
    "nothing": [],
    "the gate": ["--recompute-granularity selective", "--recompute-modules gate"],
    "expert layers": ["--recompute-granularity selective", "--recompute-modules moe"],
    "all layers": ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"],
}


MAY_BE_OMITTED = (
    "num-virtual-stages-per-pipeline-rank",
    "sequence-parallel",
    "recompute-granularity",
    "recompute-modules",
    "recompute-method",
    "recompute-num-layers",
)
"""Keys of a recipe that a layout may have to do without."""
CHOSEN = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "micro-batch-size",
    *MAY_BE_OMITTED,
)
"""What a search sets, whatever the recipe says."""


@dataclass
class Rejections:
    """Why layouts were not taken: reason -> how many, and one of them in words."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, example: str) -> None:
        """Count a layout; the last example of a reason is kept."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.examples[reason] = example


def search(
    args: argparse.Namespace,
    gpu: Gpu,
    precision: str = "bf16",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Candidate], Rejections]:
    """Try every layout of a run's GPUs, and return those that fit, fastest first, and why others do not.

    Args:
        args: validated arguments; their number of ranks, model and global batch size are kept.
        gpu: what it runs on.
        precision: of matrix products.
        progress: is told how many layouts of how many have been looked at.
    """
    found: list[Candidate] = []
    rejected = Rejections()
    held = model_tensors(args)
    dense = sum(tensor.size for tensor in held if not tensor.is_expert)
    experts = sum(tensor.size for tensor in held) - dense
    width = args.params_dtype.itemsize + gradient_width(args)
    all_sizes = list(_sizes(args, gpu))
    for done, sizes in enumerate(all_sizes):
        progress(done, len(all_sizes))
        tensor, pipeline, virtual, context, expert = sizes
        words = f"tensor {tensor}, pipeline {pipeline} x {virtual}, context {context}, expert {expert}"
        # Weights and gradients at the least, before anything is counted tensor by tensor.
        least = (dense / tensor + experts / expert) / pipeline * width
        if least > gpu.memory:
            rejected.add(
                f"weights and gradients alone need more than {gpu.memory / GIB:.0f} GiB",
                f"{words}: {least / GIB:.0f} GiB",
            )
            continue
        statics: dict[int, StaticMemory] = {}
        for micro_batch in MICRO_BATCHES:
            variant = _variant(args, sizes, micro_batch)
            try:
                check_layout(variant)
            except UserError as error:
                rejected.add(re.sub(r"\d+", "N", str(error)), str(error))
                continue
            _try(variant, gpu, precision, statics, f"{words}, micro batch {micro_batch}", found, rejected)
    found.sort(key=lambda candidate: candidate.estimate.step)
    return found, rejected


def _try(
    variant: argparse.Namespace,
    gpu: Gpu,
    precision: str,
    statics: dict[int, StaticMemory],
    words: str,
    found: list[Candidate],
    rejected: Rejections,
) -> None:
    """Add the layout with the least recomputation that fits; more of it never makes a step faster."""
    layout = layout_of(variant)
    for rank in different_stages(variant, layout):
        statics[rank] = statics.get(rank) or stage_static(variant, layout, rank)
    needed = 0
    for name in RECOMPUTE:
        if name == "the gate" and gate_config_from_args(variant).is_baseline:
            continue
        if name == "expert layers" and not variant.num_experts:
            continue
        _set_recompute(variant, name)
        needed = max(rank_memory(variant, layout, rank, static).total for rank, static in statics.items())
        if needed <= gpu.memory:
            found.append(
                Candidate(layout, name, needed, estimate(variant, layout, gpu, precision=precision, statics=statics))
            )
            return
    rejected.add(
        f"more than {gpu.memory / GIB:.0f} GiB even with all layers recomputed", f"{words}: {needed / GIB:.0f} GiB"
    )


def _set_recompute(args: argparse.Namespace, name: str) -> None:
    args.recompute_gate = name == "the gate"
    args.recompute_granularity = {"nothing": None, "all layers": "full"}.get(name, "selective")
    args.recompute_modules = ["moe"] if name == "expert layers" else []
    args.recompute_method, args.recompute_num_layers = ("uniform", 1) if name == "all layers" else (None, None)


def _sizes(args: argparse.Namespace, gpu: Gpu) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (tensor, pipeline, virtual, context, expert) sizes that divide the world."""
    blocks = len(args.hybrid_layer_pattern.replace(BOUNDARY, "")) // 2
    tensors = [size for size in (1, 2, 4, 8) if size <= gpu.node]
    contexts = [1, 2, 4, 8, 16, 32] if args.seq_length >= LONG_SEQUENCE else [1]
    expert_sizes = [size for size in range(1, (args.num_experts or 1) + 1) if (args.num_experts or 1) % size == 0]
    for tensor, context in itertools.product(tensors, contexts):
        for pipeline in range(1, blocks + 1):
            if args.world_size % (tensor * context * pipeline) or blocks % pipeline:
                continue
            for virtual in range(1, blocks // pipeline + 1):
                if (blocks // pipeline) % virtual or (pipeline == 1 and virtual > 1):
                    continue
                for expert in expert_sizes:
                    if args.world_size % (pipeline * expert) == 0:
                        yield tensor, pipeline, virtual, context, expert


def _variant(args: argparse.Namespace, sizes: tuple[int, int, int, int, int], micro_batch: int) -> argparse.Namespace:
    """Return the arguments of the same run on another layout."""
    tensor, pipeline, virtual, context, expert = sizes
    variant = copy.copy(args)
    variant.tensor_model_parallel_size = tensor
    variant.pipeline_model_parallel_size = pipeline
    variant.context_parallel_size = context
    variant.expert_model_parallel_size = expert
    variant.expert_tensor_parallel_size = 1
    variant.sequence_parallel = tensor > 1
    variant.micro_batch_size = micro_batch
    layers = args.hybrid_layer_pattern.replace(BOUNDARY, "")
    size = len(layers) // (pipeline * virtual)
    variant.hybrid_layer_pattern = BOUNDARY.join(layers[start : start + size] for start in range(0, len(layers), size))
    return variant
