"""One recipe on more and more GPUs: what a rank holds, computes and hands over, without a cluster.

    python tools/plan.py examples/moe_15a2b/recipe.yaml --scaling --figure docs/figures/scaling_15a2b.png

The layout is the recipe's wherever it fits the number of GPUs. On fewer, the pipeline gets shorter first, then experts
lie on fewer ranks, then sequences and tensors are cut less. The global batch is the recipe's as long as it keeps every
pipeline stage busy, with as many micro batches as there are stages, and grows with the GPUs beyond that.
"""

import argparse
import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megagate.errors import UserError
from megagate.model.pattern import BOUNDARY
from megagate.plan.communication import step_transfers
from megagate.plan.compute import rank_operations
from megagate.plan.estimate import estimate
from megagate.plan.gpus import GIB, Gpu
from megagate.plan.layout import Layout, layout_of
from megagate.plan.memory import RankMemory, rank_memory
from megagate.pretrain.layout import check_layout
from megagate.report.figures import amount
from megagate.report.style import line_style, styled, subplots

with contextlib.suppress(ImportError):  # an optional package; `styled` says how to install it
    from matplotlib.ticker import LogFormatter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = tuple(8 << power for power in range(12))
"""8 to 16,384 GPUs."""
SHORTENED = (
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "context_parallel_size",
    "tensor_model_parallel_size",
)
"""What has fewer ranks where the recipe's layout does not fit, in this order."""
MEMORY = ("weights", "gradients", "optimizer", "activations")


def smallest(args: argparse.Namespace) -> int:
    """Return the fewest GPUs that a layout fits."""
    pipeline = args.pipeline_model_parallel_size
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    experts = args.expert_model_parallel_size * args.expert_tensor_parallel_size if args.num_experts else 1
    return pipeline * math.lcm(dense, experts)


