"""One attempt: how its end is told from what its processes print, leave behind, and do not do."""

import os
import time
from pathlib import Path

import pytest

from megagate.errors import UserError
from megagate.supervise import log, ranks, watch
from megagate.supervise.decide import Attempt, Kind
from megagate.supervise.records import ProgressFile
from megagate.supervise.watch import Watch


def watched(folder: Path, script: str, hang_after: float = 60, start_limit: float = 60) -> Watch:
    """Start a shell script as the ranks."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        return Watch(["sh", "-c", script], dict(os.environ), folder, hang_after, start_limit, lock)
    finally:
        os.close(lock)


def end(attempt: Watch, last_moment: float = float("inf")) -> Attempt:
    return attempt.run(lambda: None, last_moment)


def test_the_last_moment_comes_without_a_word(tmp_path: Path) -> None:
    """The warning of Slurm may be missing; a job that has run out of time does not come back."""
    started = time.monotonic()
    attempt = end(watched(tmp_path, "sleep 600"), last_moment=time.monotonic() + 0.3)
    assert (attempt.kind, attempt.signal) == (Kind.STOPPED, "SIGUSR1")
    assert time.monotonic() - started < 300


def test_what_does_not_die_is_killed_again_and_then_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr(watch, "send", lambda child, name: sent.append(name))
    for name, seconds in (("STACK_SECONDS", 0.0), ("END_SECONDS", 0.1), ("AGAIN", 0.1), ("UNKILLABLE", 1.0)):
        monkeypatch.setattr(watch, name, seconds)
    attempt = end(watched(tmp_path, "exec sleep 60", start_limit=0.1))
    assert (attempt.kind, attempt.began) == (Kind.NODE, False)
    assert sent[0] == "USR2" and sent.count("KILL") > 2


def test_a_clock_that_jumps_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ProgressFile(tmp_path, 4).step(5)
    now = time.time()
    attempt = watched(tmp_path, "sleep 1; exit 1", hang_after=300)
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    assert end(attempt).kind is Kind.FAILED


def test_the_node_that_slurm_names_is_at_fault(tmp_path: Path) -> None:
    """Not that of the rank which notices first."""
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "rank_3.txt").write_text("n1\n")
    lines = [
        "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED DUE TO NODE FAILURE ***",
        "srun: error: Node failure on n7",
        "Root Cause (first observed failure):",
        "  host      : n1",
        "  rank      : 3 (local_rank: 3)",
        "  exitcode  : 1 (pid: 17)",
    ]
    (tmp_path / "printed").write_text("\n".join(lines))
    ended = watched(tmp_path, f"cat {tmp_path}/printed; exit 1")
    attempt = end(ended)
    assert (attempt.kind, attempt.host, ended.details["rank"]) == (Kind.NODE, "n7", 3)


def test_thousands_of_tracebacks(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """The main log has the first lines, and all of the training log."""
    line = '  File "megatron/training/checkpointing.py", line 1, in save_checkpoint'
    end(watched(tmp_path, f"yes '{line}' | head -n 3000; echo ' iteration  7/ 9 | loss'"))
    printed = capfd.readouterr().out.splitlines()
    assert len(printed) < log.OTHER_LINES + 10
    assert "iteration  7/ 9" in printed[-1]


def test_ranks_that_hang_are_named_in_few_words() -> None:
    assert ranks._some(["1", "2"]) == "1, 2"
    assert ranks._some([str(rank) for rank in range(16384)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 16376 more"


def test_where_the_flight_recorder_wrote(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "flight_recorder_rank_0").write_text("of an earlier attempt")
    ended = watched(tmp_path, f"touch {tmp_path}/flight_recorder_rank_1; exit 1")
    end(ended)
    assert ended.details["flight_recorder"] == 1
    assert f"on 1 ranks are in {tmp_path}/flight_recorder_rank_N" in capfd.readouterr().out


def test_a_mistake_that_is_seen_before_the_ranks_start(tmp_path: Path) -> None:
    ended = watched(tmp_path, "echo 'error: there is no h100.sh: set MEGAGATE_ENV' >&2; exit 2")
    assert end(ended).kind is Kind.USER_ERROR
    assert ended.details["message"] == "there is no h100.sh: set MEGAGATE_ENV"


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot start nowhere: No such file or directory; correct the command"):
        Watch(["nowhere"], {}, tmp_path, 1, 1, 0)
