"""Grids that run: cells that are killed, that fail, that are asked to end, and that are done."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megagate.ablate import command, runner
from megagate.ablate.cell import local_variables
from megagate.ablate.grid import read_grid
from megagate.ablate.runner import Outcome, Progress, run_all
from megagate.ablate.settings import works
from megagate.errors import UserError
from tests.distributed import ROOT
from tests.evaluate.runs import VOCABULARY, random_documents, write_dataset
from tests.launch.cluster import wait_for
from tests.launch.runs import recipe
from tests.training import MODEL

STEPS = 30
FLAGS = (
    f"--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 2 --train-iters {STEPS} "
    f"--lr 1e-2 --lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --num-workers 0 "
    "--eval-iters 0 --log-interval 1 --save-interval 20 --split 100,0,0"
).split()
TOOL = ROOT / "tools" / "ablate.py"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A grid of two presets, and its data."""
    data = {name: write_dataset(tmp_path / name, random_documents([900, 300], seed)) for seed, name in enumerate("ab")}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(recipe([*MODEL, *FLAGS]) | {"data-path": data["a"]}))
    grid = {
        "recipe": "base.yaml",
        "axes": {"gate-preset": ["sdpa-headwise", "baseline"]},
        "evaluation": {"data-path": data["b"]},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(grid, sort_keys=False))
    return path


def start(grid: Path, *words: str) -> subprocess.Popen[str]:
    environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT))
    command = [sys.executable, str(TOOL), str(grid), "--output", str(grid.parent / "out"), "--progress", "1", *words]
    return subprocess.Popen(
        command, cwd=grid.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=500)
    return process.returncode, output, errors


def only_cell(grid: Path, name: str) -> Path:
    (folder,) = (grid.parent / "out" / "cells").glob(f"{name}-*")
    return folder


@pytest.mark.timeout(1500)
def test_a_killed_grid_goes_on_and_nothing_is_done_twice(tiny: Path) -> None:
    killed = start(tiny)
    tracker = "out/cells/sdpa-headwise-*/checkpoints/latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + 400
    while not list(tiny.parent.glob(tracker)):
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    everything = [psutil.Process(killed.pid), *psutil.Process(killed.pid).children(recursive=True)]
    for process in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    killed.communicate()
    folder = only_cell(tiny, "sdpa-headwise")
    assert not (folder / "result.json").exists()

    status, output, errors = finish(start(tiny))
    assert status == 0, errors
    results = [
        json.loads((only_cell(tiny, name) / "result.json").read_text()) for name in ("sdpa-headwise", "baseline")
    ]
    log = (folder / "logs" / "train.log").read_text()
    assert log.count("$ ") == 2 and "successfully loaded checkpoint" in log, log
    assert [result["iterations"] for result in results] == [STEPS, STEPS]
    assert [result["training tokens"] for result in results] == [STEPS * 64, STEPS * 64]
    assert all(1 < result["perplexity"] < VOCABULARY for result in results), "less than a vocabulary of equals"
    assert 0 < results[0]["gate score"] < 1 and results[1]["gate score"] is None
    rows = json.loads((tiny.parent / "out" / "tiny.json").read_text())["rows"]
    assert [row["numbers"]["PPL"]["mean"] for row in rows] == [result["perplexity"] for result in results]
    assert "[2 of 2 done]" in errors and "left" in errors
    assert output in (tiny.parent / "out" / "tiny.txt").read_text() + "\n"

    times = [path.stat().st_mtime_ns for path in sorted(tiny.parent.glob("out/cells/*/*"))]
    status, again, errors = finish(start(tiny))
    assert (status, again) == (0, output)
    assert errors.count("finished before") == 2
    assert times == [path.stat().st_mtime_ns for path in sorted(tiny.parent.glob("out/cells/*/*"))]


