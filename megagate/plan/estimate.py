"""How long a step takes, from operations, bytes and a few assumptions about what kernels and links reach.

What is counted is exact; this is a model. It takes Megatron's Transformer Engine kernels for granted, experts that are
used alike, and machines without stragglers. `megagate.plan.published` holds it against measurements.
"""

import argparse
import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megagate.model.pattern import EXPERTS
from megagate.plan.activations import chunk_activations
from megagate.plan.communication import GATHER, REDUCE, SCATTER, Transfer, step_transfers
from megagate.plan.compute import CORE_ATTENTION, DELTA_RULE, per_token, rank_operations
from megagate.plan.gpus import Gpu
from megagate.plan.layout import Layout
from megagate.plan.memory import RankMemory, StaticMemory, rank_memory, stage_static
from megagate.pretrain.flops import num_floating_point_operations

DATA_KINDS = ("data", "expert data")


@dataclass(frozen=True)
class Assumptions:
    """What kernels and links reach, as shares of their peaks, and other constants of the model."""

    matrix_share: float = 0.68
    """Of the peak, in large matrix products."""
    expert_half_width: float = 512
    """The hidden size of experts whose products reach half of that; ten times wider ones reach nine tenths."""
    attention_share: float = 0.50
    """Of the bf16 peak, in core attention and the delta rule."""
    fp8_share: float = 0.70
    """Of what the bf16 shares would be of the FP8 peak: quantization costs time."""
    memory_passes: float = 6.0
    """How often the bytes that are kept for the backward pass, or would be without recomputation, go through memory."""
    recompute_passes: float = 2.0
    """How often those do again that are computed again."""
    memory_share: float = 0.75
    """Of memory bandwidth."""
    link_share: float = 0.75
    """Of NVLink's and the network's bandwidth."""
    layer_overhead: float = 100e-6
    """Seconds for each layer of a micro batch, forward and backward: launches, small kernels."""
    expert_overhead: float = 350e-6
    """Seconds more for a layer of experts: routing, permutations, waiting for the counts of tokens."""
    hidden_expert_share: float = 0.0
    """Of the experts' all-to-all, what is hidden behind computation."""


@dataclass(frozen=True)
class Estimate:
    """A step of a run on some GPUs; seconds, unless said otherwise."""

    gpu: str
    step: float
    model_operations: float
    """Of a step, as the training log counts them."""
    model_tflops: float
    """Per GPU and second."""
    mfu: float
    """Model operations as a share of the peak of the precision."""
    seconds: dict[str, float]
    """Where the step's time goes, on the slowest pipeline stage."""
    assumptions: Assumptions = field(repr=False)


