"""Saving in the background: what is written, when the tracker moves, and the process that writes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from megagate.checkpoint import keep
from megagate.errors import UserError
from megagate.platform import cpu, on_cpu
from megagate.pretrain.supervised import HANG_SIGNAL
from megagate.supervise.records import DIRECTORY_VARIABLE, FOLDER
from tests.checkpoint.training import differences
from tests.distributed import ROOT, run_distributed
from tests.training import TINY, scalars, train


def arguments(folder: Path, steps: int, *flags: str) -> list[str]:
    """Return the command line of a run that saves every second step into `folder`."""
    words = [*TINY, "--train-iters", str(steps), "--save", str(folder), "--save-interval", "2", "--keep-last", "1"]
    return [*words, "--tensorboard-dir", str(folder / "curve"), *flags]


def train_watched(argv: list[str]) -> list[tuple[int, list[int]]]:
    """Train, and return after each step what the tracker names and which checkpoints are whole."""
    from megatron.training import training

    seen = []
    save = Path(argv[argv.index("--save") + 1])
    original = training.train_step

    def step(*positional, **named):
        result = original(*positional, **named)
        seen.append((keep.tracked(save) or 0, list(keep.complete_steps(save))))
        return result

    training.train_step = step
    try:
        train(argv)
    finally:
        training.train_step = original
    return seen


def test_what_is_written(tmp_path: Path) -> None:
    """The same as without it; the tracker names whole checkpoints only, and older ones go when newer ones are whole."""
    run_distributed(train, 2, arguments(tmp_path / "waits", 6), timeout=100)
    seen = run_distributed(train_watched, 2, arguments(tmp_path / "background", 6, "--async-save"), timeout=150)[0]
    assert all(tracked == 0 or tracked in whole for tracked, whole in seen), seen
    assert scalars(tmp_path / "waits/curve")["lm loss"] == scalars(tmp_path / "background/curve")["lm loss"]
    for folder in ("waits", "background"):
        assert keep.steps(tmp_path / folder) == [6]
    found = run_distributed(
        differences, 1, *(tmp_path / name / "iter_0000006" for name in ("waits", "background")), None
    )
    assert found[0] == []


def start(folder: Path, *flags: str) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """Start training in a process; return it and all that it has started, once there is a checkpoint."""
    words = [sys.executable, "-m", "megagate.pretrain", *arguments(folder, 100000, "--num-workers", "1", *flags)]
    with open(folder.with_suffix(".log"), "wb") as log:
        environment = {**os.environ, DIRECTORY_VARIABLE: str(folder / FOLDER)}  # as under a supervisor
        run = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, env=environment)
    deadline = time.monotonic() + 200
    while keep.tracked(folder) is None:
        assert run.poll() is None and time.monotonic() < deadline, folder.with_suffix(".log").read_text()
        time.sleep(0.2)
    return run, psutil.Process(run.pid).children(recursive=True)


def test_the_rank_ends_when_its_writer_dies(tmp_path: Path) -> None:
    run, started = start(tmp_path / "run", "--async-save")
    try:
        (writer,) = [process for process in started if process.ppid() != run.pid]
        writer.kill()
        assert run.wait(60) == 1
    finally:
        run.kill()
    assert "writes the checkpoints of rank 0 in the background died" in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize(
    ("flag", "number"),
    [("--async-save", signal.SIGKILL), ("--async-save", signal.SIGTERM), ("--no-async-save", signal.SIGKILL)],
)
def test_what_a_rank_starts_ends_with_it(tmp_path: Path, flag: str, number: signal.Signals) -> None:
    """However it ends; and until it has saved, not where a whole job is told to end or asked where it hangs."""
    run, started = start(tmp_path / "run", flag)
    assert len(started) >= 3
    try:
        if number == signal.SIGTERM:
            for process in started:
                process.send_signal(HANG_SIGNAL)
                process.send_signal(number)
            time.sleep(1)
            stacks = tmp_path / "run" / FOLDER / "stacks" / "rank_0.txt"
            assert stacks.read_text().count("\n") == 1  # the name of the machine: nobody has answered for the rank
        run.send_signal(number)
        status = run.wait(60)
        _, left = psutil.wait_procs(started, timeout=60)
    finally:
        run.kill()
    assert not left
    log = (tmp_path / "run.log").read_text()
    assert status == (0 if number == signal.SIGTERM else -number), log
    assert keep.tracked(tmp_path / "run") in keep.complete_steps(tmp_path / "run")
    if number == signal.SIGTERM:
        assert f"saved step {keep.tracked(tmp_path / 'run')} in" in log


def test_what_is_written_is_a_copy() -> None:
    """Training goes on to change the tensors, which lie in shared memory on the CPU."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    cpu.activate_training()
    tensor = torch.arange(3.0).share_memory_()
    buckets = [("path", "name", ([], [("item", tensor)]))]
    for context, expected in ((cpu.without("preload"), 7.0), (contextlib.nullcontext(), 0.0)):
        tensor[0] = 0
        with context:
            copied = FileSystemWriterAsync.preload_tensors(buckets)[0][2][1][0][1]
        tensor[0] = 7
        assert copied[0] == expected


def test_when_it_is_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default on GPUs."""
    from megagate.checkpoint import background
    from megagate.pretrain.arguments import read

    save = ["--save", str(tmp_path), "--save-interval", "1"]
    assert on_cpu() and not read([*TINY, *save]).async_save
    for flags, expected in (
        (save, True),
        ([*save, "--no-async-save"], False),
        ([*save, "--ckpt-format", "torch"], False),
        ([], False),
    ):
        monkeypatch.setattr(background, "on_cpu", lambda: False)
        args = read([*TINY, *flags])
        assert (args.async_save, args.use_persistent_ckpt_worker) == (expected, expected)
    with pytest.raises(UserError, match="--async-save cannot write --ckpt-format torch: leave one of them out"):
        read([*TINY, *save, "--async-save", "--ckpt-format", "torch"])
