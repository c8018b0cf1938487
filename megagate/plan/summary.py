"""A plan as numbers (for JSON) and as tables for the terminal."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megagate.gate.config import describe, gate_config_from_args
from megagate.plan.communication import step_transfers
from megagate.plan.estimate import Estimate, estimate, shares, transfer_seconds
from megagate.plan.gpus import GIB, Gpu
from megagate.plan.layout import Layout, layout_of
from megagate.plan.memory import FP32, rank_memory
from megagate.plan.parameters import count

DAY = 86400
ADAM_MOMENTS = 2
TAKEN_FOR_GRANTED = "experts used alike, Transformer Engine's kernels, no stragglers, GPUs at full power"


def plan(args: argparse.Namespace, gpu: Gpu, options: argparse.Namespace) -> dict[str, Any]:
    """Return the plan of a run.

    Args:
        args: validated arguments of the run.
        gpu: what it runs on.
        options: of the command; see `megagate.plan.command`.
    """
    layout = layout_of(args)
    total, active = count(args)
    step = estimate(args, layout, gpu, precision=options.precision)
    ranks = [_memory(args, layout, rank) for rank in range(layout.pipeline)]
    fullest = max(range(layout.pipeline), key=lambda rank: ranks[rank]["total"])
    return {
        "model": {
            "parameters": total,
            "active parameters": active,
            "gate": describe(gate_config_from_args(args)),
            "layers": args.hybrid_layer_pattern,
            "operations per token": step.model_operations / layout.step_tokens,
            "operations by part": shares(args),
        },
        "layout": _layout(args, layout),
        "memory": {
            "available": gpu.memory,
            "fits": ranks[fullest]["total"] <= gpu.memory,
            "fullest pipeline rank": fullest,
            "by pipeline rank": ranks,
            "note": _note(args, options.precision),
        },
        "communication": _communication(args, layout, gpu, step, fullest),
        "step": {
            "seconds": step.step,
            "model TFLOP/s per GPU": step.model_tflops,
            "MFU": step.mfu,
            "by cause": step.seconds,
            "tokens per second": layout.step_tokens / step.step,
        },
        "run": _run(args, layout, gpu, step, options, total),
        "assumptions": asdict(step.assumptions)
        | {
            "power_overhead": options.power_overhead,
            "precision": options.precision,
            "taken for granted": TAKEN_FOR_GRANTED,
            "not counted": args.uncounted,
            "GPU": asdict(gpu),
        },
    }


def _note(args: argparse.Namespace, precision: str) -> str | None:
    """Return what is to be said of memory in FP8."""
    if args.fp8_weights is not None:
        return args.fp8_weights.note
    return (
        "--precision fp8 is for the time alone: for the memory too, give --fp8-format" if precision == "fp8" else None
    )


def _layout(args: argparse.Namespace, layout: Layout) -> dict[str, int]:
    sizes = {
        "GPUs": layout.world,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "virtual stages": layout.virtual,
        "context": layout.context,
        "data": layout.data,
    }
    if args.num_experts:
        sizes |= {
            "expert": layout.expert,
            "expert tensor": layout.expert_tensor,
            "expert data": layout.expert_data,
        }
    return sizes | {
        "sequence length": layout.sequence,
        "micro batch": layout.micro_batch,
        "micro batches": layout.micro_batches,
        "tokens per step": layout.step_tokens,
    }


def _memory(args: argparse.Namespace, layout: Layout, pipeline_rank: int) -> dict[str, Any]:
    memory = rank_memory(args, layout, pipeline_rank)
    static = memory.static
    return {
        "parameters": static.parameters,
        "gate's share of parameters": static.gate_share,
        "weights": static.weights,
        "FP8 copies": static.fp8_copies,
        "gradients": static.gradients,
        "main weights": static.main_weights,
        "Adam's moments": static.moments,
        "activations": memory.activations,
        "micro batches in flight": layout.in_flight_by_chunk(pipeline_rank),
        "activations of a micro batch": memory.micro_batch,
        "temporary": memory.temporary,
        "reserve": memory.reserve,
        "total": memory.total,
    }


def _communication(
    args: argparse.Namespace, layout: Layout, gpu: Gpu, step: Estimate, pipeline_rank: int
) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str, int, str], dict[str, Any]] = {}
    for transfer in step_transfers(args, layout, pipeline_rank):
        link = "network" if transfer.remote_share(gpu.node) else "NVLink"
        key = transfer.kind, transfer.operation, transfer.ranks, link
        empty = {"bytes given": 0, "bytes sent": 0.0, "calls": 0, "seconds": 0.0}
        row = rows.setdefault(key, dict(zip(("kind", "operation", "ranks", "link"), key, strict=True)) | empty)
        row["bytes given"] += transfer.given
        row["bytes sent"] += transfer.sent
        row["calls"] += transfer.calls
        row["seconds"] += transfer_seconds(args, transfer, gpu, step.assumptions)
    return list(rows.values())


def checkpoint_width(args: argparse.Namespace) -> int:
    """Return a checkpoint's bytes for each parameter: the weight, the optimizer's copy of it, Adam's two moments."""
    width: int = args.params_dtype.itemsize
    # Of fp32 weights the optimizer has a copy only where its state is shared out.
    copies = FP32 if width < FP32 or args.use_distributed_optimizer else 0
    return width + copies + ADAM_MOMENTS * FP32


