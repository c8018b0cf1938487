"""Which rows are looked at: all that stand for a sequence, the same on every layout."""

from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import strategies

from megagate.telemetry import rows as telemetry_rows
from megagate.telemetry.rows import Sample, first_rows, row_weights


@hypothesis.given(length=strategies.integers(1, 5000), rows=strategies.integers(1, 200))
def test_rows_stand_for_the_whole_sequence(length: int, rows: int) -> None:
    weights = row_weights(length, rows)
    assert weights.sum() == length
    first = first_rows(length)
    assert 1 <= first <= max(1, length // 16)
    assert (weights[:first] == 1).all()
    assert (weights[first:] > 0).sum() == min(rows, length - first)


def test_a_row_stands_in_the_middle_of_its_part() -> None:
    assert row_weights(4, 3).tolist() == [1, 1, 1, 1]
    assert row_weights(11, 2).tolist() == [1, 0, 0, 5, 0, 0, 0, 0, 5, 0, 0]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (1, 4), (4, 1), (2, 2)])
def test_ranks_look_at_the_rows_of_one_process(
    cp: int, tp: int, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, rows = 64, 7
    monkeypatch.setattr(telemetry_rows, "get_pg_size", lambda group: group[0])
    monkeypatch.setattr(telemetry_rows, "get_pg_rank", lambda group: group[1])
    expected = row_weights(length, rows)
    parts = tp if sequence_parallel else 1
    found = torch.zeros(length)
    for cp_rank in range(cp):
        held = telemetry_rows.zigzag_positions(length, cp, cp_rank)
        for tp_rank in range(parts):
            groups = SimpleNamespace(cp=(cp, cp_rank), tp=(tp, tp_rank))
            sample = Sample(rows, groups, sequence_parallel, torch.device("cpu"))  # type: ignore[arg-type]
            chosen = sample.in_stream(length // cp // parts)
            assert torch.equal(held.chunk(parts)[tp_rank][chosen.index], chosen.position)
            found[chosen.position] += chosen.weight
            inside = sample.in_attention(length // cp)
            assert torch.equal(held[inside.index], inside.position)
    assert torch.equal(found, expected)
