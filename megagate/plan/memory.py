"""Bytes of GPU memory that a rank needs: what stays all run long, and what micro batches keep while they are in flight.

What of weights, gradients and optimizer state lies where in Megatron's buffers is computed by Megatron's own function,
from a list of parameters without memory.
"""

import argparse
import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megagate.model.pattern import EXPERTS
from megagate.plan.activations import chunk_activations, layer_activations
from megagate.plan.fp8 import Fp8Weights, count_fp8
from megagate.plan.layout import Layout
from megagate.plan.parameters import Tensor, chunk_tensors

FP32 = 4


@dataclass(frozen=True)
class StaticMemory:
    """Bytes on one rank that are there from the first step to the last."""

    weights: int
    """As the model computes with them, padding of the buffers included."""
    fp8_copies: int
    """Of weights that are in bf16 too."""
    gradients: int
    main_weights: int
    """The optimizer's fp32 copies of 16-bit weights."""
    moments: int
    """Adam's two."""
    parameters: int
    """Not bytes: how many parameters the rank holds."""
    gate_share: float
    """Which part of the rank's parameters is the gate's."""
    chunks: list[list[Tensor]] = field(repr=False)
    """The parameters of each model chunk."""
    buffers: list[tuple[bool, int, int]] = field(repr=False)
    """Whether it is the experts', elements, and elements of this rank's part of the optimizer, of each buffer."""
    gathered: Mapping[bool, float]
    """In how many bytes the distributed optimizer hands over a new weight: of experts (True), and others."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.fp8_copies + self.gradients + self.main_weights + self.moments


def rank_chunks(args: argparse.Namespace, layout: Layout, pipeline_rank: int) -> list[list[Tensor]]:
    """Return the parameters of each model chunk of a pipeline rank."""
    return [
        chunk_tensors(args, *chunk, tensor=layout.tensor, expert=layout.expert, expert_tensor=layout.expert_tensor)
        for chunk in layout.chunks(args.hybrid_layer_pattern, pipeline_rank)
    ]


def gradient_width(args: argparse.Namespace) -> int:
    """Return the bytes of a gradient in Megatron's buffers."""
    width: int = args.params_dtype.itemsize
    return FP32 if args.accumulate_allreduce_grads_in_fp32 else width


def static_memory(args: argparse.Namespace, layout: Layout, rank: int) -> StaticMemory:
    """Return what a rank keeps all run long.

    Args:
        args: validated arguments.
        layout: of the run.
        rank: which of its ranks; those with the same place in the pipeline differ by a few bytes of optimizer state.
    """
    pipeline_rank = layout.pipeline_rank(rank)
    places = {False: layout.data_context_rank(rank), True: layout.expert_data_rank(rank)}
    width = args.params_dtype.itemsize
    chunks = rank_chunks(args, layout, pipeline_rank)
    buffers = _buffers(args, layout, pipeline_rank, chunks, places)
    held = sum(size for _, size, _ in buffers)
    main = sum(shard for *_, shard in buffers)
    parameters = sum(tensor.size for chunk in chunks for tensor in chunk)
    gate = sum(tensor.gate for chunk in chunks for tensor in chunk)
    weights, copies, gathered = held * width, 0, {False: float(width), True: float(width)}
    fp8: Fp8Weights | None = getattr(args, "fp8_weights", None)
    if fp8 is not None:
        counts = count_fp8(args, fp8, layout, pipeline_rank)
        quantized = int(counts.total() * fp8.width)
        weights, copies = (weights - counts.total() * width + quantized, 0) if fp8.alone else (weights, quantized)
        if fp8.gathered_width is not None:
            for kind, count in counts.items():
                share = count / sum(size for is_expert, size, _ in buffers if is_expert is kind)
                gathered[kind] -= share * (width - fp8.gathered_width)
    return StaticMemory(
        weights=weights,
        fp8_copies=copies,
        gradients=held * gradient_width(args),
        main_weights=main * _main_width(args) if width < FP32 else 0,
        moments=main * (args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize),
        parameters=parameters,
        gate_share=gate / parameters,
        chunks=chunks,
        buffers=buffers,
        gathered=gathered,
    )


def _main_width(args: argparse.Namespace) -> int:
    """Return the bytes of the optimizer's copy of a 16-bit weight.

    Transformer Engine's precision-aware Adam keeps of an fp32 copy what the bf16 weight lacks (store_param_remainders),
    unless Megatron keeps the copies itself, as it does with most recipes of FP8.
    """
    dtype: torch.dtype = args.main_params_dtype
    is_adams = args.use_precision_aware_optimizer and args.fp8_recipe in (None, "delayed")
    is_remainder = is_adams and args.bf16 and dtype == torch.float32
    return dtype.itemsize - args.params_dtype.itemsize if is_remainder else dtype.itemsize


def _buffers(
    args: argparse.Namespace,
    layout: Layout,
    pipeline_rank: int,
    chunks: Sequence[Sequence[Tensor]],
    places: Mapping[bool, int],
) -> list[tuple[bool, int, int]]:
    """Return `StaticMemory.buffers`; `places` are the rank's among those with the same dense weights, and experts."""
    buffers = []
    for index, chunk in enumerate(chunks):
        if args.use_distributed_optimizer:
            bucket_size = _bucket_size(args, layout, chunks) if index == 0 and pipeline_rank == 0 else None
            buffers += _distributed_buffers(args, layout, chunk, bucket_size, places)
            continue
        for is_expert in (False, True):
            size = sum(tensor.size for tensor in chunk if tensor.is_expert is is_expert)
            buffers += [(is_expert, size, size)] if size else []
    return buffers