def _run(
    args: argparse.Namespace, layout: Layout, gpu: Gpu, step: Estimate, options: argparse.Namespace, parameters: int
) -> dict[str, Any]:
    iterations = (args.train_iters or 0) * layout.step_tokens
    tokens = options.tokens or iterations or (args.train_samples or 0) * layout.sequence
    seconds = tokens / layout.step_tokens * step.step
    checkpoint = parameters * checkpoint_width(args)
    energy = gpu.watts * options.power_overhead * layout.world * seconds / 3.6e6
    run = {
        "tokens": tokens,
        "tokens per day": layout.step_tokens / step.step * DAY,
        "days": seconds / DAY,
        "GPU-hours": seconds / 3600 * layout.world,
        "checkpoint bytes": checkpoint,
        "checkpoint seconds": checkpoint / (options.storage * 1e9),
        "MWh": energy / 1000,
    }
    if options.price_per_gpu_hour is not None:
        run["GPU cost"] = run["GPU-hours"] * options.price_per_gpu_hour
    if options.price_per_kwh is not None:
        run["energy cost"] = energy * options.price_per_kwh
    return run


def lines(planned: dict[str, Any], options: argparse.Namespace) -> Iterator[str]:
    """Yield the plan's lines for the terminal."""
    model, layout, memory, step, run = (planned[key] for key in ("model", "layout", "memory", "step", "run"))
    yield f"model: {model['parameters']:,} parameters, {model['active parameters']:,} active; gate {model['gate']}"
    parts = ", ".join(f"{part} {share:.1%}" for part, share in model["operations by part"].items())
    yield f"operations: {model['operations per token']:.4g} for each token: {parts}"
    yield "layout: " + ", ".join(f"{name} {size:,}" for name, size in layout.items())
    yield ""
    yield from _memory_lines(memory)
    yield ""
    yield "communication of a step, on that rank:"
    yield f"  {'for':<14} {'operation':<15} {'ranks':>6} {'over':<8} {'calls':>8} {'GB sent':>9} {'seconds':>8}"
    for row in planned["communication"]:
        yield (
            f"  {row['kind']:<14} {row['operation']:<15} {row['ranks']:>6} {row['link']:<8} {row['calls']:>8,} "
            f"{row['bytes sent'] / 1e9:>9.3f} {row['seconds']:>8.3f}"
        )
    yield ""
    rate = f"{step['model TFLOP/s per GPU']:.0f} TFLOP/s per GPU, MFU {step['MFU']:.1%}"
    yield f"step: {step['seconds']:.2f} s, {rate}, {step['tokens per second']:,.0f} tokens/s; of it"
    for cause, seconds in sorted(step["by cause"].items(), key=lambda item: -item[1]):
        if seconds >= 0.001 * step["seconds"]:
            yield f"  {cause:<28} {seconds:>8.3f} s {seconds / step['seconds']:>6.1%}"
    yield ""
    yield (
        f"run: {run['tokens']:.4g} tokens at {run['tokens per day']:.3g} a day are {run['days']:.1f} days, "
        f"{run['GPU-hours']:,.0f} GPU-hours and {run['MWh']:,.0f} MWh"
    )
    for name in ("GPU cost", "energy cost"):
        if name in run:
            yield f"{name}: {run[name]:,.0f}"
    yield (
        f"checkpoint: {run['checkpoint bytes'] / 1e12:.3f} TB, saved in {run['checkpoint seconds']:.0f} s at "
        f"{options.storage:g} GB/s"
    )
    yield ""
    assumed = planned["assumptions"]
    if assumed["not counted"]:
        yield f"not counted: {', '.join(assumed['not counted'])}"
    yield f"assumed: {assumed['taken for granted']}"
    yield f"assumed for {assumed['precision']}: " + ", ".join(
        f"{name.replace('_', ' ')} {value:g}" for name, value in _numbers(assumed)
    )
    yield f"assumed of {assumed['GPU']['name']}: " + ", ".join(
        f"{name.replace('_', ' ')} {value:.4g}" for name, value in _numbers(assumed["GPU"])
    )


def _numbers(values: dict[str, Any]) -> list[tuple[str, float]]:
    return [(name, value) for name, value in values.items() if isinstance(value, (int, float))]


def _memory_lines(memory: dict[str, Any]) -> Iterator[str]:
    ranks, fullest = memory["by pipeline rank"], memory["fullest pipeline rank"]
    shown = sorted({0, fullest, len(ranks) - 1})
    verdict = "fits" if memory["fits"] else "does NOT fit"
    yield f"memory in GiB, of {memory['available'] / GIB:.1f}: {verdict}"
    yield f"  {'pipeline rank':<28}" + "".join(f"{rank:>12}" for rank in shown)
    kinds = ("weights", "FP8 copies", "gradients", "main weights", "Adam's moments", "activations")
    for name in (*kinds, "temporary", "reserve"):
        if name == "FP8 copies" and not any(ranks[rank][name] for rank in shown):
            continue
        yield f"  {name:<28}" + "".join(f"{ranks[rank][name] / GIB:>12.2f}" for rank in shown)
    yield f"  {'total':<28}" + "".join(f"{ranks[rank]['total'] / GIB:>12.2f}" for rank in shown)
    rank = ranks[fullest]
    flights = ", ".join(map(str, rank["micro batches in flight"]))
    yield f"  on rank {fullest}, {flights} micro batches are in flight; of one, in MiB:"
    parts = sorted(rank["activations of a micro batch"].items(), key=lambda item: -item[1])
    yield "  " + ", ".join(f"{part} {size / 2**20:.1f}" for part, size in parts if size)
    if memory["note"]:
        yield f"  {memory['note']}"
    yield f"  the gate has {rank["gate's share of parameters"]:.2%} of its {rank['parameters']:,} parameters"
