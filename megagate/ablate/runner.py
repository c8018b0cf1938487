"""All cells that are not finished, one after another or several at a time; one that fails does not end the others."""

import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import FrameType

from megagate.ablate import cell
from megagate.ablate.grid import Grid
from megagate.ablate.settings import Work
from megagate.errors import UserError, reason
from megagate.processes import Iteration, environment

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ask for an end; trainings save first."""
TRAINING = 0.85
"""Of a cell's time, in the first guess of what is left."""


@dataclass
class Outcome:
    """What became of the cells that were to be run."""

    failures: dict[str, str] = field(default_factory=dict)
    """Cell's name -> sentence."""
    stopped: list[str] = field(default_factory=list)


class Progress:
    """Lines on standard error: which cell is where, and how long the rest will take at the rate so far."""

    def __init__(self, total: int, seconds: float) -> None:
        self.total, self.seconds = total, seconds
        self.done = 0
        self.parts: dict[str, float] = {}
        """Running cell -> which part of it is done."""
        self._began = time.monotonic()
        self._shown = 0.0
        self._lock = threading.Lock()

    def iteration(self, name: str, seen: Iteration, first: int) -> None:
        """Take note of an iteration, and show it if it is time."""
        with self._lock:
            self.parts[name] = TRAINING * (seen.number - first) / max(1, seen.total - first)
            if time.monotonic() - self._shown < self.seconds:
                return
            self._shown = time.monotonic()
            self._say(f"{name}: iteration {seen.number} of {seen.total}, loss {seen.loss:.3f}")

    def ended(self, name: str, how: str) -> None:
        """Take note of a cell's end, and show it."""
        with self._lock:
            self.parts.pop(name, None)
            self.done += 1
            self._say(f"{name}: {how}")

    def _say(self, text: str) -> None:
        done = self.done + sum(self.parts.values())
        elapsed = time.monotonic() - self._began
        left = f"; about {_duration(elapsed / done * (self.total - done))} left" if 0.05 < done < self.total else ""
        print(f"[{self.done} of {self.total} done] {text}{left}", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 1.5 else f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def run_all(
    grid: Grid,
    works: Sequence[Work],
    jobs: int,
    launcher: Sequence[str] | None,
    evaluator: Sequence[str],
    seconds: float,
) -> Outcome:
    """Run cells, and return how those ended that did not finish.

    Args:
        grid: whose cells they are.
        works: the cells.
        jobs: how many at a time.
        launcher: what starts a training; processes on this machine if None.
        evaluator: what starts a measurement.
        seconds: between two lines of progress.
    """
    outcome, progress = Outcome(), Progress(len(works), seconds)
    ending = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if not ending.is_set():
            print("stopping: trainings save first; the same command goes on from there", file=sys.stderr, flush=True)
        ending.set()
        for work in works:
            # Trainings get SIGTERM for an interrupt too: it makes them save.
            work.stop(signal.SIGTERM if number == signal.SIGINT else number, whole_group=launcher is None)

    def one(work: Work) -> None:
        first: list[int] = []

        def on_iteration(seen: Iteration) -> None:
            first.append(seen.number)
            progress.iteration(work.cell.name, seen, first[0] if len(first) > 1 else seen.number)

        if ending.is_set():
            raise cell.Stopped
        started = launcher or cell.local_launcher(grid.world_size)
        variables = environment(one_machine=False) if launcher else cell.local_variables(work, grid.world_size, jobs)
        result = cell.run(work, started, evaluator, variables, on_iteration)
        diverged = cell.has_diverged(result, grid.diverged_above)
        ppl = f"PPL {result['perplexity']:.4g}" if "perplexity" in result else "no PPL"
        progress.ended(work.cell.name, f"diverged, {ppl}" if diverged else ppl)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        with ThreadPoolExecutor(jobs) as pool:
            pending = {pool.submit(one, work): work for work in works}
            _wait(pending, outcome, progress)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return outcome


def _wait(pending: dict[Future[None], Work], outcome: Outcome, progress: Progress) -> None:
    """Wait for all, in steps that let signals be handled."""
    waiting = set(pending)
    while waiting:
        done, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
        for future in done:
            name = pending[future].cell.name
            error = future.exception()
            if isinstance(error, cell.Stopped):
                outcome.stopped.append(name)
            elif isinstance(error, cell.Failed):
                outcome.failures[name] = str(error)
                progress.ended(name, f"failed: {error}")
            elif error is not None:
                if not isinstance(error, (UserError, OSError)):  # a fault of the program
                    traceback.print_exception(error)
                outcome.failures[name] = f"{type(error).__name__}: {reason(error)}"
                progress.ended(name, f"failed: {reason(error)}")
