"""Read one TensorBoard event file as `torch.utils.tensorboard.SummaryWriter` and so Megatron write it: every point.

Nothing is subsampled, and TensorFlow is not needed. A file may end in the middle of a record, because its run is still
writing or was killed: then what is whole is read.
"""

import logging
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megagate.errors import UserError
from megagate.progress import ByteProgress

PATTERN = "events.out.tfevents.*"
VERSUS_SAMPLES = " vs samples"
"""Megatron writes most scalars twice, the second time with this ending and the consumed samples for a step."""
RECORD_FRAME = 16
"""Bytes around a record: its length, and checksums of the length and of the record."""


@dataclass
class Histogram:
    """A histogram of the values that some tensor had at one step."""

    limits: np.ndarray
    """[buckets] float64, right edges, increasing."""
    counts: np.ndarray
    """[buckets] float64."""
    minimum: float
    maximum: float
    mean: float

    def scaled(self, factor: float) -> "Histogram":
        """Return the histogram of the values times a positive factor."""
        bounds = self.minimum * factor, self.maximum * factor, self.mean * factor
        return Histogram(self.limits * factor, self.counts, *bounds)


@dataclass
class EventFile:
    """What is whole in one event file."""

    path: Path
    size: int
    """Bytes in the file."""
    whole: int = 0
    """Bytes in records that could be read."""
    began: float = 0.0
    """When the writer was opened, in seconds since 1970."""
    ended: float = 0.0
    """When the last record was written."""
    scalars: dict[str, tuple[array, array]] = field(default_factory=dict)
    """Tag -> steps, values; in the order of writing."""
    histograms: dict[str, list[tuple[int, Histogram]]] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    """Megatron writes each argument of the run as a text."""
    arguments_step: int | None = None
    """The iteration that the run started from."""
    samples: tuple[array, array] = field(default_factory=lambda: (array("q"), array("q")))
    """Steps, and the samples consumed until their end."""

    @property
    def first_step(self) -> int | None:
        """The first step that this file speaks of; None if it holds no scalar."""
        firsts = [min(steps) for steps, _ in self.scalars.values()]
        if firsts and self.arguments_step is not None:
            firsts.append(self.arguments_step + 1)
        return min(firsts, default=None)

    @property
    def note(self) -> str | None:
        """A sentence where not all of the file could be read."""
        if self.whole >= self.size and self.size:
            return None
        if not self.size:
            return f"{self.path.name} is empty"
        return (
            f"{self.path.name}: {self.whole:,} of {self.size:,} bytes could be read; the run is still writing it, was "
            f"killed while it wrote, or the file is damaged"
        )


def read_event_file(path: Path, progress: ByteProgress | None = None) -> EventFile:
    """Read one file; a record that is cut off or damaged ends it.

    Raises:
        UserError: the file cannot be opened.
    """
    # Otherwise it says at import that TensorFlow is missing.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        with path.open("rb"):
            file = EventFile(path, path.stat().st_size)
        previous: tuple[str, int] = ("", 0)
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            file.whole += len(record) + RECORD_FRAME
            file.began = file.began or event.wall_time
            file.ended = event.wall_time
            for value in event.summary.value:
                previous = _add(file, value, event.step, previous)
            if progress is not None:
                progress.add(len(record) + RECORD_FRAME)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; leave its run out") from error
    except DecodeError:
        pass  # whole records of something else
    return file


def _add(file: EventFile, value: Any, step: int, previous: tuple[str, int]) -> tuple[str, int]:
    """Add one value; returns its tag and step, by which a scalar "vs samples" that follows finds its iteration."""
    tag, kind = value.tag, value.WhichOneof("value")
    if kind == "simple_value":
        if tag.endswith(VERSUS_SAMPLES):
            if previous[0] == tag.removesuffix(VERSUS_SAMPLES):
                file.samples[0].append(previous[1])
                file.samples[1].append(step)
        else:
            steps, values = file.scalars.setdefault(tag, (array("q"), array("d")))
            steps.append(step)
            values.append(value.simple_value)
    elif kind == "histo":
        histo = value.histo
        mean = histo.sum / histo.num if histo.num else float("nan")
        limits, counts = np.array(histo.bucket_limit), np.array(histo.bucket)
        file.histograms.setdefault(tag, []).append((step, Histogram(limits, counts, histo.min, histo.max, mean)))
    elif kind == "tensor" and value.metadata.plugin_data.plugin_name == "text" and value.tensor.string_val:
        file.arguments[tag.removesuffix("/text_summary")] = value.tensor.string_val[0].decode(errors="replace")
        file.arguments_step = step
    return tag, step
