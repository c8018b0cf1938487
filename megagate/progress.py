"""Progress of work that is counted in bytes, on standard error."""

import sys
import time

PROGRESS_SECONDS = 2.0


class ByteProgress:
    """One line on standard error every `PROGRESS_SECONDS`."""

    def __init__(self, total: int) -> None:
        self.done, self._total = 0, total
        self.started = self._shown = time.monotonic()

    def add(self, nbytes: int) -> None:
        """Count bytes that are done."""
        self.done += nbytes
        now = time.monotonic()
        if now - self._shown >= PROGRESS_SECONDS:
            self._shown = now
            rate = self.done / 1e6 / (now - self.started)
            share = 100 * self.done / self._total
            line = f"{share:.0f} %, {self.done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate:.0f} MB/s"
            print(line, file=sys.stderr, flush=True)
