"""One training step of a real run on gloo, with the bytes of every collective counted as torch dispatches it."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model import training

GIVEN = {
    "allreduce_": 0,
    "allgather_": 1,
    "_allgather_base_": 1,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "alltoall_base_": 1,
    "allreduce_coalesced_": 0,
    "allgather_into_tensor_coalesced_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "send": 0,
    "broadcast_": 0,
}
"""Which argument of a collective holds what the rank hands over; others only receive."""


class Traffic(TorchDispatchMode):
    """Adds up the bytes that this rank hands over, by collective, ranks that take part, and size of the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, tuple[int, ...], int]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._opname
        if function.namespace == "c10d" and name in GIVEN:
            groups = [value for value in args if isinstance(value, torch.ScriptObject)]
            group = torch.distributed.ProcessGroup.unbox(groups[0])
            ranks = tuple(torch.distributed.get_process_group_ranks(group))
            given = args[GIVEN[name]]
            self.calls[name, ranks, _bytes(given)] += 1
        return function(*args, **(kwargs or {}))


def _bytes(value: Any) -> int:
    """Return the bytes of a tensor or of all tensors in nested lists."""
    return value.nbytes if isinstance(value, torch.Tensor) else sum(map(_bytes, value))


def step_traffic(flags: str) -> Counter[tuple[str, tuple[int, ...], int]]:
    """Take one training step, and return what this rank handed over in the course of it."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training.training import train_step

    from megagate.pretrain.batch import forward_step

    model, optimizer, scheduler = training.build(training.Case(flags=flags))
    config = model[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    iterators = [training.micro_batches(0, False, get_num_microbatches()) for _ in model]
    with Traffic() as traffic:
        train_step(
            forward_step,
            iterators if len(model) > 1 else iterators[0],
            model,
            optimizer,
            scheduler,
            config,
            get_forward_backward_func(),
        )
    return traffic.calls


NAMES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}
SMALLEST = 64
"""Bytes of a message that counts; smaller ones are losses, norms, flags and counts of tokens."""


def given_and_planned(flags: str) -> tuple[dict[tuple[str, int], int], dict[tuple[str, int], int]]:
    """Return the bytes that this rank hands over in a step, by operation and number of ranks, counted and planned."""
    from megatron.training import get_args

    from megagate.plan.communication import step_transfers
    from megagate.plan.layout import layout_of

    given: Counter[tuple[str, int]] = Counter()
    for (name, ranks, size), calls in step_traffic(flags).items():
        # The batch is broadcast to tensor-parallel ranks.
        if len(ranks) == 1 or size <= SMALLEST or name == "broadcast_":
            continue
        operation = next((ours for theirs, ours in NAMES.items() if theirs in name), name)
        given[operation, len(ranks)] += size * calls
    args = get_args()
    layout = layout_of(args)
    planned: Counter[tuple[str, int]] = Counter()
    for transfer in step_transfers(args, layout, layout.pipeline_rank(torch.distributed.get_rank())):
        planned[transfer.operation, transfer.ranks] += transfer.given
    return dict(given), dict(planned)
