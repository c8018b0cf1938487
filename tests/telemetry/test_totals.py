"""Sums and maxima of two ranks are those of one process."""

import math

import pytest
import torch

from megagate.telemetry.totals import Totals
from tests.distributed import run_distributed

BLOCKS = 8


def reduced_twice() -> list[dict[str, torch.Tensor]]:
    """Return what two ranks find in a step and in the next one, in which they find nothing."""
    rank = torch.distributed.get_rank()
    totals = Totals(BLOCKS, torch.device("cpu"))
    totals.declare_sum("tokens", 3)
    totals.declare_sum("rows")
    totals.declare_maximum("largest")
    totals.declare_maximum("broken")
    totals.add("tokens", 2, torch.tensor([1.0, 2.0, 3.0 + rank]))
    totals.add("rows", BLOCKS, 1.5)
    for value in (5.0 + rank, 4.0):
        totals.raise_to("largest", 1 + rank, torch.tensor(value))
    for block in range(1, BLOCKS + 1):
        totals.raise_to("broken", block, torch.tensor(math.nan if block % 2 == rank else 1.0))
    first = totals.reduce()
    totals.reset()
    return [first, totals.reduce()]


def test_ranks_together() -> None:
    for first, second in run_distributed(reduced_twice, 2):
        assert first["tokens"].tolist() == [[0, 0, 0], [2, 4, 7], *[[0, 0, 0]] * 6]
        assert first["rows"].tolist() == [0] * 7 + [3]
        assert first["largest"].tolist() == [5, 6, *[-math.inf] * 6]
        # Each block has NaN on one of the ranks, and stays so whichever comes first.
        assert first["broken"].isnan().all()
        assert not second["tokens"].any()
        assert (second["broken"] == -math.inf).all()


def test_without_maxima() -> None:
    totals = Totals(2, torch.device("cpu"))
    totals.declare_sum("rows")
    totals.add("rows", 2, 7.0)
    found = totals.reduce()
    assert found.keys() == {"rows"}
    assert found["rows"].tolist() == pytest.approx([0, 7])
