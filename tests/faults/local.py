"""A supervised run of the tiny model on this machine, and ways to hurt it."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from megagate.supervise.records import FOLDER, History, read_progress
from tests.checkpoint.training import differences
from tests.distributed import ROOT, run_distributed
from tests.launch.cluster import wait_for
from tests.training import TINY, scalars, train

START = 240
"""Seconds in which an attempt must come to its first step, on a machine with much else to do."""


class LocalRun:
    """A run of 2 ranks under launch/local.sh.

    Args:
        folder: for its files.
        steps: how many.
        interval: steps between saves.
        flags: more for the trainer, of its uninterrupted twin too.
    """

    def __init__(self, folder: Path, steps: int, interval: int, flags: tuple[str, ...] = ()) -> None:
        self.folder, self.steps, self.interval = folder, steps, interval
        self.save, self.curve = folder / "save", folder / "curve"
        self.argv = [*TINY, "--train-iters", str(steps), "--save-interval", str(interval), *flags]
        self.process: subprocess.Popen | None = None

    def start(self, supervisor: str = "--back-off 0", *flags: str) -> None:
        """Start the supervisor."""
        words = ["bash", "launch/local.sh", *self.argv, "--save", str(self.save), "--tensorboard-dir", str(self.curve)]
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        settings = {"MEGAGATE_RANKS": "2", "MEGAGATE_PYTHON": sys.executable, "MEGAGATE_SUPERVISOR": supervisor}
        settings |= {"MASTER_PORT": str(20000 + os.getpid() % 5000), "CUDA_VISIBLE_DEVICES": ""}
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*words, *flags], cwd=ROOT, env=environment | settings, stdout=log, stderr=log, start_new_session=True
            )

    def log(self) -> str:
        """Return what the supervisor printed."""
        return (self.folder / "log").read_text()

    def wait(self, seconds: float = START) -> int:
        """Wait for the supervisor's end and return its status."""
        assert self.process is not None
        return self.process.wait(timeout=seconds)

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks, in the order of their ranks, without data-loader workers."""
        found: dict[int, tuple[str, int, psutil.Process]] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it may just end
                words, rank = process.cmdline(), process.environ().get("RANK")
                if rank is not None and "megagate.pretrain" in words and "torch.distributed.run" not in words:
                    found[process.pid] = rank, process.ppid(), process
        ranks = sorted(found.values(), key=lambda entry: entry[:2])
        return [process for _, parent, process in ranks if parent not in found]

    def processes(self) -> list[psutil.Process]:
        """Return all processes below the supervisor."""
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def step(self) -> int:
        """Return the last step of the current attempt, -1 before its first."""
        progress = read_progress(self.save / FOLDER)
        return progress.step if progress else -1

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is done, by whichever attempt."""
        wait_for(lambda: self.step() >= step or self.process.poll() is not None, START, f"step {step}", self.log)
        assert self.process.poll() is None, self.log()

    def wait_for_attempt(self, number: int) -> None:
        """Wait until so many attempts have begun, and the last of them has done a step."""
        wait_for(lambda: len(self.events("attempt")) >= number, START, f"attempt {number}", self.log)

        def stepped() -> bool:
            progress = read_progress(self.save / FOLDER)
            return progress is not None and progress.step > progress.started_at

        wait_for(stepped, START, f"a step of attempt {number}", self.log)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind from the history."""
        return History(self.save / FOLDER).of(kind)

    def check_equals_uninterrupted(self) -> None:
        """Compare every loss and the last checkpoint with those of a run without faults, bit for bit."""
        save, curve = self.folder / "uninterrupted", self.folder / "uninterrupted_curve"
        argv = [*self.argv, "--num-workers", "0", "--save", str(save), "--tensorboard-dir", str(curve)]
        run_distributed(train, 2, argv, timeout=280)
        expected, found = scalars(curve), scalars(self.curve)
        for tag in ("lm loss", "grad-norm"):
            assert found[tag] == expected[tag], tag
        checkpoint = f"iter_{self.steps:07d}"
        assert run_distributed(differences, 1, save / checkpoint, self.save / checkpoint, None)[0] == []

    def check_nothing_durable_was_lost(self) -> None:
        """Each attempt began from the newest checkpoint there was, and no more than one interval was done again."""
        saved = 0
        for end in self.events("end"):
            assert end["started_at"] >= saved or end["step"] == 0, end
            assert end["steps_lost"] <= self.interval, end
            saved = max(saved, end["saved"])

    def stop(self) -> None:
        """End everything that is left."""
        if self.process is not None and self.process.poll() is None:
            for process in [*self.processes(), psutil.Process(self.process.pid)]:
                process.kill()
