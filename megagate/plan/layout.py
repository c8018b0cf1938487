"""The parallel sizes of a run, and where in them a rank is.

Sizes multiply: tensor x context x data x pipeline ranks make the world, and expert tensor x expert x expert data x
pipeline ranks make the same world again, for the experts (arXiv 2504.14960).
"""

import argparse
from dataclasses import dataclass

from megagate.errors import UserError
from megagate.model.pattern import BOUNDARY


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run's ranks share the model and the data."""

    world: int
    tensor: int
    pipeline: int
    virtual: int
    """Pipeline stages, that is, model chunks, on each rank."""
    context: int
    expert: int
    expert_tensor: int
    sequence_parallel: bool
    instances: int
    """Groups of data-parallel ranks that each hold the optimizer state once (--num-distributed-optimizer-instances)."""
    sequence: int
    micro_batch: int
    """Sequences that one rank computes at a time."""
    micro_batches: int
    """Micro batches of a step on each data-parallel rank."""

    @property
    def data(self) -> int:
        """Data-parallel ranks, context parallelism not counted."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def data_context(self) -> int:
        """Ranks that hold the same dense parameters."""
        return self.data * self.context

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.world // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch on one rank where the sequence is cut over context-parallel ranks only."""
        return self.micro_batch * self.sequence // self.context

    @property
    def sharded_tokens(self) -> int:
        """Tokens of a micro batch on one rank where sequence parallelism cuts the sequence too."""
        return self.tokens // (self.tensor if self.sequence_parallel else 1)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.micro_batches * self.micro_batch * self.data * self.sequence

    def pipeline_rank(self, rank: int) -> int:
        """Return which pipeline rank a rank is."""
        return rank // (self.world // self.pipeline)

    def data_context_rank(self, rank: int) -> int:
        """Return a rank's place among those that hold the same dense parameters."""
        return rank // self.tensor % self.data_context

    def expert_data_rank(self, rank: int) -> int:
        """Return a rank's place among those that hold the same experts."""
        return rank // (self.expert_tensor * self.expert) % self.expert_data

    def chunks(self, pattern: str, pipeline_rank: int) -> list[tuple[str, bool, bool]]:
        """Return (layers, whether it is the model's first, its last) of each model chunk of a pipeline rank."""
        stages = pattern.split(BOUNDARY)
        return [
            (stages[index], index == 0, index == len(stages) - 1)
            for index in range(pipeline_rank, len(stages), self.pipeline)
        ]

    def in_flight_by_chunk(self, pipeline_rank: int) -> list[int]:
        """Return the most micro batches whose activations a pipeline rank keeps at once, for each of its chunks.

        The schedules are Megatron's: 1F1B, and interleaved 1F1B with virtual stages (arXiv 2104.04473), in which a rank
        runs its chunks by turns, as many micro batches at a time as there are pipeline ranks.
        """
        after = self.pipeline - pipeline_rank - 1
        if self.virtual == 1:
            return [min(after + 1, self.micro_batches)]
        started = 2 * after + (self.virtual - 1) * self.pipeline + 1
        started = min(started, self.micro_batches * self.virtual)
        counts = [0] * self.virtual
        for number in range(started):
            counts[number // self.pipeline % self.virtual] += 1
        return counts


def layout_of(args: argparse.Namespace) -> Layout:
    """Return the layout that checked arguments describe.

    Raises:
        UserError: the batch size changes during the run, or ranks are ordered in another way.
    """
    if args.rampup_batch_size is not None:
        raise UserError("--rampup-batch-size changes what a step is: leave it out to plan for the full batch")
    if args.use_tp_pp_dp_mapping:
        raise UserError("--use-tp-pp-dp-mapping puts ranks in another order than the plan's: leave it out")
    sizes = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    data = args.world_size // (sizes[0] * sizes[1] * sizes[2])
    batch = args.global_batch_size or args.micro_batch_size * data
    return Layout(
        world=args.world_size,
        tensor=sizes[0],
        pipeline=sizes[1],
        virtual=(args.hybrid_layer_pattern.count(BOUNDARY) + 1) // sizes[1],
        context=sizes[2],
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size,
        sequence_parallel=args.sequence_parallel and sizes[0] > 1,
        instances=args.num_distributed_optimizer_instances,
        sequence=args.seq_length,
        micro_batch=args.micro_batch_size,
        micro_batches=batch // (args.micro_batch_size * data),
    )
