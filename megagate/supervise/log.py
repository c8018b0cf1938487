"""What an attempt prints: what of it goes to the main log, and what it tells of the attempt's end."""

import re
import threading
from typing import Any

from megagate.supervise.decide import PATTERNS, Kind
from megagate.supervise.records import say

OTHER_LINES = 400
"""Lines of an attempt, besides those of the training log, that go to the main log: thousands of ranks may all fail."""

LOG_LINE = re.compile(
    r"^megagate|\biteration +\d+/|validation loss at|^ ?loading .*checkpoint from|exiting program|^error: "
    r"|successfully (loaded|saved) checkpoint|saving checkpoint at"
)
ROOT_CAUSE = re.compile(r"Root Cause")
REPORT = re.compile(r"^\s*(rank|exitcode|host)\s*: (\S+)")
SAVED = re.compile(r"megagate: saved \S+(?: \d+)? in ([\d.]+) s")


class Log:
    """What an attempt prints: passed on to the main log, and searched for causes."""

    def __init__(self, stream: Any) -> None:
        self.found: tuple[Kind, str | None, str] | None = None
        """The first telling line: kind, node, text."""
        self.error = ""
        """The sentence of a user's error."""
        self.report: dict[str, str] = {}
        """torchrun's report of the first failure: rank, exitcode and host."""
        self.save_seconds = 0.0
        """Of the slowest save."""
        self._in_report = False
        self._others = 0
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the rest of the output; a process that outlived the attempt may hold it open."""
        self._thread.join(timeout=5)

    def _read(self, stream: Any) -> None:
        for line in stream:
            self._look(line)
            if not LOG_LINE.search(line):
                self._others += 1
                if self._others > OTHER_LINES:
                    continue
            say(line.removesuffix("\n"))
            if self._others == OTHER_LINES:
                say("megagate: what else the ranks print is in supervise/nodes/")
                self._others += 1

    def _look(self, line: str) -> None:
        if line.startswith("error: ") and not self.error:
            self.error = line.strip().removeprefix("error: ")
        if ROOT_CAUSE.search(line) and not self.report:
            self._in_report = True
        match = SAVED.match(line)
        if match:
            self.save_seconds = max(self.save_seconds, float(match[1]))
        match = REPORT.match(line)
        if match and self._in_report:
            self.report.setdefault(match[1], match[2])
            self._in_report = len(self.report) < 3
        for kind, pattern in PATTERNS:
            match = pattern.search(line)
            if match is None:
                continue
            named = match.groupdict().get("host")
            if self.found is None or (self.found[:2] == (kind, None) and named):  # a later line may name the node
                self.found = kind, named, line.strip()
            return
