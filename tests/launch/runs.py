"""Small runs submitted by launch/submit.py, and what they must be equal to."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from megagate.supervise.records import FOLDER, History, read_progress
from tests.checkpoint.training import differences
from tests.distributed import ROOT, run_distributed
from tests.launch.cluster import Cluster, wait_for
from tests.training import TINY, scalars, train

END = 200
"""A job must come to what is waited for in this many seconds."""


def recipe(flags: list[str]) -> dict[str, Any]:
    """Return a command line as a recipe."""
    content: dict[str, Any] = {}
    name = ""
    for word in flags:
        if word.startswith("--"):
            name = word.removeprefix("--")
            content[name] = True
        else:
            content[name] = word
    return content


class Run:
    """A run of the tiny model on 2 nodes of one rank each.

    Args:
        cluster: where it runs.
        folder: for its files.
        steps: how many.
        name: of its jobs.
    """

    def __init__(self, cluster: Cluster, folder: Path, steps: int, name: str) -> None:
        self.cluster, self.folder, self.name = cluster, folder, name
        folder.mkdir(parents=True, exist_ok=True)
        self.save, self.curve = folder / "checkpoints", folder / "curve"
        self.flags = [*TINY, "--train-iters", str(steps)]
        (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe(self.flags)))

    def submit(self, *options: str, trainer: tuple[str, ...] = (), interval: int = 1000, checks: bool = False) -> str:
        """Submit the shipped script and return the job's number; `checks`: with a preflight before each attempt."""
        words = [sys.executable, "launch/submit.py", str(self.folder / "tiny.yaml"), "--nodes", "2"]
        words += ["--gpus-per-node", "0", "--name", self.name, "--python", sys.executable, *options]
        words += [
            "--supervisor",
            f"--back-off 0 --preflight {'on --preflight-flags=--slow-factor=1000' if checks else 'off'}",
            "--",
            "--save",
            str(self.save),
            "--save-interval",
            str(interval),
        ]
        words += ["--tensorboard-dir", str(self.curve), *trainer]
        done = subprocess.run(
            words, cwd=ROOT, env=self.cluster.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split(";")[0].split()[-1]

    def step(self) -> int:
        """Return the last step that the current attempt has done, 0 before its first."""
        progress = read_progress(self.save / FOLDER)
        return progress.step if progress else 0

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is done."""
        wait_for(lambda: self.step() >= step, END, f"step {step}", self.log)

    def wait_for_state(self, job: str, *states: str, seconds: float = END) -> None:
        """Wait until the job is in one of the states; fail where it ends in another."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

        def arrived() -> bool:
            state = self.cluster.job(job)["JobState"]
            assert state in states or state not in ended, f"{state}\n{self.log()}"
            return state in states

        wait_for(arrived, seconds, f"{states}", self.log)

    def log(self) -> str:
        """Return the main log."""
        path = self.save / "main.log"
        return path.read_text() if path.exists() else ""

    def ends(self) -> list[dict[str, Any]]:
        """Return the ends of the attempts from the history."""
        return History(self.save / FOLDER).of("end")

    def check_equals_uninterrupted(self, interval: int = 1000) -> None:
        """Compare every loss, gradient norm and the last checkpoint with those of a run without breaks."""
        save, curve = self.folder / "uninterrupted", self.folder / "uninterrupted_curve"
        flags = [*self.flags, "--save", str(save), "--save-interval", str(interval), "--tensorboard-dir", str(curve)]
        run_distributed(train, 2, flags, timeout=200)
        expected, found = scalars(curve), scalars(self.curve)
        steps = int(self.flags[-1])
        for tag in ("lm loss", "grad-norm", "load_balancing_loss"):
            assert len(set(expected[tag].values())) > steps / 2, "the curve is flat"
            assert found[tag] == expected[tag], tag
        checkpoint = f"iter_{steps:07d}"
        assert run_distributed(differences, 1, save / checkpoint, self.save / checkpoint, None)[0] == []
