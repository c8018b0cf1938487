"""A sign of life is as old as its file system says, whatever the clocks of the nodes say."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from megagate.supervise import alive
from tests.launch.cluster import wait_for


def backdate(path: Path, seconds: float) -> None:
    """Make a file older than it is, by the time that its file system gave it."""
    changed = path.stat().st_mtime - seconds
    os.utime(path, (changed, changed))


def test_signs_come_until_the_end(tmp_path: Path) -> None:
    sign = tmp_path / alive.FILE
    with alive.signs(tmp_path, period=0.01):
        for _ in range(2):
            backdate(sign, 1000)
            wait_for(lambda: (alive.age(sign) or 1000) < 500, 30, "another sign")
    backdate(sign, 1000)
    assert (alive.age(sign) or 0) >= 1000


@pytest.mark.parametrize("wrong", [-7200.0, 7200.0])
def test_a_clock_that_is_wrong(wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + wrong)
    with alive.signs(tmp_path):
        pass
    backdate(tmp_path / alive.FILE, 1000)
    assert 1000 <= (alive.age(tmp_path / alive.FILE) or 0.0) < 1300


def test_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own clock counts: /proc takes no files, and its files of a process are as old as the process."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            folder, clock = Path(f"/proc/{process.pid}"), time.time
            monkeypatch.setattr(time, "time", lambda: clock() + 1000)
            assert 1000 <= (alive.age(folder / "stat") or 0.0) < 1300
            assert alive.age(folder / "nothing") is None
        finally:
            process.kill()
