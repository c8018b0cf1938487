"""Under --dataloader-type cyclic each epoch has all samples once, in an order that no layout and no resume changes."""

import argparse
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagate.pretrain import sampler
from megagate.pretrain.sampler import CyclicSampler


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "get_args", lambda: argparse.Namespace(seed=5))


def stream(total: int, consumed: int, micro_batch: int, ranks: int, count: int) -> list[int]:
    """Return `count` samples in the order of the run."""
    samplers = [CyclicSampler(None, total, consumed, micro_batch, rank, ranks, True) for rank in range(ranks)]
    turns = zip(*samplers, strict=True)
    samples = (sample for turn in turns for batch in turn for sample in batch)
    return list(itertools.islice(samples, count))


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(0, 60))
def test_the_order(total: int, micro_batch: int, ranks: int, consumed: int) -> None:
    expected = stream(total, 0, 1, 1, 120)
    assert stream(total, consumed, micro_batch, ranks, 60) == expected[consumed : consumed + 60]
    for start in range(0, 120 - total, total):
        assert sorted(expected[start : start + total]) == list(range(total))


def test_epochs_and_seeds_have_orders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first = stream(30, 0, 1, 1, 60)
    assert first[:30] != first[30:] and first[:30] != list(range(30))
    monkeypatch.setattr(sampler, "get_args", lambda: argparse.Namespace(seed=6))
    assert stream(30, 0, 1, 1, 60) != first
