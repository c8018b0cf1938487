"""The loop around the attempts of a run: start, watch, write the history, decide, again.

Under Slurm it is the batch script's own process, so that the warning before the time limit reaches it; it starts each
attempt as a step of the job. On one machine it starts torchrun.
"""

import fcntl
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from megagate.errors import UserError
from megagate.supervise import alive, checkpoints, preflight, records, slurm
from megagate.supervise.accounts import account
from megagate.supervise.checks import check_nodes
from megagate.supervise.decide import EXIT_AGAIN, Action, Attempt, Decision, Kind, Policy, decide
from megagate.supervise.flags import is_given
from megagate.supervise.records import END_TIME_VARIABLE, History
from megagate.supervise.watch import Watch

TRAINER = "megagate.pretrain"
LAST_SECONDS = 30.0
"""Before a job's time limit, to put it back into the queue: one that has run out of time does not come back."""
LOCK_SECONDS = 300.0
"""How long a job waits for the lock of the one before it."""


@dataclass(frozen=True)
class Settings:
    """The supervisor's own flags."""

    policy: Policy
    hang_after: float
    start_limit: float
    save_margin: float
    """Seconds before the job's time limit at which the trainer begins its last save."""
    preflight: tuple[str, ...] | None = None
    """Flags of the checks before each start, or None for no checks."""
    preflight_limit: float = 900.0
    """Seconds that the checks may take."""