def _bucket_size(args: argparse.Namespace, layout: Layout, chunks: Sequence[Sequence[Tensor]]) -> int | None:
    """Return the parameters after which Megatron begins a new bucket, on the first pipeline rank's first chunk."""
    if not args.overlap_grad_reduce:
        return None
    if args.ddp_num_buckets is not None:
        return sum(tensor.size for chunk in chunks for tensor in chunk) // args.ddp_num_buckets
    return args.ddp_bucket_size or max(40_000_000, 1_000_000 * layout.data_context)


def _distributed_buffers(
    args: argparse.Namespace,
    layout: Layout,
    chunk: Sequence[Tensor],
    bucket_size: int | None,
    places: Mapping[bool, int],
) -> list[tuple[bool, int, int]]:
    """Return the same for one chunk under the distributed optimizer."""
    parameters = []
    for tensor in chunk:
        parameter = torch.nn.Parameter(torch.empty(tensor.shape, dtype=args.params_dtype, device="meta"))
        parameter.allreduce = not tensor.is_expert  # type: ignore[attr-defined]
        parameter.shared_embedding = tensor.is_shared  # type: ignore[attr-defined]
        parameters.append(parameter)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        pad_buckets_for_high_nccl_busbw=args.ddp_pad_buckets_for_high_nccl_busbw,
    )
    sizes = {
        False: layout.data_context // layout.instances,
        True: max(1, layout.expert_data // layout.instances),
    }
    full = DistributedOptimizer.compute_full_param_layout(
        parameters, bucket_size, sizes[False], config, expert_data_parallel_world_size=sizes[True]
    )
    buffers = []
    for key, buffer in full.layouts.items():
        ranks = sizes[key.is_expert_parallel]
        place = places[key.is_expert_parallel] % ranks
        shard = 0
        for start, end, bucket in buffer.param_index_map.values():
            first, last = buffer.bucket_indices[bucket]
            part = (last - first) // ranks
            shard += max(0, min(end, first + (place + 1) * part) - max(start, first + place * part))
        buffers.append((key.is_expert_parallel, buffer.bucket_indices[-1][1], shard))
    return buffers


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank at the fullest moment of a step."""

    static: StaticMemory
    micro_batch: dict[str, int]
    """What one micro batch keeps for its backward pass in all of the rank's chunks, by part."""
    activations: int
    """What all micro batches in flight keep."""
    temporary: int
    """The largest operator's inputs and results: an estimate."""
    reserve: int
    """CUDA's context, NCCL's buffers, fragmentation: an assumption."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.static.total + self.activations + self.temporary + self.reserve


CONTEXT_BYTES = 3 * 2**30
FRAGMENTATION = 0.05


def stage_static(args: argparse.Namespace, layout: Layout, pipeline_rank: int) -> StaticMemory:
    """Return what the first rank of a pipeline stage keeps all run long; those alike differ by a few bytes."""
    return static_memory(args, layout, pipeline_rank * (layout.world // layout.pipeline))


def rank_memory(
    args: argparse.Namespace, layout: Layout, pipeline_rank: int, static: StaticMemory | None = None
) -> RankMemory:
    """Return what a rank of a pipeline stage needs.

    Args:
        args: validated arguments.
        layout: of the run.
        pipeline_rank: which stage's.
        static: of the stage, if it is known.
    """
    chunks = layout.chunks(args.hybrid_layer_pattern, pipeline_rank)
    kept = [chunk_activations(args, layout, *chunk) for chunk in chunks]
    in_flight = layout.in_flight_by_chunk(pipeline_rank)
    activations = sum(sum(parts.values()) * count for parts, count in zip(kept, in_flight, strict=True))
    temporary = _temporary(args, layout, chunks)
    reserve = CONTEXT_BYTES + int(FRAGMENTATION * (activations + temporary))
    return RankMemory(
        static or stage_static(args, layout, pipeline_rank), dict(sum(kept, Counter())), activations, temporary, reserve
    )


def _temporary(args: argparse.Namespace, layout: Layout, chunks: Sequence[tuple[str, bool, bool]]) -> int:
    """Return the bytes of the largest of: logits and their gradient; an expert layer's rows; a layer computed again."""
    width = args.params_dtype.itemsize
    candidates = [0]
    if any(last for _, _, last in chunks):
        candidates.append(layout.tokens * args.padded_vocab_size // layout.tensor * (width + FP32))
    layers = "".join(layers for layers, _, _ in chunks)
    if EXPERTS in layers:
        rows = layout.sharded_tokens * args.moe_router_topk * layout.expert_tensor
        candidates.append(rows * (3 * args.hidden_size + 2 * args.moe_ffn_hidden_size) * width)
    if args.recompute_granularity == "full":
        plain = copy.copy(args)
        plain.recompute_granularity = None
        again = [sum(layer_activations(plain, layout, symbol).values()) for symbol in set(layers)]
        candidates.append(max(again) * (args.recompute_num_layers or 1))
    return max(candidates)
