"""The table of a grid: means and deviations over seeds, and runs that diverged shown and not averaged away."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
import yaml

from megagate.ablate.cell import NOT_FINITE, has_diverged
from megagate.ablate.grid import read_grid
from megagate.ablate.settings import RESULT, works
from megagate.ablate.table import rows_of, table
from megagate.pretrain.supervised import RERUN
from megagate.report.tables import Table
from megagate.report.text import aligned, markdown


@pytest.fixture
def finished(tmp_path: Path):
    """A grid of two presets and three seeds with the results of all cells but one, two of which diverged."""
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"num-layers": 2}))
    axes = {"seed": [1, 2, 3], "gate-preset": ["baseline", "sdpa-elementwise"]}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump({"recipe": "base.yaml", "axes": axes}, sort_keys=False))
    grid = read_grid(tmp_path / "grid.yaml")
    found = works(grid, tmp_path, [])
    generator = np.random.default_rng(5)
    values = generator.uniform(5, 50, len(found))
    for number, (work, value) in enumerate(zip(found, values, strict=True)):
        if number == 5:  # sdpa-elementwise, seed 3
            continue
        result = {
            "fingerprint": work.fingerprint,
            "labels": work.cell.labels,
            "not finite": "loss nan" if number == 2 else None,  # baseline, seed 2
            "last loss": None if number == 2 else 3.6 if number == 4 else 3.4,  # baseline, seed 3
            "lowest loss": 3.0,
            "training tokens": 1000.0,
            "tokens": 77,
            "perplexity": value,
            "gate score": None if number % 2 == 0 else value / 100,
            "M-Act": 10 * value,
            "F-Attn": value / 1000,
            "F-Attn if uniform": 0.02,
            "tokens/s": 1e4,
        }
        if number == 2:
            result = {key: result[key] for key in result if key not in ("perplexity", "gate score", "M-Act", "F-Attn")}
        work.folder.mkdir(parents=True)
        (work.folder / RESULT).write_text(json.dumps(result))
    return grid, found, values


def test_means_are_over_what_has_not_diverged(finished) -> None:
    grid, found, values = finished
    baseline, gated = rows_of(grid, found)
    assert (baseline["cells"], baseline["finished"], baseline["diverged"]) == (3, 3, 2)
    assert (gated["cells"], gated["finished"], gated["diverged"]) == (3, 2, 0)
    ppl = gated["numbers"]["PPL"]
    assert ppl == {
        "n": 2,
        "mean": pytest.approx(values[[1, 3]].mean()),
        "standard deviation": pytest.approx(values[[1, 3]].std(ddof=1)),
        "values": list(values[[1, 3]]),
    }
    assert baseline["numbers"]["PPL"]["mean"] == values[0]
    assert baseline["numbers"]["PPL"]["standard deviation"] is None
    assert baseline["numbers"]["gate score"]["n"] == 0


def test_the_table_says_it(finished) -> None:
    grid, found, values = finished
    shown = table(grid, rows_of(grid, found))
    assert shown.header == ["gate-preset", "n", "PPL", "gate score", "M-Act", "F-Attn", "tokens/s"]
    baseline, gated = shown.rows
    assert baseline[:3] == ["baseline", "1; 2 diverged", f"{values[0]:.3f}" if values[0] >= 10 else f"{values[0]:.4f}"]
    assert baseline[3] == "-"
    assert gated[1] == "2; 1 missing"
    mean, deviation = gated[2].split(" \u00b1 ")
    assert float(mean) == pytest.approx(values[[1, 3]].mean(), abs=1e-3)
    assert float(deviation) == pytest.approx(statistics.stdev(values[[1, 3]]), abs=1e-3)
    assert "77 held-out tokens, after 1,000 of training" in shown.caption
    assert "0.02" in shown.caption


def test_stale_results_are_not_taken(finished) -> None:
    grid, found, _ = finished
    (again,) = works(grid, found[0].folder.parents[1], ["--lr", "1"])[:1]
    assert again.result() is None
    damaged = json.loads((found[0].folder / RESULT).read_text()) | {"fingerprint": "another"}
    (found[0].folder / RESULT).write_text(json.dumps(damaged))
    assert found[0].result() is None
    (found[1].folder / RESULT).write_text("{")
    assert found[1].result() is None


@pytest.mark.parametrize(
    ("last", "lowest", "reason", "expected"),
    [
        (3.0, 3.0, None, False),
        (3.5, 3.0, None, False),
        (3.51, 3.0, None, True),
        (3.0, 3.0, "nan", True),
        (None, 3.0, None, True),
        (None, None, None, True),
    ],
)
def test_what_diverged_is(last: float | None, lowest: float | None, reason: str | None, expected: bool) -> None:
    assert has_diverged({"last loss": last, "lowest loss": lowest, "not finite": reason}, 0.5) is expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("RuntimeError: Rank 0, iteration 3: Unexpected result nan (message='NaN in the loss of a micro batch')", True),
        ("RuntimeError: Rank 0: Unexpected result inf (message='found Inf in local grad norm for bucket #0')", True),
        *((message, True) for message in RERUN.values()),
        ("OSError: cannot read /data/nan/inf.bin: No such file or directory", False),
        ("RuntimeError: an infinite loop", False),
    ],
)
def test_only_a_loss_that_is_not_finite_is_a_result(message: str, expected: bool) -> None:
    """Anything else that ends a training is a failure, after which the cell is run again."""
    assert bool(NOT_FINITE.search(message)) is expected


def test_forms_of_a_table() -> None:
    small = Table("what it is", ["a", "long head"], [["1", "x|y"], ["22", ""]])
    assert aligned(small) == "a   long head\n-------------\n1   x|y\n22\n\nwhat it is"
    assert markdown(small) == "| a | long head |\n| --- | --- |\n| 1 | x\\|y |\n| 22 |  |\n\nwhat it is\n"
