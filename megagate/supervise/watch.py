"""One attempt from its start to its end: its signals, its time, its hangs, and what it was that ended it."""

import contextlib
import math
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megagate.errors import EXIT_USER_ERROR
from megagate.supervise.decide import Attempt, Kind
from megagate.supervise.log import Log
from megagate.supervise.ranks import send, start, where_they_hang
from megagate.supervise.records import read_outcomes, read_progress, say

POLL = 0.2
AGAIN = 15.0
"""Seconds after which a rank that does not end is told again: it may not have listened yet."""
STACK_SECONDS = 5.0
"""How long ranks that hang have to write their stacks."""
END_SECONDS = 30.0
"""How long ranks that are killed have to end: what they write on other nodes is seen here then, at the latest."""
UNKILLABLE = 180.0
"""Seconds after which what does not die is left behind: a process that waits for a broken device cannot be killed."""
FULL_DISK = re.compile(r"No space left on device|Disk quota exceeded")


class Watch:
    """Run a command as one attempt.

    Args:
        command: starts the ranks, and ends when they have.
        environment: for the command.
        folder: of the records.
        hang_after: seconds without a step after which an attempt hangs; the first step may take `start_limit`.
        lock: a file that the command keeps open.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        folder: Path,
        hang_after: float,
        start_limit: float,
        lock: int,
    ) -> None:
        self.folder, self._hang_after, self._start_limit = folder, hang_after, start_limit
        self.details: dict[str, Any] = {}
        self._told: str | None = None
        self._hung = ""
        self._left_behind = False
        self._earlier_dumps = self._dumps()
        self._step: int | None = None
        self._changed = time.monotonic()
        self._child = start(command, environment, lock)
        self._log = Log(self._child.stdout)

    def run(self, stop: Callable[[], str | None], last_moment: float = math.inf) -> Attempt:
        """Wait for the end and say what it was.

        Args:
            stop: returns the signal that told the supervisor to end, if one did.
            last_moment: of time.monotonic(), at which ranks that have not ended are ended.
        """
        told_at = killed_at = -math.inf
        first_kill = math.inf
        while self._child.poll() is None:
            now = time.monotonic()
            if stop() is not None and now - told_at > AGAIN:
                self._told, told_at = stop(), now
                self._send("USR1")
            if now > last_moment:
                self._told = self._told or "SIGUSR1"  # as Slurm's warning would have
            elif not self._hung and self._silent_for() > 0:
                self._end_hang()
            if (self._hung or now > last_moment) and now - killed_at > AGAIN:
                killed_at, first_kill = now, min(first_kill, now)
                self.kill()
            if now - first_kill > UNKILLABLE:
                self._left_behind = True
                self._child.kill()
            time.sleep(POLL)
        self._log.close()
        return self._attempt()

    def _silent_for(self) -> float:
        """Return the seconds by which the attempt is late, not above 0 if it isn't.

        By this process's own clock, which nobody sets.
        """
        progress = read_progress(self.folder)
        step = None if progress is None or progress.step == progress.started_at else progress.step
        if step != self._step:
            self._step, self._changed = step, time.monotonic()
        limit = self._start_limit if step is None else self._hang_after
        return time.monotonic() - self._changed - limit

    def _end_hang(self) -> None:
        self._send("USR2")
        time.sleep(STACK_SECONDS)
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(END_SECONDS)
        self._hung, rank = where_they_hang(self.folder)
        if rank is not None:
            self.details["rank"] = rank
        say(f"megagate: the run hangs ({self._hung}); stacks are in {self.folder / 'stacks'}")

    def kill(self) -> None:
        """End the ranks at once."""
        self._send("KILL")

    def _send(self, name: str) -> None:
        send(self._child, name)

    def _attempt(self) -> Attempt:
        """Conclude how the attempt ended from the ranks' own words, torchrun's report, the log and the exit status."""
        progress = read_progress(self.folder)
        outcomes = read_outcomes(self.folder)
        report, details = self._log.report, self.details
        kind, host, message = self._kind(outcomes, bool(progress))
        first = next((outcome for outcome in outcomes if outcome["outcome"] == "failed"), None)
        if kind not in (Kind.FINISHED, Kind.STOPPED, Kind.ASKED):
            if "rank" in report:
                details.setdefault("rank", int(report["rank"]))
            elif first is not None:
                details.setdefault("rank", first["rank"])
            others = (self._host_of(details.get("rank")), (first or {}).get("host"), report.get("host"))
            host = host or next((other for other in others if other), None)
        details["message"] = message[:1000]
        details["skips"] = [
            {name: outcome[name] for name in ("first", "last", "target", "message")}
            for outcome in outcomes
            if outcome["outcome"] == "spike"
        ]
        dumps = self._dumps() - self._earlier_dumps
        if dumps:
            details["flight_recorder"] = len(dumps)
            say(f"megagate: NCCL's last operations on {len(dumps)} ranks are in {self.folder}/flight_recorder_rank_N")
        if self._log.save_seconds:
            details["save_seconds"] = self._log.save_seconds
        details["status"] = self._child.returncode
        return Attempt(
            kind,
            started_at=progress.started_at if progress else 0,
            step=progress.step if progress else 0,
            host=host,
            signal=self._told,
            began=progress is not None,
        )

    def _kind(self, outcomes: list[dict[str, Any]], stepped: bool) -> tuple[Kind, str | None, str]:
        by_name = {outcome["outcome"]: outcome for outcome in reversed(outcomes)}
        if self._left_behind:
            return Kind.NODE, None, f"processes on a node cannot be killed ({self._hung or 'they were told to end'})"
        if self._hung:
            return Kind.HANG, None, self._hung
        if "spike" in by_name:
            return Kind.SPIKE, None, by_name["spike"]["message"]
        if self._child.returncode == 0:
            for name, kind in (("finished", Kind.FINISHED), ("asked", Kind.ASKED), ("stopped", Kind.STOPPED)):
                if name in by_name:
                    return kind, None, by_name[name]["message"]
            return Kind.FAILED, None, "it ended with status 0, but rank 0 did not say how"
        if FULL_DISK.search(f"{self._log.error} {by_name.get('user_error', {}).get('message', '')}"):
            return Kind.FAILED, None, self._log.error  # said as a mistake of the user's, but it may pass
        if self._child.returncode == EXIT_USER_ERROR and self._log.error:  # said before any rank was there
            return Kind.USER_ERROR, None, self._log.error
        if "user_error" in by_name:
            return Kind.USER_ERROR, by_name["user_error"]["host"], self._log.error or by_name["user_error"]["message"]
        if self._told is not None:  # it did not get as far as its first step, or could not save
            return Kind.STOPPED, None, f"ended by {self._told} before it had saved"
        if self._log.found:
            return self._log.found
        exit_code = self._log.report.get("exitcode", "0")
        if exit_code.startswith("-"):
            name = _signal_name(-int(exit_code))
            return Kind.KILLED, None, f"rank {self._log.report.get('rank', '?')} died of {name}"
        failed = by_name.get("failed")
        message = failed["message"] if failed else f"exit status {self._child.returncode}"
        loading = not stepped and "checkpoint" in message.lower()
        return (Kind.LOADING if loading else Kind.FAILED), None, message

    def _dumps(self) -> set[tuple[Path, int]]:
        """Return the flight recorder's dumps with the times of the file system, whose clock may be another one."""
        return {(path, path.stat().st_mtime_ns) for path in self.folder.glob("flight_recorder_rank_*")}

    def _host_of(self, rank: int | None) -> str | None:
        """Return the node of a rank, as the rank wrote it at its start."""
        with contextlib.suppress(OSError, IndexError):
            return (self.folder / "stacks" / f"rank_{rank}.txt").read_text(encoding="utf-8").splitlines()[0]
        return None


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
