"""A sign of life: a file that the supervisor touches each minute, so that others see whether it is there.

How old the sign is follows from two times of the same file system, that of the sign and that of a file written just
now: the clocks of nodes may differ.
"""

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

FILE = "alive"
PERIOD = 60.0
"""Seconds between two signs: one small request to the file server each."""
LOST_AFTER = 5 * PERIOD
"""Age in seconds of a sign after which who gave it seems lost."""


@contextlib.contextmanager
def signs(folder: Path, period: float = PERIOD) -> Iterator[None]:
    """Touch the file in `folder` now and every `period` seconds, from a thread of its own."""
    over = threading.Event()

    def give() -> None:
        with contextlib.suppress(OSError):  # of a file system that is away for a moment
            (folder / FILE).touch()

    def go_on() -> None:
        while not over.wait(period):
            give()

    give()
    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=5)


def age(path: Path) -> float | None:
    """Return the seconds since a file was changed, or None if it is not there."""
    try:
        with open(path, "rb") as file:  # asks the file server, where os.stat may answer from memory
            changed = os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
    return max(0.0, _now(path.parent) - changed)


def _now(folder: Path) -> float:
    """Return the time of the folder's file system, or of this machine if nothing can be written there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"now")
            file.flush()
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()
