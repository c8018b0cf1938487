"""What came of a grid, in the form of the paper's tables: a row for each setting, means and deviations over seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megagate.ablate.cell import has_diverged
from megagate.ablate.grid import SPREAD, Grid
from megagate.ablate.settings import Work
from megagate.report.tables import NOTHING, Table, number

COLUMNS = {
    "PPL": ("perplexity", 5),
    "gate score": ("gate score", 3),
    "M-Act": ("M-Act", 4),
    "F-Attn": ("F-Attn", 3),
    "tokens/s": ("tokens/s", 4),
}
"""Column -> key of a cell's result, and significant digits."""


def rows_of(grid: Grid, works: Sequence[Work]) -> list[dict[str, Any]]:
    """Return a row for each combination of labels without the seed's, as JSON has it.

    Of each number there are the values, one for each seed that has not diverged, their mean, and their standard
    deviation (of a sample: n - 1), None for a single value.
    """
    groups: dict[tuple[str, ...], list[Work]] = {}
    for work in works:
        groups.setdefault(work.cell.key, []).append(work)
    axes = [axis for axis in grid.axes if axis != SPREAD]
    rows = []
    for key, members in groups.items():
        results = [result for work in members if (result := work.result()) is not None]
        counted = [result for result in results if not has_diverged(result, grid.diverged_above)]
        rows.append(
            {
                "labels": dict(zip(axes, key, strict=True)),
                "cells": len(members),
                "finished": len(results),
                "diverged": len(results) - len(counted),
                "numbers": {
                    column: _spread([result.get(name) for result in counted]) for column, (name, _) in COLUMNS.items()
                },
                "results": results,
            }
        )
    return rows


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    return {
        "n": len(known),
        "mean": statistics.fmean(known) if known else None,
        "standard deviation": statistics.stdev(known) if len(known) > 1 else None,
        "values": known,
    }


def table(grid: Grid, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the rows for people."""
    axes = [axis for axis in grid.axes if axis != SPREAD] or ["recipe"]
    lines = []
    for row in rows:
        labels = list(row["labels"].values()) or [grid.recipe.stem]
        cells = [_cell(row["numbers"][column], digits) for column, (_, digits) in COLUMNS.items()]
        lines.append([*labels, _count(row), *cells])
    return Table(caption(grid, rows), [*axes, "n", *COLUMNS], lines)


def _count(row: Mapping[str, Any]) -> str:
    """Return over how many cells the means are, and what became of the others."""
    missing = row["cells"] - row["finished"]
    others = [f"{row['diverged']} diverged"] if row["diverged"] else []
    others += [f"{missing} missing"] if missing else []
    return "; ".join([str(row["finished"] - row["diverged"]), *others])


def _cell(spread: Mapping[str, Any], digits: int) -> str:
    """Return mean and deviation to as many decimals as the mean has."""
    mean, deviation = spread["mean"], spread["standard deviation"]
    if mean is None or not math.isfinite(mean):
        return NOTHING
    text = number(mean, digits)
    if deviation is None:
        return text
    return f"{text} \u00b1 {deviation:,.{len(text.partition('.')[2])}f}"


def caption(grid: Grid, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the numbers are."""
    results = [result for row in rows for result in row["results"]]
    tokens = sorted({result["tokens"] for result in results if result.get("tokens")})
    trained = sorted({result["training tokens"] for result in results if result["training tokens"]})
    floors = sorted({round(result["F-Attn if uniform"], 4) for result in results if result.get("F-Attn if uniform")})
    measured = f" on {' or '.join(f'{count:,}' for count in tokens)} held-out tokens" if tokens else ""
    learned = f", after {' or '.join(f'{count:,.0f}' for count in trained)} of training" if trained else ""
    floor = f" (evenly spread attention has {', '.join(map(str, floors))})" if floors else ""
    return (
        f"Mean and standard deviation over n values of {SPREAD}. PPL, gate score, M-Act and F-Attn{measured}{learned}; "
        f"M-Act is the mean over blocks of the largest absolute output, F-Attn the share of attention on the first "
        f"token without the first rows{floor}; tokens/s is the median of the training. A run whose training loss is "
        f"not finite or ends {grid.diverged_above:g} nats above its lowest has diverged, and is in no mean."
    )