class Supervisor:
    """Keeps one run alive.

    Args:
        command: starts the ranks with `-m megagate.pretrain FLAGS` at its end.
        save: the run's folder of checkpoints.
    """

    def __init__(self, command: Sequence[str], save: Path, settings: Settings) -> None:
        self.command, self.save, self.settings = list(command), save, settings
        self.folder = save / records.FOLDER
        self.history = History(self.folder)
        self._loads = is_given(self.command, "load")
        self._stop: str | None = None

    def run(self) -> int:
        """Run to the end of training, or to a decision that ends it; return the exit status."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)
        with self._lock() as lock, alive.signs(self.folder):
            self._close_lost_attempt()
            return self._loop(lock.fileno())

    def _loop(self, lock: int) -> int:
        while True:
            attempt, details = self._attempt(lock)
            attempts = [*self._attempts(), attempt]
            decision = decide(attempts, self.settings.policy)
            back_to = self._go_back() if decision.action is Action.ROLL_BACK else None
            self._write_end(attempt, details, decision, back_to)
            records.say(f"megagate: {_sentence(attempt, details, decision)}")
            if back_to is not None:
                records.say(f"megagate: going back to step {back_to}")
            status = self._act(decision, attempts)
            if status is not None:
                return status

    def _go_back(self) -> int | None:
        try:
            return checkpoints.go_back(self.save)
        except OSError as error:  # of storage, which the next attempt may find mended
            records.say(f"megagate: cannot go back: {error}")
            return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._stop != "SIGTERM":  # Slurm's last word
            self._stop = signal.Signals(number).name

    def _lock(self) -> Any:
        """Keep a second supervisor from writing into the same folder; the ranks hold the lock too."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / "lock", "a", encoding="utf-8")  # noqa: SIM115 - until the process ends
        except OSError as error:
            raise UserError(f"cannot write in {self.folder}: {error.strerror}; correct --save") from error
        # The file server holds the lock of a node that has gone away until it notices.
        deadline = time.monotonic() + (LOCK_SECONDS if slurm.job() is not None else 0.0)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError as error:
                if time.monotonic() >= deadline or self._stop is not None:
                    raise UserError(
                        f"another supervisor, or ranks that it left, write into {self.save}: end them, or give "
                        "another --save"
                    ) from error
            except OSError:  # a file system without locks
                return lock
            time.sleep(1)

    def _attempts(self) -> list[Attempt]:
        """Return the attempts that have ended since someone last started the run by hand, the oldest first."""
        attempts: list[Attempt] = []
        for end in self.history.ends():
            kind, steps = Kind(end["kind"]), (end["started_at"], end["step"], end["saved"])
            attempts.append(Attempt(kind, *steps, end.get("host"), end.get("signal"), end.get("began", True)))
            if end["decision"] in (Action.DONE, Action.STOP, Action.GIVE_UP):
                attempts = []  # whatever was wrong may have been mended
        return attempts

    def _has_trained(self) -> bool:
        """Whether the run has done a step since someone last started it by hand."""
        return any(attempt.began for attempt in self._attempts())

    def _close_lost_attempt(self) -> None:
        """Write the end of an attempt whose supervisor went away with its node."""
        begun, ended = self.history.of("attempt"), self.history.of("end")
        if not begun or (ended and ended[-1]["attempt"] == begun[-1]["attempt"]):
            return
        progress = records.read_progress(self.folder)
        saved = checkpoints.saved(self.save)
        step = progress.step if progress else saved
        said = {outcome["outcome"] for outcome in records.read_outcomes(self.folder)}
        kind = Kind.FINISHED if "finished" in said else Kind.STOPPED if "stopped" in said else Kind.LOST
        start = progress.started_at if progress else saved
        attempt = Attempt(kind, start, step, saved, began=progress is not None)
        last = progress.time if progress else begun[-1]["time"]
        details = {"message": "the supervisor went away, perhaps with its job or its node", "ended": last}
        self._write_end(attempt, details, Decision(Action.RESTART, "the job is back"))

    def _attempt(self, lock: int) -> tuple[Attempt, dict[str, Any]]:
        number = len(self.history.of("attempt")) + 1
        records.clear(self.folder)
        checkpoints.put_aside_damaged_tracker(self.save)
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        environment[records.DIRECTORY_VARIABLE] = str(self.folder.resolve())
        environment[records.ATTEMPT_VARIABLE] = str(number)
        environment["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = str(self.folder.resolve() / "flight_recorder_rank_")
        before = checkpoints.saved(self.save)
        fields: dict[str, Any] = {"attempt": number, "from": before, "host": records.host()}
        last_moment = math.inf
        if slurm.job() is not None:
            restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
            fields |= {"job": slurm.job(), "restart": restart, "nodes": slurm.nodes()}
            left = slurm.seconds_left()
            if left is not None:
                last_moment = time.monotonic() + left - min(LAST_SECONDS, left / 4)
                environment[END_TIME_VARIABLE] = f"{time.time() + left - min(self._margin(), left / 4):.0f}"
        self.history.add("attempt", **fields)
        try:
            attempt, details = self._check_nodes(environment) or self._train(environment, lock, last_moment)
        except UserError as error:  # the command cannot be started
            records.say(f"error: {error}")
            kind = Kind.FAILED if self._has_trained() else Kind.USER_ERROR
            attempt, details = Attempt(kind, began=False), {"message": str(error)}
        if not attempt.began:
            attempt = replace(attempt, started_at=before, step=before)
        return replace(attempt, saved=checkpoints.saved(self.save)), details

    def _check_nodes(self, environment: dict[str, str]) -> tuple[Attempt, dict[str, Any]] | None:
        if self.settings.preflight is None:
            return None
        start = self.command[: self.command.index(TRAINER)]
        checks = [*start, preflight.__name__, "--folder", str(self.folder.resolve()), *self.settings.preflight]
        limit, has_trained = self.settings.preflight_limit, self._has_trained()
        return check_nodes(checks, environment, self.history, limit, lambda: self._stop, has_trained)

    def _train(self, environment: dict[str, str], lock: int, last_moment: float) -> tuple[Attempt, dict[str, Any]]:
        limits = self.settings.hang_after, self.settings.start_limit
        watch = Watch(self._trainer(), environment, self.folder, *limits, lock)
        attempt = watch.run(lambda: self._stop, last_moment)
        if attempt.kind is Kind.USER_ERROR and not attempt.began:
            message = watch.details["message"]
            # What a rank says of a checkpoint that holds nonsense; where it is the run's own, nobody gave it.
            damaged = f"{self.save}/iter_" in message and "--ckpt-step" in message
            if damaged or self._has_trained():
                # Else nobody has changed what was given: a file is gone, on one node or for a while.
                attempt = replace(attempt, kind=Kind.LOADING if damaged else Kind.FAILED)
        return attempt, watch.details

    def _margin(self) -> float:
        """Return the seconds before the time limit at which the last save begins: more where saves have been slow."""
        slowest = max((end.get("save_seconds", 0.0) for end in self.history.of("end")), default=0.0)
        return max(self.settings.save_margin, 2 * slowest)

    def _trainer(self) -> list[str]:
        """Return the command, which loads the run's own checkpoint once there is one."""
        if self._loads and not checkpoints.exist(self.save):
            return self.command
        return [*self.command, "--load", str(self.save), "--allow-fresh-start"]

    def _write_end(
        self, attempt: Attempt, details: dict[str, Any], decision: Decision, back_to: int | None = None
    ) -> None:
        begun, ends = self.history.of("attempt")[-1], self.history.of("end")
        ended = details.pop("ended", None) or time.time()
        for skip in details.pop("skips", []):
            self.history.add("skip", attempt=begun["attempt"], **skip)
        self.history.add(
            "end",
            attempt=begun["attempt"],
            kind=attempt.kind,
            host=attempt.host,
            signal=attempt.signal,
            started_at=attempt.started_at,
            step=attempt.step,
            saved=attempt.saved,
            began=attempt.began,
            **account(attempt, begun, ended, records.read_progress(self.folder), ends, back_to),
            decision=decision.action,
            reason=decision.reason,
            exclude=list(decision.exclude),
            **details,
        )

    def _act(self, decision: Decision, attempts: Sequence[Attempt]) -> int | None:
        """Do what was decided after `attempts`; return the exit status if that ends the supervisor."""
        if decision.action in (Action.DONE, Action.STOP, Action.GIVE_UP):
            return decision.status
        if decision.action is Action.REQUEUE and attempts[-1].kind is not Kind.STOPPED:
            problem = slurm.requeue(decision.exclude)
            if problem is None:
                return self._wait_for_slurm()
            records.say(f"megagate: Slurm does not requeue the job ({problem}): going on with the nodes that it has")
            decision = decide(attempts, replace(self.settings.policy, can_requeue=False))
            self._write_instead(decision, f"; Slurm does not requeue the job: {problem}")
            return self._act(decision, attempts)
        if decision.action is not Action.REQUEUE:
            deadline = time.monotonic() + decision.wait
            while time.monotonic() < deadline and self._stop is None:
                time.sleep(min(1.0, decision.wait))
            if self._stop is None:
                return None
            stopped = replace(attempts[-1], kind=Kind.STOPPED, signal=self._stop)
            decision = decide([*attempts, stopped], self.settings.policy)
            self._write_instead(decision)
            if decision.action is not Action.REQUEUE:
                return decision.status
        problem = slurm.requeue()
        if problem is None:
            return self._wait_for_slurm()
        records.say(f"megagate: Slurm does not requeue the job ({problem}): submit it again to go on")
        instead = Decision(Action.STOP, "the job has no time left", EXIT_AGAIN)
        self._write_instead(instead, f"; Slurm does not requeue the job: {problem}")
        return instead.status

    def _write_instead(self, decision: Decision, why: str = "") -> None:
        number = self.history.of("attempt")[-1]["attempt"]
        self.history.add("instead", attempt=number, decision=decision.action, reason=f"{decision.reason}{why}")

    def _wait_for_slurm(self) -> int:
        """Wait until Slurm ends this process, whose job it has requeued; it may have said so already."""
        deadline = time.monotonic() + 60
        while self._stop != "SIGTERM" and time.monotonic() < deadline:
            time.sleep(0.1)
        return EXIT_AGAIN


def _sentence(attempt: Attempt, details: dict[str, Any], decision: Decision) -> str:
    where = "".join(
        f", {name} {value}"
        for name, value in (("rank", details.get("rank")), ("node", attempt.host))
        if value is not None
    )
    said = f" ({details['message']})" if details.get("message") else ""
    return (
        f"attempt ended: {attempt.kind}{said} at step {attempt.step}{where}; saved is step {attempt.saved}; "
        f"{decision.action}: {decision.reason}"
    )