def resized(args: argparse.Namespace, gpus: int) -> argparse.Namespace:
    """Return the arguments of the same run on another number of GPUs.

    Args:
        args: validated arguments of the recipe.
        gpus: how many.

    Raises:
        UserError: no layout of the model fits them.
    """
    run = copy.copy(args)
    run.world_size = gpus
    for name in SHORTENED:
        while gpus % smallest(run) and getattr(run, name) > 1:
            size = getattr(run, name)
            setattr(run, name, max(part for part in range(1, size) if size % part == 0))
    run.sequence_parallel = args.sequence_parallel and run.tensor_model_parallel_size > 1
    if run.pipeline_model_parallel_size != args.pipeline_model_parallel_size:
        run.hybrid_layer_pattern = _recut(args.hybrid_layer_pattern, run.pipeline_model_parallel_size)
    dense = run.tensor_model_parallel_size * run.pipeline_model_parallel_size * run.context_parallel_size
    rows = args.micro_batch_size * (gpus // dense)
    fewest = run.pipeline_model_parallel_size
    is_enough = args.global_batch_size % rows == 0 and args.global_batch_size // rows >= fewest
    run.global_batch_size = args.global_batch_size if is_enough else rows * fewest
    check_layout(run)
    return run


def _recut(pattern: str, pipeline: int) -> str:
    """Return a pattern whose stages are as long as before, or one stage for a single pipeline rank."""
    return pattern if pipeline > 1 else pattern.replace(BOUNDARY, "")


def row(args: argparse.Namespace, machine: Gpu, precision: str) -> dict[str, Any]:
    """Return what a rank of a run holds, computes and hands over: of the pipeline stage that needs most memory.

    Returns:
        Bytes and operations of one rank; bytes sent and operations are those of a step.
    """
    layout = layout_of(args)
    memories = [rank_memory(args, layout, stage) for stage in range(layout.pipeline)]
    stage = max(range(layout.pipeline), key=lambda index: memories[index].total)
    sent: dict[str, float] = {}
    remote = 0.0
    for transfer in step_transfers(args, layout, stage, memories[stage].static):
        sent[transfer.kind] = sent.get(transfer.kind, 0.0) + transfer.sent
        remote += transfer.sent * transfer.remote_share(machine.node)
    phases = rank_operations(args, layout, stage)
    step = estimate(args, layout, machine, precision=precision)
    return {
        "GPUs": layout.world,
        "layout": _layout(layout),
        "global batch": args.global_batch_size,
        "tokens": layout.step_tokens,
        "memory": _memory(memories[stage]),
        "fits": memories[stage].total <= machine.memory,
        "operations": layout.micro_batches * sum(sum(parts.values()) for parts in phases.values()),
        "bytes sent": sent,
        "bytes sent to other nodes": remote,
        "seconds": step.step,
        "MFU": step.mfu,
    }


def _layout(layout: Layout) -> dict[str, int]:
    names = ("tensor", "pipeline", "virtual", "context", "data", "expert", "expert_data", "micro_batches")
    return {name.replace("_", " "): getattr(layout, name) for name in names}


def _memory(memory: RankMemory) -> dict[str, int]:
    static = memory.static
    weights = static.weights + static.fp8_copies
    sizes = (weights, static.gradients, static.main_weights + static.moments, memory.activations)
    return dict(zip(MEMORY, sizes, strict=True)) | {"total": memory.total}


def study(args: argparse.Namespace, machine: Gpu, precision: str = "bf16") -> list[dict[str, Any]]:
    """Return a row for each of `SIZES` that a layout of the model fits.

    Args:
        args: validated arguments of the recipe.
        machine: the GPUs.
        precision: of matrix products, for the time.
    """
    rows = []
    for gpus in SIZES:
        try:
            rows.append(row(resized(args, gpus), machine, precision))
        except UserError:
            continue
    return rows


def lines(rows: Sequence[dict[str, Any]], machine: Gpu) -> Iterator[str]:
    """Yield the rows for the terminal."""
    kinds = list(dict.fromkeys(kind for found in rows for kind in found["bytes sent"]))
    yield "of one rank, of the pipeline stage that needs most: GiB held, 1e12 operations and GB sent in a step"
    head = [f"{name:>12}" for name in (*MEMORY, "total", "operations", *kinds, "other nodes")]
    yield f"{'GPUs':>6}  {'t x p x v, c, e':<17} {'batch':>6}" + "".join(head) + f" {'seconds':>8} {'MFU':>6}"
    for found in rows:
        sizes = found["layout"]
        layout = f"{sizes['tensor']} x {sizes['pipeline']} x {sizes['virtual']}, {sizes['context']}, {sizes['expert']}"
        numbers = [found["memory"][name] / GIB for name in (*MEMORY, "total")]
        numbers += [found["operations"] / 1e12, *(found["bytes sent"].get(kind, 0.0) / 1e9 for kind in kinds)]
        numbers.append(found["bytes sent to other nodes"] / 1e9)
        cells = "".join(f"{value:>12,.1f}" if value >= 100 else f"{value:>12.2f}" for value in numbers)
        time = f" {found['seconds']:>8.2f} {found['MFU']:>6.1%}" if found["fits"] else "  does not fit"
        yield f"{found['GPUs']:>6}  {layout:<17} {found['global batch']:>6}{cells}{time}"
    yield (
        f"seconds and MFU are the model's for {machine.name}; t x p x v, c, e: tensor x pipeline x virtual stages, "
        "context, expert"
    )


@styled
def figure(rows: Sequence[dict[str, Any]], machine: Gpu) -> "Figure":
    """Return the rows drawn: memory, bytes sent, operations and time over the number of GPUs."""
    gpus = [found["GPUs"] for found in rows]
    drawn, axes = subplots(2, 2, 6.6)
    kinds = list(dict.fromkeys(kind for found in rows for kind in found["bytes sent"]))
    panels = {
        "GiB held by a rank": {name: [found["memory"][name] / GIB for found in rows] for name in (*MEMORY, "total")},
        "GB sent by a rank in a step": {
            kind: [found["bytes sent"].get(kind, 0.0) / 1e9 or math.nan for found in rows] for kind in kinds
        }
        | {"to other nodes": [found["bytes sent to other nodes"] / 1e9 or math.nan for found in rows]},
        "1e12 operations of a rank in a step": {"operations": [found["operations"] / 1e12 for found in rows]},
        f"seconds of a step on {machine.name}, by the model": {
            "step": [found["seconds"] if found["fits"] else math.nan for found in rows]
        },
    }
    for ax, (title, series) in zip(axes.flat, panels.items(), strict=True):
        for index, (name, values) in enumerate(series.items()):
            ax.plot(gpus, values, label=name, **line_style(index))
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(gpus[:: max(1, len(gpus) // 6)])
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.yaxis.set_major_formatter(lambda value, _: amount(value))
        ax.yaxis.set_minor_formatter(LogFormatter())
        ax.set_title(title)
        ax.set_xlabel("GPUs")
        if len(series) > 1:
            ax.legend(fontsize=8)
    axes.flat[0].axhline(machine.memory / GIB, color=line_style(7)["color"], linewidth=1, linestyle=":")
    return drawn