def estimate(
    args: argparse.Namespace,
    layout: Layout,
    gpu: Gpu,
    *,
    precision: str = "bf16",
    assumptions: Assumptions = Assumptions(),
    statics: Mapping[int, StaticMemory] | None = None,
) -> Estimate:
    """Estimate a step.

    Args:
        args: validated arguments.
        layout: of the run.
        gpu: what it runs on.
        precision: of matrix products, "bf16" or "fp8".
        assumptions: of the model.
        statics: what the ranks of `different_stages` hold, if it is known.
    """
    peak = gpu.bf16 if precision == "bf16" or gpu.fp8 is None else gpu.fp8
    ranks = different_stages(args, layout)
    known = statics or {rank: stage_static(args, layout, rank) for rank in ranks}
    memories = {rank: rank_memory(args, layout, rank, known[rank]) for rank in ranks}
    transfers = {rank: step_transfers(args, layout, rank, known[rank]) for rank in ranks}
    stages = [_stage(args, layout, gpu, rank, memories[rank], transfers[rank], peak, assumptions) for rank in ranks]
    slowest = max(stages, key=lambda seconds: sum(seconds.values()))
    batch_seconds = sum(slowest.values())
    seconds = {name: value * layout.micro_batches for name, value in slowest.items()}
    seconds["pipeline bubble"] = batch_seconds * (layout.pipeline - 1) / layout.virtual
    once = [_once_a_step(args, gpu, memories[rank], transfers[rank], batch_seconds, assumptions) for rank in ranks]
    seconds |= sorted(once, key=lambda parts: sum(parts.values()))[-1]
    step = sum(seconds.values())
    operations = num_floating_point_operations(args, layout.step_tokens // layout.sequence)
    rate = operations / step / layout.world
    return Estimate(gpu.name, step, operations, rate / 1e12, rate / peak, seconds, assumptions)


def different_stages(args: argparse.Namespace, layout: Layout) -> list[int]:
    """Return the pipeline ranks that can be the slowest or fullest: of those with the same layers the first."""
    firsts: dict[tuple[tuple[str, bool, bool], ...], int] = {}
    for rank in range(layout.pipeline):
        firsts.setdefault(tuple(layout.chunks(args.hybrid_layer_pattern, rank)), rank)
    return list(firsts.values())


def _stage(
    args: argparse.Namespace,
    layout: Layout,
    gpu: Gpu,
    pipeline_rank: int,
    memory: RankMemory,
    transfers: Sequence[Transfer],
    peak: float,
    assumed: Assumptions,
) -> dict[str, float]:
    """Return the seconds that one micro batch costs a pipeline stage, forward and backward."""
    seconds: dict[str, float] = defaultdict(float)
    expert_width = (args.moe_ffn_hidden_size or 1) // layout.expert_tensor
    width = expert_width / (expert_width + assumed.expert_half_width)
    reduced = assumed.fp8_share if peak > gpu.bf16 else 1.0
    for parts in rank_operations(args, layout, pipeline_rank).values():
        for part, count in parts.items():
            if part in (CORE_ATTENTION, DELTA_RULE):
                seconds["attention kernels"] += count / (gpu.bf16 * assumed.attention_share)
            elif part == "experts":
                seconds["experts"] += count / (peak * reduced * assumed.matrix_share * width)
            else:
                seconds["other matrix products"] += count / (peak * reduced * assumed.matrix_share)
    kept, whole = sum(memory.micro_batch.values()), _without_recomputation(args, layout, pipeline_rank)
    traffic = assumed.memory_passes * whole + assumed.recompute_passes * (whole - kept)
    seconds["memory traffic"] = traffic / (gpu.memory_bandwidth * assumed.memory_share)
    layers = "".join(layers for layers, _, _ in layout.chunks(args.hybrid_layer_pattern, pipeline_rank))
    seconds["launches"] = len(layers) * assumed.layer_overhead + layers.count(EXPERTS) * assumed.expert_overhead
    for transfer in transfers:
        if transfer.kind in DATA_KINDS:
            continue
        exposed = 1 - assumed.hidden_expert_share if transfer.kind == "expert" else 1.0
        if transfer.kind == "pipeline" and args.overlap_p2p_comm and layout.virtual > 1:
            exposed = 0.0
        cost = transfer_seconds(args, transfer, gpu, assumed) / layout.micro_batches
        seconds[f"{transfer.kind} communication"] += exposed * cost
    return dict(seconds)


def _without_recomputation(args: argparse.Namespace, layout: Layout, pipeline_rank: int) -> int:
    """Return the bytes of activations that one micro batch makes on a pipeline stage, kept or not."""
    plain = copy.copy(args)
    plain.recompute_granularity, plain.recompute_gate = None, False
    chunks = layout.chunks(args.hybrid_layer_pattern, pipeline_rank)
    return sum(sum(chunk_activations(plain, layout, *chunk).values()) for chunk in chunks)


def _once_a_step(
    args: argparse.Namespace,
    gpu: Gpu,
    memory: RankMemory,
    transfers: Sequence[Transfer],
    batch_seconds: float,
    assumed: Assumptions,
) -> dict[str, float]:
    """Return the seconds of a step that come once: gradients, optimizer, new weights."""
    gradients = weights = 0.0
    for transfer in transfers:
        if transfer.kind in DATA_KINDS:
            cost = transfer_seconds(args, transfer, gpu, assumed)
            if transfer.operation == GATHER:
                weights += cost
            else:
                assert transfer.operation in (SCATTER, REDUCE)
                gradients += cost
    if args.overlap_grad_reduce:  # behind the last micro batch's backward pass
        gradients = max(0.0, gradients - batch_seconds * 2 / 3)
    if args.overlap_param_gather:  # behind the first micro batch's forward pass
        weights = max(0.0, weights - batch_seconds / 3)
    # The optimizer reads and writes its own state, and reads gradients and writes weights in its part.
    touched = 2 * (memory.static.main_weights + memory.static.moments) + memory.static.gradients
    return {
        "gradients' reduction": gradients,
        "weights' gathering": weights,
        "optimizer": touched / (gpu.memory_bandwidth * assumed.memory_share),
    }


def transfer_seconds(args: argparse.Namespace, transfer: Transfer, gpu: Gpu, assumed: Assumptions) -> float:
    """Return how long the bytes of a collective take, all its calls of a step one after another."""
    share = transfer.remote_share(gpu.node)
    remote, local = transfer.sent * share, transfer.sent * (1 - share)
    if transfer.kind == "expert" and args.moe_token_dispatcher_type == "flex" and share:
        # It sends a token once to each node where it has experts, and from there on by NVLink.
        nodes = transfer.span / gpu.node
        reached = nodes * (1 - (1 - 1 / nodes) ** args.moe_router_topk)
        remote = transfer.given * min(1.0, (reached - reached / nodes) / args.moe_router_topk)
        local = transfer.sent
    return remote / (gpu.network * assumed.link_share) + local / (gpu.nvlink * assumed.link_share)


def shares(args: argparse.Namespace) -> dict[str, float]:
    """Return which share of the model's operations each part has."""
    parts = per_token(args)
    total = sum(parts.values())
    return {part: count / total for part, count in parts.most_common()}
