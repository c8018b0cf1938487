"""Ranks that are killed, stopped or slow, and signals to everything: docs/launch.md has the table."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.local import LocalRun
from tests.launch.cluster import wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]
KILLS = int(os.environ.get("MEGAGATE_FAULT_KILLS", "30"))


@pytest.fixture(params=["--no-async-save", "--async-save"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalRun]:
    local = LocalRun(tmp_path, steps=200, interval=10, flags=("--num-workers", "1", request.param))
    yield local
    local.stop()


def test_killed_while_computing_and_while_saving(run: LocalRun) -> None:
    run.start()
    run.wait_for_step(12)
    run.ranks()[1].kill()
    run.wait_for_attempt(2)
    wait_for(lambda: saving(run), 240, "a save")
    run.ranks()[0].kill()
    assert run.wait(900) == 0, run.log()
    assert [end["kind"] for end in run.events("end")] == ["killed", "killed", "finished"]
    assert run.events("end")[0]["rank"] == 1
    run.check_nothing_durable_was_lost()
    run.check_equals_uninterrupted()


def saving(run: LocalRun) -> bool:
    """Whether a checkpoint is being written: its directory is newer than what the tracker names."""
    tracker = run.save / "latest_checkpointed_iteration.txt"
    newest = max((int(path.name[5:]) for path in run.save.glob("iter_*")), default=0)
    return tracker.exists() and newest > int(tracker.read_text())


def test_the_writer_in_the_background_is_killed(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, steps=60, interval=10, flags=("--async-save",))
    try:
        run.start()
        run.wait_for_step(12)
        ranks = {process.pid for process in run.ranks()}
        (writer, *_) = [
            child
            for child in run.processes()
            if "RANK" in child.environ()
            and child.ppid() not in ranks | {child.pid}
            and "forkserver" in " ".join(psutil.Process(child.ppid()).cmdline())
        ]
        writer.kill()
        assert run.wait(600) == 0, run.log()
        first, last = run.events("end")
        assert (first["kind"], last["kind"]) == ("failed", "finished"), run.log()
        assert "in the background died" in first["message"]
        run.check_nothing_durable_was_lost()
        run.check_equals_uninterrupted()
    finally:
        run.stop()


@pytest.mark.parametrize("flag", ["--no-async-save", "--async-save"])
def test_random_kills(flag: str, tmp_path: Path) -> None:
    """Of random ranks at random moments, start and saves included, of a run that comes on meanwhile."""
    generator = random.Random(1)
    run = LocalRun(tmp_path, steps=500, interval=10, flags=("--num-workers", "1", flag))
    kills = 0
    try:
        run.start("--back-off 0 --same-step 1000 --without-progress 1000")
        for number in range(1, KILLS + 1):
            wait_for(lambda number=number: len(run.events("attempt")) >= number, 240, "an attempt", run.log)
            wait_for(lambda: len(run.ranks()) == 2 or run.process.poll() is not None, 240, "two ranks", run.log)
            if generator.random() < 0.8:  # else while it starts
                run.wait_for_attempt(number)
                target = run.step() + generator.randint(0, 25)
                wait_for(lambda target=target: run.step() >= target or run.process.poll() is not None, 240, "steps")
            time.sleep(generator.uniform(0, 1))
            if run.process.poll() is not None:
                break
            wait_for(run.ranks, 240, "a rank", run.log)
            generator.choice(run.ranks()).kill()
            kills += 1
            wait_for(lambda number=number: len(run.events("end")) >= number, 240, "the end of an attempt", run.log)
        assert run.wait(1200) == 0, run.log()
        assert kills >= KILLS // 2
        assert len({end["saved"] for end in run.events("end")}) > KILLS // 4
        run.check_nothing_durable_was_lost()
        run.check_equals_uninterrupted()
    finally:
        run.stop()


def test_a_stopped_rank(run: LocalRun) -> None:
    run.start("--back-off 0 --hang-after 60")
    run.wait_for_step(12)
    run.ranks()[1].send_signal(signal.SIGSTOP)
    assert run.wait(900) == 0, run.log()
    first, last = run.events("end")
    assert (first["kind"], first["rank"], last["kind"]) == ("hang", 1, "finished"), run.log()
    assert "no answer from rank 1" in first["message"]
    run.check_nothing_durable_was_lost()
    run.check_equals_uninterrupted()


def test_a_slow_rank(run: LocalRun) -> None:
    """It slows the run, which is not a hang, and changes no bit."""
    run.start("--back-off 0 --hang-after 60")
    run.wait_for_step(2)
    rank = run.ranks()[1]
    while run.process.poll() is None and run.step() < 60:
        try:
            rank.send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            rank.send_signal(signal.SIGCONT)
            time.sleep(0.1)
        except psutil.NoSuchProcess:
            break
    assert run.wait(900) == 0, run.log()
    assert [end["kind"] for end in run.events("end")] == ["finished"]
    run.check_equals_uninterrupted()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_everything(run: LocalRun, number: signal.Signals) -> None:
    """Supervisor, torchrun, ranks and data-loader workers; the workers first."""
    run.start()
    run.wait_for_step(12)
    ranks = {process.pid for process in run.ranks()}
    workers = [process for process in run.processes() if process.ppid() in ranks]
    assert workers
    for process in [*workers, *run.processes(), psutil.Process(run.process.pid)]:
        process.send_signal(number)
    assert run.wait() == 75, run.log()
    (end,) = run.events("end")
    assert (end["kind"], end["signal"], end["steps_lost"]) == ("stopped", number.name, 0)
    assert end["saved"] == end["step"] >= 12
    run.start()
    assert run.wait(900) == 0, run.log()
    run.check_equals_uninterrupted()
