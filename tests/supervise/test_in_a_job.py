"""The supervisor inside a job, with Slurm's commands replaced by ones that say what the test has them say.

tests/launch has the real ones, which cannot be brought to refuse a requeue or to lose a lock.
"""

import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megagate.errors import UserError
from megagate.supervise import preflight, slurm, supervisor
from megagate.supervise.decide import Policy
from megagate.supervise.records import FOLDER, History
from megagate.supervise.status import screen
from megagate.supervise.supervisor import Settings, Supervisor

SCONTROL = """#!/bin/sh
echo "$@" >> {folder}/asked
case "$1 $2" in
    "show hostnames") printf 'n1\\nn2\\nn3\\nn4\\n' ;;
    "show job") echo "JobId=7 JobState=RUNNING ReqNodeList=(null) ExcNodeList=n[8-9]" ;;
    requeue*) [ {requeue} = 0 ] && kill -TERM $PPID $$; exit {requeue} ;;
esac
"""
TRAINS = "echo '0 5 1.0 2.0' > $MEGAGATE_SUPERVISE/progress; "
FINISHED = """mkdir -p $MEGAGATE_SUPERVISE/outcome
echo '{"outcome": "finished", "time": 1, "rank": 0, "message": ""}' > $MEGAGATE_SUPERVISE/outcome/rank_0.json"""
USER_ERROR = """mkdir -p $MEGAGATE_SUPERVISE/outcome
echo '{"outcome": "user_error", "time": 1, "rank": 0, "host": "n3", "message": "UserError: cannot read x.yaml"}' \\
    > $MEGAGATE_SUPERVISE/outcome/rank_0.json; exit 1"""
FIT = "echo {} > $MEGAGATE_SUPERVISE/preflight.json"
UNFIT = """echo '{"n3": ["GPU 1 does not work"]}' > $MEGAGATE_SUPERVISE/preflight.json"""


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Job:
    """A job on n1 to n4.

    Args:
        folder: for its files.
        monkeypatch: of the test.
        requeue: exit status of `scontrol requeue`.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, requeue: int = 0) -> None:
        self.folder, self.save = folder, folder / "save"
        for name, text in (("scontrol", SCONTROL.format(folder=folder, requeue=requeue)), ("squeue", "#!/bin/sh")):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")

    def run(self, *trainer: str, checks: tuple[str, ...] = (), back_off: float = 0) -> int:
        """Supervise shell scripts that stand for the trainer and the checks of each attempt, the last for all later."""
        cases = []
        for name, scripts in (("megagate.pretrain", trainer), (preflight.__name__, checks)):
            for number, script in enumerate(scripts, 1):
                last = "*" if number == len(scripts) else number
                cases.append(f"{name}-{last})\n{script}\n;;")
        (self.folder / "ranks.sh").write_text("case $2-$MEGAGATE_ATTEMPT in\n" + "\n".join(cases) + "\nesac\n")
        command = ["sh", str(self.folder / "ranks.sh"), "-m", "megagate.pretrain", "--save", str(self.save)]
        policy = Policy(can_requeue=True, back_off=back_off)
        return Supervisor(command, self.save, Settings(policy, 60, 60, 60, () if checks else None)).run()

    @property
    def ends(self) -> list[dict[str, Any]]:
        """The ends of the attempts."""
        return History(self.save / FOLDER).ends()

    def asked(self) -> str:
        """Return what scontrol was asked."""
        return (self.folder / "asked").read_text()


def test_most_nodes_do_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk that all share leaves out no node, and may pass."""
    job = Job(tmp_path, monkeypatch)
    found = json.dumps({node: ["0.00 GB are free"] for node in ("n1", "n2", "n3")})
    assert job.run(FINISHED, checks=(f"echo '{found}' > $MEGAGATE_SUPERVISE/preflight.json", FIT)) == 0
    first, last = job.ends
    assert (first["kind"], first["host"], first["decision"], first["exclude"]) == ("preflight", None, "restart", [])
    assert "0.00 GB are free" in first["message"]
    assert last["kind"] == "finished"
    assert "requeue" not in job.asked()


