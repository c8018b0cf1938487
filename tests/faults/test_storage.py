"""Damaged checkpoints, a full disk, damaged data: docs/launch.md has the table."""

import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from megagate.checkpoint import keep
from megagate.checkpoint.pickles import read_index
from tests.faults.local import LocalRun
from tests.launch.cluster import wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    local = LocalRun(tmp_path, steps=60, interval=10)
    yield local
    local.stop()


@pytest.mark.parametrize("fault", ["truncated", "deleted", "overwritten"])
def test_a_damaged_shard(run: LocalRun, fault: str) -> None:
    run.start("--back-off 0", "--exit-interval", "30")
    assert run.wait(600) == 0, run.log()
    assert keep.tracked(run.save) == 30
    shard = next((run.save / "iter_0000030").glob("*.distcp"))
    if fault == "truncated":
        os.truncate(shard, shard.stat().st_size // 2)
    elif fault == "deleted":
        shard.unlink()
    else:
        overwrite(run.save / "iter_0000030", shard.name)
    run.start()
    assert run.wait(600) == 0, run.log()
    assert run.events("end")[-1]["started_at"] == 20
    if fault == "overwritten":
        kinds = [(end["kind"], end["decision"]) for end in run.events("end")[1:]]
        assert kinds == [("loading", "restart"), ("loading", "roll back"), ("finished", "done")], run.log()
        assert (run.save / "rolled_back" / "iter_0000030.1").is_dir()
    else:
        assert "is incomplete" in run.log()
    assert sum(end["steps_lost"] for end in run.events("end")) == 10
    run.check_equals_uninterrupted()


def overwrite(checkpoint: Path, shard: str) -> None:
    """Write random bytes over the beginning of each object of a shard, which is as long as before."""
    generator = random.Random(1)
    for piece in read_index(checkpoint).storage_data.values():
        if piece.relative_path == shard:
            with open(checkpoint / shard, "r+b") as file:
                file.seek(piece.offset)
                file.write(generator.randbytes(min(100, piece.length)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_during_a_save(small_disk: Path, tmp_path: Path) -> None:
    """The save fails, the tracker stays, the supervisor tries again, and when there is room the run goes on."""
    run = LocalRun(tmp_path, steps=60, interval=10, flags=("--keep-last", "1"))
    run.save = small_disk / "save"
    try:
        run.start("--back-off 5 --same-step 100")
        wait_for(lambda: keep.tracked(run.save) is not None, 240, "a save")
        filler = small_disk / "filler"
        with open(filler, "wb") as file:
            try:
                while True:
                    file.write(b"x" * 2**16)
                    file.flush()
            except OSError:
                pass
        wait_for(
            lambda: "waiting for room" in run.log() or any(end["kind"] == "failed" for end in run.events("end")),
            240,
            "the full disk is noticed",
            run.log,
        )
        good = keep.tracked(run.save)
        assert good is not None and next(keep.complete_steps(run.save)) == good
        time.sleep(1)
        filler.unlink()
        assert run.wait(900) == 0, run.log()
        assert keep.steps(run.save) == [60]
    finally:
        run.stop()


def test_a_damaged_block_of_the_data(tmp_path: Path) -> None:
    """Tokens that cannot be are refused, and not tried again."""
    from tests.pretrain.test_train import write_dataset

    write_dataset(tmp_path / "data", documents=200)
    values = numpy.memmap(tmp_path / "data.bin", dtype=numpy.uint16, mode="r+")
    values[10000:12000] = 65535
    values.flush()
    run = LocalRun(tmp_path, steps=150, interval=50)
    run.argv = [flag for flag in run.argv if flag != "--mock-data"]
    run.argv += ["--data-path", str(tmp_path / "data"), "--split", "100,0,0"]
    try:
        run.start()
        assert run.wait(600) == 2, run.log()
        (end,) = run.events("end")
        assert (end["kind"], end["decision"]) == ("user error", "give up")
        assert "the data hold the token 65535" in end["message"]
    finally:
        run.stop()
