"""Bytes of GPU memory that a rank needs: weights, gradients and optimizer state, which stay all run long.

What lies where in Megatron's buffers is computed by Megatron's own function, from a list of parameters without memory.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megagate.plan.layout import Layout
from megagate.plan.parameters import Tensor, chunk_tensors

FP32 = 4
ADAM_MOMENTS = 2


@dataclass(frozen=True)
class StaticMemory:
    """Bytes on one rank that are there from the first step to the last."""

    weights: int
    """As the model computes with them, padding of the buffers included."""
    gradients: int
    main_weights: int
    """The optimizer's fp32 copies of 16-bit weights."""
    moments: int
    """Adam's two."""
    parameters: int
    """Not bytes: how many parameters the rank holds."""
    gate_share: float
    """Which part of the rank's parameters is the gate's."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.main_weights + self.moments


def rank_chunks(args: argparse.Namespace, layout: Layout, pipeline_rank: int) -> list[list[Tensor]]:
    """Return the parameters of each model chunk of a pipeline rank."""
    return [
        chunk_tensors(args, *chunk, tensor=layout.tensor, expert=layout.expert, expert_tensor=layout.expert_tensor)
        for chunk in layout.chunks(args.hybrid_layer_pattern, pipeline_rank)
    ]


def static_memory(args: argparse.Namespace, layout: Layout, rank: int) -> StaticMemory:
    """Return what a rank keeps all run long.

    Args:
        args: validated arguments.
        layout: of the run.
        rank: which of its ranks; those with the same place in the pipeline differ by a few bytes of optimizer state.
    """
    pipeline_rank = layout.pipeline_rank(rank)
    chunks = rank_chunks(args, layout, pipeline_rank)
    places = {False: layout.data_context_rank(rank), True: layout.expert_data_rank(rank)}
    weights = gradients = main = 0
    width, moment_width = args.params_dtype.itemsize, FP32
    gradient_width = FP32 if args.accumulate_allreduce_grads_in_fp32 else width
    for index, chunk in enumerate(chunks):
        bucket_size = _bucket_size(args, layout, chunks) if index == 0 and pipeline_rank == 0 else None
        if not args.use_distributed_optimizer:
            held = sum(tensor.size for tensor in chunk)
            weights, gradients, main = weights + held, gradients + held, main + held
            continue
        for size, shard in _buffers(args, layout, chunk, bucket_size, places):
            weights, gradients, main = weights + size, gradients + size, main + shard
    parameters = sum(tensor.size for chunk in chunks for tensor in chunk)
    gate = sum(tensor.gate for chunk in chunks for tensor in chunk)
    return StaticMemory(
        weights=weights * width,
        gradients=gradients * gradient_width,
        main_weights=main * FP32 if width < FP32 else 0,
        moments=main * ADAM_MOMENTS * moment_width,
        parameters=parameters,
        gate_share=gate / parameters,
    )


def _bucket_size(args: argparse.Namespace, layout: Layout, chunks: Sequence[Sequence[Tensor]]) -> int | None:
    """Return the parameters after which Megatron begins a new bucket, on the first pipeline rank's first chunk."""
    if not args.overlap_grad_reduce:
        return None
    if args.ddp_num_buckets is not None:
        return sum(tensor.size for chunk in chunks for tensor in chunk) // args.ddp_num_buckets
    return args.ddp_bucket_size or max(40_000_000, 1_000_000 * layout.data_context)


def _buffers(
    args: argparse.Namespace,
    layout: Layout,
    chunk: Sequence[Tensor],
    bucket_size: int | None,
    places: dict[bool, int],
) -> list[tuple[int, int]]:
    """Return (elements, elements of this rank's optimizer shard) of each buffer."""
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
    for key in group_params_for_buffers(parameters, config.grad_reduce_in_fp32):
        buffer = full.layouts[key]
        ranks = sizes[key.is_expert_parallel]
        place = places[key.is_expert_parallel] % ranks
        shard = 0
        for start, end, bucket in buffer.param_index_map.values():
            first, last = buffer.bucket_indices[bucket]
            part = (last - first) // ranks
            shard += max(0, min(end, first + (place + 1) * part) - max(start, first + place * part))
        buffers.append((buffer.bucket_indices[-1][1], shard))
    return buffers
