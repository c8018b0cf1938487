"""The page's tables: what came of each run, and in which flags the runs differ."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from megagate.errors import UserError
from megagate.report.runs import Run, Series
from megagate.report.spikes import find_spikes

LOSS, VALIDATION, PERPLEXITY = "lm loss", "lm loss validation", " ppl"
FIRST_TOKEN, FLOOR = "attention/first-token-share", "attention/first-token-share-uniform"
GATE_SCORE, LARGEST_ACTIVATION = "gate/mean-score", "activation/max"
TOKENS_PER_SECOND = "throughput/tokens-per-second"
FINAL = 10
"""Logged values whose mean is a run's final value."""
NOTHING = "-"

BOOKKEEPING = frozenset(
    "rank local_rank iteration curr_iteration consumed_train_samples consumed_valid_samples skipped_train_samples "
    "num_floating_point_operations_so_far data_record data_record_is_common spike_averages do_train "
    "do_valid do_test".split()
)
"""Where a run stands, kept by Megatron among its arguments."""
OUTPUTS = frozenset("save load ckpt_step tensorboard_dir data_cache_path wandb_exp_name wandb_save_dir".split())
"""Flags that name the run and its files, and so differ between any two."""


@dataclass
class Table:
    """A table whose first column heads the rows."""

    caption: str
    header: list[str]
    rows: list[list[str]]


def number(value: float | None, digits: int = 4) -> str:
    """Return a value with `digits` significant digits; thousands are set apart."""
    if value is None or np.isnan(value):
        return NOTHING
    if not np.isfinite(value):
        return str(value)
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - int(np.floor(np.log10(abs(value))))) if value else 0
    return f"{value:,.{decimals}f}"


def final(series: Series | None) -> float | None:
    """Return the mean of the last `FINAL` values that are finite."""
    if series is None:
        return None
    finite = series.values[np.isfinite(series.values)]
    return float(finite[-FINAL:].mean()) if len(finite) else None


def tokens_per_second(run: Run) -> Series | None:
    """Return what the run logged, or else tokens of a batch over the time of an iteration."""
    if TOKENS_PER_SECOND in run.scalars:
        return run.scalars[TOKENS_PER_SECOND]
    times, batches = run.scalars.get("iteration-time"), run.scalars.get("batch-size")
    if times is None or batches is None or run.tokens is None or run.samples is None:
        return None
    lengths = np.diff(run.tokens.values, prepend=0) / np.maximum(np.diff(run.samples.values, prepend=0), 1)
    at = np.minimum(np.searchsorted(run.tokens.steps, times.steps), len(lengths) - 1)
    samples = np.interp(times.steps, batches.steps, batches.values)
    return Series(times.steps, samples * lengths[at] / times.values)


def gate_of(run: Run) -> str:
    """Return the gate's preset or flags; `NOTHING` if the run's arguments are not known."""
    if not run.arguments:
        return NOTHING
    from megagate.gate.config import describe, gate_config_from_args  # imports torch, which takes seconds

    given: dict[str, Any] = {}
    for name in run.arguments:
        value = run.argument(name)
        if value is not None:
            given[name] = int(value) if value.isdigit() else {"True": True, "False": False}.get(value, value)
    try:
        return describe(gate_config_from_args(argparse.Namespace(**given)))
    except UserError:  # written by a version with other gates
        return str(given.get("gate_preset", NOTHING))


def validation_losses(runs: Sequence[Run]) -> dict[str, str]:
    """Return the tags of the validation losses of any run by what they are called, which is with the set's name."""
    tags = dict.fromkeys(tag for run in runs for tag in run.scalars if re.fullmatch(f"{VALIDATION}(-.*)?", tag))
    return {
        f"validation loss{tag.removeprefix(VALIDATION).replace('-', ' of ', 1)}": tag
        for tag in tags
        if not tag.endswith(PERPLEXITY)
    }


def summary(runs: Sequence[Run], spike_deviations: float) -> Table:
    """Return the table that can be read without the figures, a column for each run."""
    losses = validation_losses(runs) or {"validation loss": VALIDATION}
    columns = [_summary(run, losses, spike_deviations) for run in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    caption = (
        f"Losses in nats per token. Final loss, share of the first token, gate score and largest activation are means "
        f"of the last {FINAL} logged values; tokens/s is the median. {NOTHING} means that a run has not logged it."
    )
    return Table(caption, ["", *(run.name for run in runs)], rows)


def _summary(run: Run, validation: Mapping[str, str], spike_deviations: float) -> dict[str, str]:
    loss, speed = run.scalars.get(LOSS), tokens_per_second(run)
    spikes = NOTHING
    if loss is not None:
        spikes = str(len(find_spikes(loss.values, spike_deviations)))
        if broken := int((~np.isfinite(loss.values)).sum()):
            spikes += f"; {broken} values are not finite"
    share, floor = final(run.scalars.get(FIRST_TOKEN)), final(run.scalars.get(FLOOR))
    return {
        "gate": gate_of(run),
        "iterations": f"{max(int(series.steps[-1]) for series in run.scalars.values()):,}",
        "tokens": f"{run.tokens.values[-1]:,.0f}" if run.tokens is not None else NOTHING,
        "final training loss": number(final(loss)),
        **{f"best {name}": _best(run.scalars.get(tag)) for name, tag in validation.items()},
        "loss spikes": spikes,
        "attention on the first token": number(share, 3) + (f" (uniform: {number(floor, 3)})" if floor else ""),
        "mean gate score": number(final(run.scalars.get(GATE_SCORE)), 3),
        "largest activation": number(final(run.scalars.get(LARGEST_ACTIVATION))),
        "tokens/s": number(float(np.median(speed.values)) if speed is not None else None),
        "restarts": str(run.restarts),
        "last written (UTC)": datetime.fromtimestamp(run.ended, UTC).strftime("%Y-%m-%d %H:%M"),
    }


def _best(series: Series | None) -> str:
    if series is None or not np.isfinite(series.values).any():
        return NOTHING
    best = int(np.nanargmin(series.values))
    return f"{number(float(series.values[best]))} at iteration {series.steps[best]:,}"


def differences(runs: Sequence[Run]) -> tuple[Table, Table]:
    """Return the arguments that differ between runs or changed when one was resumed, and those that some runs lack.

    Runs whose arguments are not known take no part.
    """
    known = [run for run in runs if run.arguments]
    differ, lacking = [], []
    for name in sorted({name for run in known for name in run.arguments}):
        if name in BOOKKEEPING or name in OUTPUTS or name.startswith("_"):
            continue
        values = [run.arguments.get(name, []) for run in known]
        row = [f"--{name.replace('_', '-')}", *(", then ".join(run.arguments.get(name, [NOTHING])) for run in runs)]
        if not all(values):
            lacking.append(row)
        elif any(value != values[0] or len(value) > 1 for value in values):
            differ.append(row)
    caption = (
        'Arguments as Megatron wrote them beside the curves; some follow from others. "then" stands between the values '
        "before and after a restart. Left out are those that name a run's own files or count its progress."
    )
    header = ["argument", *(run.name for run in runs)]
    return Table(caption, header, differ), Table("Some runs come from a version without them.", header, lacking)
