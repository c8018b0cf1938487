"""What the supervisor and the trainer tell each other, and the history of a run, as files below SAVE/supervise/.

    history.jsonl            one JSON object a line, never rewritten: "attempt", "end", "skip", "preflight",
                             and "instead" with what follows where what an end has decided does not: Slurm refuses, or
                             the supervisor is told to end
    progress                 the step that rank 0 has reached, rewritten at each step
    alive                    touched by the supervisor each minute (`alive`)
    outcome/rank_N.json      how a rank ended: rank 0 always, others where they failed
    stacks/rank_N.txt        where a rank was when the run hung
    nodes/NODE.log           standard error of a node

Nothing here needs torch: the supervisor may run outside the container that the ranks run in.
"""

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagate.errors import UserError

FOLDER = "supervise"
PROGRESS = "progress"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, which passes."""

DIRECTORY_VARIABLE = "MEGAGATE_SUPERVISE"
"""The environment variable that names the folder to the ranks; they write nothing where it is not set."""

ATTEMPT_VARIABLE = "MEGAGATE_ATTEMPT"

END_TIME_VARIABLE = "MEGAGATE_END_TIME"
"""When to begin the last save, in seconds since 1970: set by the supervisor from the job's time limit."""


def host() -> str:
    """Return the name of this node: Slurm's, or its own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def directory() -> Path | None:
    """Return the folder to write to, in a rank that a supervisor started."""
    path = os.environ.get(DIRECTORY_VARIABLE)
    return Path(path) if path else None


def say(text: str) -> None:
    """Print a line, which goes to the main log; a full disk under the log must not end the run."""
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode(errors="replace"))


# ---------------------------------------------------------------------------------------------------------------------
# Progress


@dataclass(frozen=True)
class Progress:
    """How far an attempt has come."""

    started_at: int
    """The step of the checkpoint that it began from, 0 without one."""
    step: int
    """The last step that is done."""
    first_time: float
    """When its first step began, in seconds since 1970."""
    time: float
    """When the last step was done."""


class ProgressFile:
    """Rank 0's side of the progress: a file that is rewritten in place at each step, without waiting for the disk."""

    def __init__(self, folder: Path, started_at: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(folder / PROGRESS, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        self._started_at, self._first_time = started_at, time.time()
        self.step(started_at)

    def step(self, step: int) -> None:
        """Say that `step` is done."""
        line = f"{self._started_at} {step} {self._first_time:.3f} {time.time():.3f}"
        os.pwrite(self._descriptor, f"{line:<79}\n".encode(), 0)


def read_progress(folder: Path) -> Progress | None:
    """Return how far the attempt has come, or None before its first step."""
    try:
        started_at, step, first_time, now = (folder / PROGRESS).read_text(encoding="ascii").split()
        return Progress(int(started_at), int(step), float(first_time), float(now))
    except (OSError, ValueError):
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Outcomes


def write_outcome(outcome: str, rank: int, message: str = "", **details: Any) -> None:
    """Write how this rank ended, if a supervisor started it.

    Args:
        outcome: "finished", "stopped" (saved and ended early, as a signal or the time limit asked), "asked" (ended
            early as a flag asked), "user_error", "failed", or "spike".
        rank: this rank.
        message: one line.
        details: more that JSON can hold.
    """
    folder = directory()
    if folder is None:
        return
    record = {"outcome": outcome, "rank": rank, "host": host(), "time": time.time(), "message": message, **details}
    with contextlib.suppress(OSError):  # a full disk must not hide why the rank ended
        (folder / "outcome").mkdir(parents=True, exist_ok=True)
        write_whole(folder / "outcome" / f"rank_{rank}.json", json.dumps(record))


def read_outcomes(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks wrote, the earliest first."""
    outcomes = []
    for path in (folder / "outcome").glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError):
            outcomes.append(json.loads(path.read_text(encoding="utf-8")))
    return sorted(outcomes, key=lambda outcome: outcome["time"])


def clear(folder: Path) -> None:
    """Remove what an earlier attempt left that could be taken for this one's."""
    for path in [folder / PROGRESS, *folder.glob("outcome/rank_*.json"), *folder.glob("stacks/rank_*.txt")]:
        path.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a small file that is either there with its whole text, on the disk, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


# ---------------------------------------------------------------------------------------------------------------------
# History


class History:
    """The attempts of a run, in a file to which lines are added."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "history.jsonl"
        self._unwritten: list[dict[str, Any]] = []

    def add(self, event: str, **fields: Any) -> dict[str, Any]:
        """Add an event and return it as it stands in the file; on a full disk it waits for the next one.

        Raises:
            UserError: the file cannot be written.
        """
        record = {"event": event, "time": round(time.time(), 3), **fields}
        self._unwritten.append(record)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab+") as file:
                if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                    file.write(b"\n")  # the last line was cut short
                file.write("".join(json.dumps(entry) + "\n" for entry in self._unwritten).encode())
                file.flush()
                os.fsync(file.fileno())
            self._unwritten = []
        except OSError as error:
            if error.errno in FULL:
                say(f"megagate: {self.path} cannot be written: {error.strerror}")
                return record
            raise UserError(f"cannot write {self.path}: {error.strerror}; make room, or correct --save") from error
        return record

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events, the oldest first; a line that a crash has cut short or damaged is passed over.

        Raises:
            UserError: the file cannot be read.
        """
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}; correct the path or its rights") from error
        for line in lines:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and "event" in record:
                    yield record
        yield from self._unwritten

    def ends(self) -> list[dict[str, Any]]:
        """Return the ends of the attempts, the oldest first, each with the decision that was carried out."""
        ends: dict[int, dict[str, Any]] = {}
        for record in self.events():
            if record["event"] == "end":
                ends[record["attempt"]] = dict(record)
            elif record["event"] == "instead" and record["attempt"] in ends:
                ends[record["attempt"]] |= {"decision": record["decision"], "reason": record["reason"], "exclude": []}
        return list(ends.values())

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one kind, the oldest first."""
        return [record for record in self.events() if record["event"] == event]
