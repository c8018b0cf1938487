"""A training run as its event files tell of it: one curve for each tag, over tokens, whatever happened in between.

Where a run was resumed, its files overlap: an older file goes on after the checkpoint that the newer one began from.
Those points are dropped, so a curve is what the final weights have seen. A newer file begins after the iteration at
which Megatron wrote the run's arguments into it, or at its first scalar.

Tokens are consumed samples times sequence length. The samples are those that Megatron writes beside each scalar
("lm loss vs samples"), which stay right under a batch-size ramp; the sequence length is in the run's arguments, which
Megatron writes into each event file as texts. Without them, the arguments in the run's checkpoint are taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megagate.errors import UserError
from megagate.progress import ByteProgress
from megagate.report.events import PATTERN, EventFile, Histogram, read_event_file

GENERIC_NAMES = ("tensorboard", "tb", "logs", "events")
"""Directories whose parent's name says more."""


@dataclass
class Series:
    """A scalar over the iterations."""

    steps: np.ndarray
    """[n] int64, increasing; never empty."""
    values: np.ndarray
    """[n] float64."""


@dataclass
class Run:
    """One run, its restarts joined."""

    name: str
    directory: Path
    """That of the event files."""
    scalars: dict[str, Series] = field(default_factory=dict)
    histograms: dict[str, tuple[int, Histogram]] = field(default_factory=dict)
    """Tag -> step of the newest histogram, and the histogram."""
    arguments: dict[str, list[str]] = field(default_factory=dict)
    """Argument -> its values, in the order of restarts, without repetitions."""
    samples: Series | None = None
    tokens: Series | None = None
    """None where the sequence length or the samples are not known."""
    restarts: int = 0
    dropped: int = 0
    """Points of older files that a resumed run has repeated."""
    ended: float = 0.0
    """When the last record was written, in seconds since 1970."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what could not be read."""

    def argument(self, name: str) -> str | None:
        """Return the last value of an argument; None where it is not recorded, and for Python's None."""
        values = self.arguments.get(name, [])
        return values[-1] if values and values[-1] != "None" else None