def test_a_cell_that_something_is_at_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    grid = read_grid(tiny)
    found = works(grid, tmp_path / "out", [])
    found[0].folder.mkdir(parents=True)
    with open(found[0].folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcome = run_all(grid, found[:1], 1, ["false"], ["false"], 1)
    assert "is being run by another process" in outcome.failures["sdpa-headwise"]


PROGRAM = """
import pathlib, sys, time
words = sys.argv
recipe = words[words.index("--recipe") + 1]
print(" iteration        3/      10 | elapsed time per iteration (ms): 5.0 | lm loss: 2.5E+00 |", flush=True)
if "baseline" in pathlib.Path(recipe).read_text():
    sys.exit("error: no such thing")
time.sleep(600)
"""


def test_a_failure_does_not_end_the_others_and_a_signal_ends_all(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal comes when one has failed and the other is at work."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    grid = read_grid(tiny)
    found = works(grid, tmp_path / "out", [])
    handler, original = signal.getsignal(signal.SIGTERM), Progress.ended

    def at_work() -> bool:
        logs = (tmp_path / "out" / "cells").glob("sdpa-headwise-*/logs/train.log")
        return any("lm loss" in log.read_text() for log in logs)

    def ended(self: Progress, name: str, how: str) -> None:
        original(self, name, how)
        if name == "baseline":
            wait_for(at_work, 60, "an iteration")
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Progress, "ended", ended)
    outcome = run_all(grid, found, 2, [sys.executable, str(program)], [sys.executable], 1)
    assert outcome.stopped == ["sdpa-headwise"]
    assert list(outcome.failures) == ["baseline"]
    assert "training failed with status 1" in outcome.failures["baseline"]
    assert "train.log says more" in outcome.failures["baseline"]
    errors = capsys.readouterr().err
    assert ": iteration 3 of 10, loss 2.500" in errors
    assert "stopping: trainings save first" in errors
    assert signal.getsignal(signal.SIGTERM) is handler
    assert all(work.result() is None for work in found)


def test_ranks_on_other_nodes_are_not_told_to_look_here(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    (found, *_) = works(read_grid(tiny), tmp_path / "out", [])
    run_all(read_grid(tiny), [found], 1, ["bash", "-c", "env; exit 1"], ["false"], 1)
    log = (found.folder / "logs" / "train.log").read_text()
    assert "PYTHONUNBUFFERED=1" in log and "GLOO_SOCKET_IFNAME" not in log
    here = local_variables(found, 1, 1)
    assert here["GLOO_SOCKET_IFNAME"] == "lo" and here["PYTHONUNBUFFERED"] == "1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert local_variables(found, 1, 1)["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(
    ("words", "evaluator"),
    [
        ([], ["bash", str(ROOT / "launch" / "process.sh")]),
        (["--launcher", "srun x"], [sys.executable]),
        (["--launcher", "srun x", "--evaluator", "srun 'a b'"], ["srun", "a b"]),
    ],
)
def test_what_measures(words: list[str], evaluator: list[str], tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """launch/process.sh needs the interpreter's name, which only processes on this machine are given here."""
    tiny.write_text(tiny.read_text() + "world-size: 2\n")
    monkeypatch.chdir(tiny.parent)
    monkeypatch.setattr(sys, "argv", ["ablate.py", "tiny.yaml", "--cell", "0", *words])
    given: list[Any] = []
    monkeypatch.setattr(runner, "run_all", lambda *words: given.extend(words) or Outcome())
    assert command.main() == 0
    assert given[4] == evaluator


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.yaml"], "cannot read the grid nowhere.yaml"),
        (["tiny.yaml", "--cell", "2"], "--cell 2 is none of the grid's 2 cells: give 0 to 1"),
        (["tiny.yaml", "--jobs", "0"], "--jobs must be at least 1, not 0"),
        (["tiny.yaml", "--slurm", "--at-a-time", "0"], "--at-a-time must be at least 1, not 0"),
        (["tiny.yaml", "--evaluate-on", "nowhere"], "there is no dataset nowhere"),
        (["tiny.yaml", "--job", "2"], "--job is no flag; did you mean --jobs"),
        (
            ["tiny.yaml", "--slurm", "--evaluate-on", "b"],
            "tasks look for b in .*: submit from there, or",
        ),
        (
            ["tiny.yaml", "--launcher", "a 'b"],
            'cannot read the flags "a \'b": No closing quotation; correct the quotes',
        ),
        (["tiny.yaml", "--evaluator", "a 'b"], "cannot read the flags"),
        (["tiny.yaml", "--output", "base.yaml"], "cannot write to --output .*base.yaml: Not a directory; choose"),
        (["tiny.yaml", "--slurm", "--gpus-per-node", "8"], "has 1 processes, and a node 8: give another"),
    ],
)
def test_mistakes(words: list[str], message: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.parent)
    monkeypatch.setattr(sys, "argv", ["ablate.py", *words])
    with pytest.raises(UserError, match=message):
        command.main()
    assert not (tiny.parent / "runs").exists()