def test_checks_that_fail_on_thousands_of_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The main log stays readable."""
    job = Job(tmp_path, monkeypatch)
    assert job.run(FINISHED, checks=("yes 'Traceback (most recent call last):' | head -n 9999; exit 1", FIT)) == 0
    assert 10 < len(capfd.readouterr().out.splitlines()) < 500


def test_slurm_refuses_to_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    job = Job(tmp_path, monkeypatch, requeue=1)
    assert job.run(FINISHED, checks=(UNFIT, FIT)) == 0
    assert [(end["kind"], end["decision"]) for end in job.ends] == [("preflight", "restart"), ("finished", "done")]
    assert "excluded" not in screen(job.save)
    assert "going on with the nodes that it has" in capfd.readouterr().out


def test_giving_up_where_slurm_refuses_to_requeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known as such: when someone starts the run again, failures count anew."""
    job = Job(tmp_path, monkeypatch, requeue=1)
    broken = TRAINS + "echo 'CUDA error: uncorrectable ECC error encountered'; exit 1"
    for count in (3, 6):
        assert job.run(broken) == 3
        assert [end["decision"] for end in job.ends] == ["restart", "restart", "give up"] * (count // 3)
    assert "last decision: give up (3 failures in a row at step 5" in screen(job.save)


def test_a_node_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides those that were; the job is never held, as it would stay if the supervisor died meanwhile.

    Slurm ends all processes of a job that it requeues, scontrol among them if it is still there.
    """
    job = Job(tmp_path, monkeypatch)
    started = time.monotonic()
    assert job.run(FINISHED, checks=(UNFIT,)) == 75
    changes = [line for line in job.asked().splitlines() if not line.startswith("show")]
    assert changes == ["requeue 7", "update JobId=7 ExcNodeList=n[8-9],n3"]
    assert (job.ends[0]["decision"], job.ends[0]["exclude"]) == ("requeue", ["n3"])
    assert time.monotonic() - started < 45  # Slurm's word comes while the job is being changed


@pytest.mark.parametrize(
    ("number", "requeue", "decisions"),
    [
        (signal.SIGTERM, 0, ["restart", "stop"]),
        (signal.SIGUSR1, 0, ["restart", "requeue"]),
        (signal.SIGUSR1, 1, ["restart", "stop"]),
    ],
)
def test_told_to_end_while_it_waits(
    number: signal.Signals, requeue: int, decisions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows is in the history, so that failures count anew where someone has to start the run again."""
    job = Job(tmp_path, monkeypatch, requeue)

    def sleep(seconds: float) -> None:
        if seconds == 1:  # the wait, not a look at the ranks
            os.kill(os.getpid(), number)
        original(min(seconds, 0.1))

    original = time.sleep
    monkeypatch.setattr(time, "sleep", sleep)
    assert job.run(TRAINS + "exit 1", back_off=600) == 75
    assert [end["decision"] for end in job.ends] == decisions
    if decisions[-1] == "stop":
        assert "last decision: stop" in screen(job.save)
        assert job.run(FINISHED) == 0
        assert job.ends[-1]["decision"] == "done"


def test_what_the_ranks_write_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without the folder of the checkpoints would train into nowhere."""
    job = Job(tmp_path, monkeypatch)
    assert job.run(FINISHED, checks=("exit 0",)) == 2
    assert "mount it in their container" in job.ends[0]["message"]


@pytest.mark.parametrize("status", [2, 127])
def test_checks_that_cannot_start(status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, monkeypatch)
    assert job.run(FINISHED, checks=(f"exit {status}",)) == 2
    assert len(job.ends) == 1


def test_a_mistake_that_was_none_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same flags have trained: a node without a file system comes and goes."""
    job = Job(tmp_path, monkeypatch)
    assert job.run(TRAINS + "exit 1", USER_ERROR, FINISHED) == 0
    assert [(end["kind"], end["decision"]) for end in job.ends] == [
        ("failed", "restart"),
        ("failed", "restart"),
        ("finished", "done"),
    ]
    assert (job.ends[1]["host"], job.ends[1]["message"]) == ("n3", "UserError: cannot read x.yaml")
    (tmp_path / "damaged").mkdir()
    damaged = Job(tmp_path / "damaged", monkeypatch)
    sentence = f"{damaged.save}/iter_0000005 cannot be read: restore it, or choose one by --ckpt-step"
    assert damaged.run(USER_ERROR.replace("cannot read x.yaml", sentence), FINISHED) == 0
    assert [end["kind"] for end in damaged.ends] == ["loading", "finished"]
    (tmp_path / "new").mkdir()
    new = Job(tmp_path / "new", monkeypatch)
    assert new.run(USER_ERROR) == 2


def test_going_back_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """On a full disk, say; the run is tried again as after any other fault of storage."""
    job = Job(tmp_path, monkeypatch)
    (job.save / "iter_0000008").mkdir(parents=True)
    (job.save / "latest_checkpointed_iteration.txt").write_text("8")
    (job.save / "rolled_back").write_text("no folder")
    damaged = USER_ERROR.replace("user_error", "failed").replace("cannot read x.yaml", "the checkpoint is damaged")
    assert job.run(damaged, damaged, FINISHED) == 0
    assert [(end["kind"], end["decision"]) for end in job.ends] == [
        ("loading", "restart"),
        ("loading", "roll back"),
        ("finished", "done"),
    ]
    assert "megagate: cannot go back: " in capfd.readouterr().out


def test_the_lock_of_a_node_that_has_gone_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, monkeypatch)
    (job.save / FOLDER).mkdir(parents=True)
    monkeypatch.setattr(supervisor, "LOCK_SECONDS", 2.0)
    with open(job.save / FOLDER / "lock", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another supervisor, or ranks that it left"):
            job.run(FINISHED)
        monkeypatch.setattr(supervisor, "LOCK_SECONDS", 60.0)
        threading.Timer(0.5, lambda: fcntl.flock(held, fcntl.LOCK_UN)).start()
        assert job.run(FINISHED) == 0


def test_slurm_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an error says is no name of a node, and the time limit is as it was at the start."""
    Job(tmp_path, monkeypatch)
    for name in ("scontrol", "squeue"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    assert slurm.nodes() == []
    assert slurm.seconds_left() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    assert 500 < (slurm.seconds_left() or 0) <= 1000


@pytest.mark.parametrize("text", ["", "\0\0", "5\n", "release"])
def test_a_tracker_that_a_crash_has_emptied(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer then takes the newest complete checkpoint."""
    job = Job(tmp_path, monkeypatch)
    job.save.mkdir()
    tracker = job.save / "latest_checkpointed_iteration.txt"
    tracker.write_text(text)
    assert job.run(FINISHED) == 0
    assert tracker.exists() == bool(text.strip("\0"))


def test_a_command_that_cannot_be_started(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """It is a mistake like any other at first; where the run has trained it may pass."""
    program = tmp_path / "program"
    command = [str(program), "-m", "megagate.pretrain", "--save", str(tmp_path)]
    policy = Policy(back_off=0)
    for checks in ((), None):
        assert Supervisor(command, tmp_path, Settings(policy, 60, 60, 60, checks)).run() == 2
    said = f"error: cannot start {program}: No such file or directory; correct the command after --"
    assert capfd.readouterr().out.count(said) == 2
    history = History(tmp_path / FOLDER)
    assert [(end["kind"], end["decision"]) for end in history.ends()] == [("user error", "give up")] * 2
    assert "not running; last decision: give up" in screen(tmp_path)

    program.write_text(f"#!/bin/sh\necho 4 > {tmp_path}/latest_checkpointed_iteration.txt\n{TRAINS}rm $0; exit 1\n")
    program.chmod(0o755)
    assert Supervisor(command, tmp_path, Settings(policy, 60, 60, 60)).run() == 3
    ends = history.ends()[2:]
    assert [(end["kind"], end["step"], end["began"]) for end in ends[:2]] == [("failed", 5, True), ("failed", 4, False)]
    assert {end["kind"] for end in ends} == {"failed"} and len(ends) == policy.without_progress