def find_events(directory: Path) -> Path:
    """Return the directory with event files that `directory` means: itself, or the only one under it.

    Raises:
        UserError: there is none, or more than one.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory: give what --save or --tensorboard-dir named")
    if any(directory.glob(PATTERN)):
        return directory
    found = sorted({path.parent for path in directory.rglob(PATTERN)})
    if not found:
        raise UserError(
            f"{directory} holds no TensorBoard event files ({PATTERN}): was the run given --tensorboard-dir?"
        )
    if len(found) > 1:
        names = ", ".join(str(path) for path in found[:5]) + (", ..." if len(found) > 5 else "")
        raise UserError(f"{directory} holds event files of {len(found)} runs; name those to compare: {names}")
    return found[0]


def parse_run(word: str) -> tuple[str | None, Path]:
    """Split NAME=DIR; a word that is a directory as it stands has no name."""
    name, equals, rest = word.partition("=")
    if not equals or Path(word).is_dir():
        return None, Path(word)
    if not name or not rest:
        raise UserError(f"{word!r} is no run: write DIR or NAME=DIR")
    return name, Path(rest)


def read_runs(words: Sequence[str]) -> list[Run]:
    """Read each run that the words DIR or NAME=DIR name.

    Raises:
        UserError: one cannot be read, two have the same name or are the same.
    """
    named = []
    for word in words:
        label, directory = parse_run(word)
        named.append((label or _own_name(directory), directory, find_events(directory)))
    for index, (name, directory, events) in enumerate(named):
        for other_name, other, other_events in named[:index]:
            if events.resolve() == other_events.resolve():
                raise UserError(f"{other} and {directory} are the same run: its event files are in {events}")
            if name == other_name:
                raise UserError(f"{other} and {directory} are both called {name!r}: write NAME=DIR to tell them apart")
    paths = [sorted(path for path in events.glob(PATTERN) if path.is_file()) for _, _, events in named]
    progress = ByteProgress(sum(path.stat().st_size for files in paths for path in files))
    return [
        join(name, events, [read_event_file(path, progress) for path in files], [directory, events, events.parent])
        for (name, directory, events), files in zip(named, paths, strict=True)
    ]


def read_run(directory: Path) -> Run:
    """Return the run whose event files lie in `directory`, without a word about progress.

    Raises:
        UserError: there are none, or they hold no scalar.
    """
    events = find_events(directory)
    files = sorted(path for path in events.glob(PATTERN) if path.is_file())
    return join(_own_name(events), events, [read_event_file(path) for path in files])


def _own_name(directory: Path) -> str:
    directory = directory.resolve()
    return directory.parent.name if directory.name in GENERIC_NAMES else directory.name


def join(name: str, directory: Path, files: Sequence[EventFile], checkpoints: Sequence[Path] = ()) -> Run:
    """Return the run that `files` tell of.

    Args:
        directory: where the files are.
        checkpoints: directories that may hold the run's checkpoints, asked for its arguments where no file has them.

    Raises:
        UserError: there is no scalar in any of the files.
    """
    run = Run(name, directory, notes=[note for file in files if (note := file.note)])
    told = sorted(
        (file for file in files if file.first_step is not None), key=lambda file: (file.began, file.path.name)
    )
    if not told:
        reason = "; ".join(run.notes) or "they are from a run that stopped before its first logged step"
        raise UserError(f"the event files in {directory} hold no scalars: {reason}")
    run.restarts, run.ended = len(told) - 1, max(file.ended for file in told)
    if not any(file.arguments for file in told):
        told[-1].arguments = _arguments_of_checkpoint(checkpoints)
    for file in told:
        for argument, value in file.arguments.items():
            values = run.arguments.setdefault(argument, [])
            if not values or values[-1] != value:
                values.append(value)
    # Points at or after the end of a file are repeated by a later one.
    first_steps = [file.first_step for file in told]
    ends = [min((step for step in first_steps[i + 1 :] if step is not None), default=None) for i in range(len(told))]
    for tag in dict.fromkeys(tag for file in told for tag in file.scalars):
        parts = [(*file.scalars.get(tag, ((), ())), end) for file, end in zip(told, ends, strict=True)]
        series, dropped = _joined(parts)
        run.dropped += dropped
        if len(series.steps):
            run.scalars[tag] = series
    for file, end in zip(told, ends, strict=True):
        for tag, histograms in file.histograms.items():
            kept = [pair for pair in histograms if end is None or pair[0] < end]
            if kept:
                run.histograms[tag] = kept[-1]
    samples, _ = _joined([(*file.samples, end) for file, end in zip(told, ends, strict=True)])
    if len(samples.steps):
        run.samples = samples
        lengths = _sequence_lengths(told, ends, samples.steps)
        if lengths is not None:
            run.tokens = Series(samples.steps, np.cumsum(np.diff(samples.values, prepend=0) * lengths))
    return run


def _joined(parts: Sequence[tuple[Sequence[int], Sequence[float], int | None]]) -> tuple[Series, int]:
    """Join (steps, values, end) of files, oldest first, and count what is dropped because a later file repeats it.

    Within a file the first value of a step counts: at the end of training Megatron writes the loss of the test set
    under the validation set's tag, at the same step.
    """
    steps, values, dropped = [], [], 0
    for file_steps, file_values, end in parts:
        unique, first = np.unique(np.asarray(file_steps, dtype=np.int64), return_index=True)
        kept = np.full(len(unique), True) if end is None else unique < end
        dropped += int((~kept).sum())
        steps.append(unique[kept])
        values.append(np.asarray(file_values, dtype=np.float64)[first][kept])
    return Series(np.concatenate(steps), np.concatenate(values)), dropped


def _sequence_lengths(files: Sequence[EventFile], ends: Sequence[int | None], steps: np.ndarray) -> np.ndarray | None:
    """Return the sequence length with which each of `steps` was trained; None where it is not known."""
    lengths = np.zeros(len(steps))
    known = next((file.arguments["seq_length"] for file in files if "seq_length" in file.arguments), "")
    start = 0
    for file, end in zip(files, ends, strict=True):
        known = file.arguments.get("seq_length", known)
        if not known.isdigit():
            return None
        stop = len(steps) if end is None else int(np.searchsorted(steps, end))
        lengths[start:stop] = int(known)
        start = max(start, stop)
    return lengths


def _arguments_of_checkpoint(directories: Sequence[Path]) -> dict[str, str]:
    """Return the arguments in the newest checkpoint of the first directory that has one; empty if none has."""
    for directory in directories:
        if (directory / "latest_checkpointed_iteration.txt").is_file():
            from megagate.checkpoint.load import checkpoint_arguments, find_complete  # torch takes seconds to import
            from megagate.data.tokenizer import quiet

            try:
                with quiet():
                    arguments = checkpoint_arguments(find_complete(directory))
            except UserError:
                continue
            return {name: str(value) for name, value in vars(arguments).items()}
    return {}
