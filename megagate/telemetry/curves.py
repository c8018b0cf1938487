"""Curves of a resumed run without overlap: what an earlier attempt wrote after the checkpoint is taken out.

A run that ends between two checkpoints has written scalars that the next attempt, which begins at the last checkpoint,
writes again. TensorBoard would draw both. It can be told to hide all later steps, but Megatron writes some tags by
consumed samples, whose steps are larger than any iteration, and these curves would vanish from their beginning.

So event files are cut where the first event after the checkpoint stands. What is cut off is kept beside them, in files
that TensorBoard does not read: `replaced_after_ITERATION.N.EVENTS`, a whole event file of its own.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

SAMPLES = " vs samples"
"""The end of Megatron's tags by consumed samples."""

EVENTS = "tfevents"
"""What TensorBoard takes a file for its own by."""


LARGEST_RECORD = 2**30
"""A greater length is that of no event, but of bytes that are none."""

LENGTH, CHECKSUM = struct.Struct("<Q"), 4
"""A record is its length, a checksum of that, its bytes, and a checksum of them (TensorFlow's format of records)."""


def records(path: Path) -> Iterator[tuple[bytes, int, int]]:
    """Yield the bytes of each whole record, and where it begins and ends in the file."""
    with open(path, "rb") as file:
        start = 0
        while len(head := file.read(LENGTH.size + CHECKSUM)) == LENGTH.size + CHECKSUM:
            (length,) = LENGTH.unpack_from(head)
            # A crash of the machine can leave zeros; no event is empty.
            data = file.read(length + CHECKSUM) if 0 < length < LARGEST_RECORD else b""
            if len(data) < length + CHECKSUM:
                return
            stop = start + len(head) + len(data)
            yield data[:length], start, stop
            start = stop


def drop_after(directory: Path, iteration: int, own: Path | None = None) -> list[Path]:
    """Take out of the event files in `directory` what belongs to steps after `iteration`, and return where it is kept.

    Args:
        directory: of a run's event files.
        iteration: the last one to keep.
        own: a file that is being written, which stays as it is.

    A file with an unreadable end, as a killed process leaves it, is read up to there, and the rest of it counts as
    later. A file of which nothing can be read is left alone.
    """
    kept = []
    for path in sorted(directory.glob(f"*{EVENTS}*")):
        end = None if own is not None and path.samefile(own) else end_of(path, iteration)
        if end is None:
            continue
        name = path.name.replace(EVENTS, "events")
        number = len(list(directory.glob(f"replaced_after_{iteration}.*")))
        target = directory / f"replaced_after_{iteration}.{number}.{name}"
        header_end = next((stop for _, _, stop in records(path)), 0)
        with open(path, "rb") as source, open(target.with_suffix(".part"), "wb") as copy:
            copy.write(source.read(header_end))
            source.seek(end)
            while block := source.read(2**20):
                copy.write(block)
            copy.flush()
            os.fsync(copy.fileno())
        target.with_suffix(".part").rename(target)
        os.truncate(path, end)
        kept.append(target)
    return kept


def end_of(path: Path, iteration: int) -> int | None:
    """Return the byte at which the events after `iteration` begin; None where there are none."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    end = 0
    for data, start, stop in records(path):
        try:
            event = Event.FromString(data)
        except DecodeError:
            break
        end = stop
        by_samples = any(value.tag.endswith(SAMPLES) for value in event.summary.value)
        if event.HasField("summary") and event.step > iteration and not by_samples:
            return start
    return end if 0 < end < path.stat().st_size else None
