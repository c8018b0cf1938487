"""What the tests of plans need inside a rank of `tests.distributed`: ranks of other, larger runs, without memory."""

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch

from megagate.plan.dry_run import Rank, arguments_for, build
from megagate.plan.layout import Layout, layout_of


@contextlib.contextmanager
def without_help() -> Iterator[None]:
    """Keep Megatron from parsing its own source for the help of its flags, which takes longer than all else here."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    with mock.patch.object(ArgumentGroupFactory, "_get_field_docstrings", lambda self, kind: {}):
        yield


@contextlib.contextmanager
def rank_of(argv: Sequence[str], world_size: int, rank: int) -> Iterator[tuple[Rank, Layout]]:
    """Build one rank of a run, as the dry run does, and give its layout too."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # the test's own, of one rank
    with without_help():
        args, _ = arguments_for(argv, world_size, rank)
        with build(args) as built:
            yield built, layout_of(args)
