"""Several validation sets while training, by Megatron's own flags, each evaluated as a whole, every token once.

    --valid-data-path books code --multiple-validation-sets --full-validation --validation-set-names books code

logs `lm loss validation-books` and `lm loss validation-code`. Megatron evaluates as many batches as a set has
sequences, which reads it again and again where a batch has more than one; counts some twice to give all ranks as many;
leaves out the end of a set that fills no sequence; and fails on a pipeline stage without data and on virtual stages.
Here the last sequence and the last batch are filled up with what does not count, so that the loss is that of
`tools/evaluate.py perplexity` on any layout and for any batch size.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from megatron.training import get_args, training
from megatron.training.datasets import data_samplers
from megatron.training.utils import get_blend_and_blend_per_split

from megagate.around import put_around
from megagate.errors import UserError

TEST = 2
"""The place of the test set among the splits."""


class WholeSetSampler:
    """Micro batches of a data-parallel rank: all samples in order, then None, a sample without a loss, to fill up.

    Takes the constructor arguments of Megatron's `MegatronFullValidationSampler`.
    """

    def __init__(self, total_samples: int, data_parallel_rank: int, data_parallel_size: int) -> None:
        args = get_args()
        self.total_samples = total_samples
        self.micro_batch_size = args.eval_micro_batch_size
        self.batch_size = args.eval_global_batch_size
        self.first = data_parallel_rank * self.micro_batch_size
        self.step = data_parallel_size * self.micro_batch_size

    def __len__(self) -> int:
        """Return the number of global batches, which Megatron takes for the number of its evaluations."""
        return -(-self.total_samples // self.batch_size)

    def __iter__(self) -> Iterator[list[int | None]]:
        for start in range(self.first, len(self) * self.batch_size, self.step):
            places = range(start, start + self.micro_batch_size)
            yield [place if place < self.total_samples else None for place in places]


def apply(args: argparse.Namespace, until_end: ExitStack) -> None:
    """Mend Megatron's evaluation of whole sets, where the run has such, until `until_end` closes."""
    if not args.multiple_validation_sets:
        return
    put_around(until_end, data_samplers, "MegatronFullValidationSampler", lambda original: WholeSetSampler)
    put_around(until_end, training, "build_train_valid_test_data_iterators", _tell_every_rank_the_sizes)
    if args.virtual_pipeline_model_parallel_size is not None:
        put_around(until_end, training, "evaluate_and_print_results", _by_set)


def _tell_every_rank_the_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ranks and virtual stages that read no data know no sizes, and Megatron fails there."""
    asked = get_args().eval_iters
    sizes: list[int] = []

    @functools.wraps(original)
    def build(*args: Any) -> Any:
        get_args().eval_iters = asked  # what an earlier virtual stage has left is no number
        iterators = original(*args)
        box = [get_args().eval_iters]
        torch.distributed.broadcast_object_list(box)
        if None not in box[0]:  # as on the first rank's first stage
            sizes[:] = box[0]
        get_args().eval_iters = sizes
        return iterators

    return build


def _by_set(original: Callable[..., Any]) -> Callable[..., Any]:
    """With virtual stages Megatron has, for each of them, an iterator of each set, and looks for the reverse."""

    @functools.wraps(original)
    def evaluate(prefix: str, forward_step: Any, iterators: list[list[Any]], *args: Any, **kwargs: Any) -> Any:
        of_sets = [list(of_set) for of_set in zip(*iterators, strict=True)]
        return original(prefix, forward_step, of_sets, *args, **kwargs)

    return evaluate


def check_validation_sets(args: argparse.Namespace) -> None:
    """Check the flags about whole validation sets.

    Raises:
        UserError: they need something that is not given, or would fail at the first evaluation or at the end.
    """
    names = args.validation_set_names
    if names and not args.multiple_validation_sets:
        raise UserError("--validation-set-names has no effect without --multiple-validation-sets: add it")
    if args.multiple_validation_sets != args.full_validation:
        given, other = "--multiple-validation-sets", "--full-validation"
        if args.full_validation:
            given, other = other, given
        raise UserError(f"{given} works together with {other} only: add it")
    if not args.multiple_validation_sets:
        return
    _, per_split = get_blend_and_blend_per_split(args)
    sets, weights = (per_split[1] if per_split else None) or (None, None)
    if not sets or args.mock_data:
        raise UserError(
            "--multiple-validation-sets needs the sets: name them in --valid-data-path, and the training data in "
            "--train-data-path"
        )
    if weights is not None:
        raise UserError("--multiple-validation-sets evaluates each set on its own: leave the weights out")
    if names and len(names) != len(sets):
        raise UserError(
            f"--validation-set-names has {len(names)} names for {len(sets)} validation sets: give one name for each"
        )
    if names and len(set(names)) < len(names):
        raise UserError("--validation-set-names gives one name to two sets, whose losses would mix: let them differ")
    if per_split[TEST] is not None:
        raise UserError("--multiple-validation-sets cannot evaluate a test set: name it in --valid-data-path too")
