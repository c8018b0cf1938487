"""The supervisor's loop, history and status, around processes that behave as ranks do."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from megagate.errors import UserError
from megagate.supervise.decide import Policy
from megagate.supervise.records import FOLDER, History, ProgressFile, read_progress
from megagate.supervise.status import goodput, screen
from megagate.supervise.supervisor import Settings, Supervisor
from tests.distributed import ROOT
from tests.launch.cluster import wait_for
from tests.supervise.test_alive import backdate


class Supervised:
    """A supervisor around tests/supervise/ranks.py."""

    def __init__(self, folder: Path, script: list[dict[str, Any]]) -> None:
        self.save = folder / "save"
        (folder / "script.json").write_text(json.dumps(script))
        self.script = folder / "script.json"

    def start(self, *flags: str, stdout: Any = subprocess.PIPE) -> subprocess.Popen:
        words = [sys.executable, "-m", "megagate.supervise", "run", "--back-off", "0", *flags, "--", sys.executable]
        words += [str(ROOT / "tests" / "supervise" / "ranks.py"), str(self.script), "-m", "megagate.pretrain"]
        return subprocess.Popen(
            [*words, "--save", str(self.save)],
            cwd=ROOT,
            env=dict(os.environ, PYTHONPATH=str(ROOT)),
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *flags: str) -> tuple[int, str]:
        """Run to the end; return the exit status and the output."""
        with self.start(*flags) as process:
            output = process.communicate(timeout=60)[0]
        return process.returncode, output

    @property
    def ends(self) -> list[dict[str, Any]]:
        """The ends of the attempts."""
        return History(self.save / FOLDER).of("end")


def test_from_a_crash_to_the_end(tmp_path: Path) -> None:
    script = [
        {"steps": 7, "save": 5, "end": "failed"},
        {"steps": 9, "save": 8, "end": "log:RuntimeError: CUDA error: uncorrectable ECC error encountered"},
        {"steps": 9, "save": 4, "end": "spike"},
        {"steps": 12, "save": 12, "end": "finished"},
    ]
    run = Supervised(tmp_path, script)
    status, output = run.run()
    assert status == 0, output
    ends = run.ends
    assert [end["kind"] for end in ends] == ["failed", "device", "spike", "finished"]
    assert [end["decision"] for end in ends] == ["restart", "restart", "restart", "done"]
    assert [(end["started_at"], end["step"], end["saved"]) for end in ends] == [
        (0, 7, 5),
        (5, 9, 8),
        (8, 9, 4),
        (4, 12, 12),
    ]
    assert [end["steps_lost"] for end in ends] == [2, 1, 5, 0]
    assert (ends[0]["rank"], ends[0]["message"]) == (3, "ValueError: bad")
    assert ends[1]["message"].endswith("ECC error encountered")
    assert ends[0]["save_seconds"] == 2.5
    (skip,) = History(run.save / FOLDER).of("skip")
    assert (skip["first"], skip["last"], skip["attempt"]) == (3, 4, 3)
    shown = screen(run.save)
    assert "attempts   4: 1 failed, 1 device, 1 spike, 1 finished; 8 steps done again" in shown
    assert "skipped    steps 3-4" in shown
    assert "saved      step 12" in shown
    assert len(shown.splitlines()) < 25


def test_the_same_step_three_times(tmp_path: Path) -> None:
    run = Supervised(tmp_path, [{"steps": 7, "save": 5, "end": "failed"}])
    status, output = run.run()
    assert status == 3, output
    assert [end["decision"] for end in run.ends] == ["restart", "restart", "give up"]
    assert "3 failures in a row at step 7" in output
    status, output = run.run()  # someone has looked at it: counted anew
    assert status == 3, output
    assert [end["decision"] for end in run.ends] == ["restart", "restart", "give up"] * 2


def test_a_checkpoint_that_does_not_load(tmp_path: Path) -> None:
    """Tried twice, then moved away for the one before it."""
    run = Supervised(tmp_path, [{"end": "loading"}, {"end": "loading"}, {"steps": 12, "save": 12, "end": "finished"}])
    for step in (5, 8):
        (run.save / f"iter_{step:07d}" / "mp_rank_00").mkdir(parents=True)
    (run.save / "latest_checkpointed_iteration.txt").write_text("8")
    status, output = run.run()
    assert status == 0, output
    assert [(end["kind"], end["decision"], end["started_at"], end["step"], end["steps_lost"]) for end in run.ends] == [
        ("loading", "restart", 8, 8, 0),
        ("loading", "roll back", 8, 8, 3),
        ("finished", "done", 5, 12, 0),
    ]
    assert (run.save / "rolled_back" / "iter_0000008.1").is_dir()


def test_a_mistake_of_the_user(tmp_path: Path) -> None:
    run = Supervised(tmp_path, [{"end": "user_error"}])
    status, output = run.run()
    assert status == 2
    assert [(end["kind"], end["message"]) for end in run.ends] == [("user error", "no such flag")]
    assert "Traceback" not in output


@pytest.mark.parametrize(("number", "name"), [(signal.SIGUSR1, "SIGUSR1"), (signal.SIGTERM, "SIGTERM")])
def test_told_to_stop(number: signal.Signals, name: str, tmp_path: Path) -> None:
    run = Supervised(tmp_path, [{"steps": 4, "end": "wait"}])
    process = run.start()
    wait_for(lambda: (read_progress(run.save / FOLDER) or ProgressFileLike).step == 4, 60, "step 4")
    second, said = run.run()  # while the first is at work
    assert (second, "another supervisor" in said) == (2, True)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75, output
    (end,) = run.ends
    assert (end["kind"], end["signal"], end["saved"], end["steps_lost"]) == ("stopped", name, 4, 0)


class ProgressFileLike:
    """No progress yet."""

    step = -1


def test_a_hang_is_reported_with_its_stack(tmp_path: Path) -> None:
    run = Supervised(tmp_path, [{"steps": 4, "save": 4, "end": "hang"}, {"steps": 8, "save": 8, "end": "finished"}])
    status, output = run.run("--hang-after", "1")
    assert status == 0, output
    first = run.ends[0]
    assert (first["kind"], first["rank"], first["host"], first["decision"]) == ("hang", 0, "node7", "restart")
    assert "outside of communication: 0 (File " in first["message"] and "ranks.py" in first["message"]


def test_a_supervisor_that_went_away(tmp_path: Path) -> None:
    run = Supervised(tmp_path, [{"steps": 6, "save": 4, "end": "hang"}, {"steps": 8, "save": 8, "end": "finished"}])
    process = run.start()
    wait_for(lambda: (run.save / "latest_checkpointed_iteration.txt").exists(), 60, "a save")
    children = psutil.Process(process.pid).children(recursive=True)
    assert "supervisor gave a sign of life" in screen(run.save)
    process.kill()
    process.wait()
    backdate(run.save / FOLDER / "alive", 1000)
    shown = screen(run.save)
    assert re.search(r"supervisor seems lost: its last sign of life is 16m \d+s old", shown)
    assert shown.endswith("lost, it seems")
    status, output = run.run()
    assert status == 2 and "ranks that it left" in output
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=60)
    status, output = run.run()
    assert status == 0, output
    lost, last = run.ends
    assert (lost["kind"], lost["step"], lost["saved"], lost["steps_lost"]) == ("lost", 6, 4, 2)
    assert (last["kind"], last["started_at"]) == ("finished", 4)
    assert "seems lost" not in screen(run.save)


def test_goodput() -> None:
    """100 s of which 60 s in 60 steps, 40 of them kept; 100 s in the queue; 50 s of which 40 s useful so far."""
    events = [
        {"event": "attempt", "attempt": 1, "time": 0.0, "job": "7", "restart": 0},
        {"event": "end", "attempt": 1, "seconds": 100.0, "seconds_lost": 60.0},
        {"event": "attempt", "attempt": 2, "time": 200.0, "job": "7", "restart": 1},
    ]

    class Progress:
        first_time, time = 210.0, 250.0

    measured = goodput(events, Progress, now=250.0)
    assert (measured.useful, measured.allocated, measured.calendar) == (80.0, 150.0, 250.0)
    assert measured.of_allocated == pytest.approx(80 / 150)
    assert measured.of_calendar == pytest.approx(80 / 250)


def test_a_history_that_was_cut_short(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.add("attempt", attempt=1)
    with open(history.path, "a") as file:
        file.write('{"event": "end", "att')
    assert [event["event"] for event in history.events()] == ["attempt"]
    history.add("end", attempt=1)
    assert [event["event"] for event in History(tmp_path).events()] == ["attempt", "end"]
    history.path.write_bytes(b'\xff\x00{"event"\n5\n' + history.path.read_bytes())
    assert [event["event"] for event in History(tmp_path).events()] == ["attempt", "end"]


def test_a_history_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot read .*history.jsonl: Not a directory; correct the path"):
        screen(tmp_path / "file")


def test_a_main_log_on_a_full_disk(tmp_path: Path) -> None:
    """The run goes on, though more is printed than a pipe holds."""
    run = Supervised(tmp_path, [{"print": 4000, "steps": 4, "save": 4, "end": "finished"}])
    with open("/dev/full", "w") as full:
        assert run.start(stdout=full).wait(60) == 0
    assert [end["kind"] for end in run.ends] == ["finished"]


def test_a_history_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full takes nothing; when there is room again nothing is missing."""
    history = History(tmp_path)
    history.add("attempt", attempt=1)
    path = history.path
    monkeypatch.setattr(history, "path", Path("/dev/full"))
    history.add("end", attempt=1)
    monkeypatch.setattr(history, "path", path)
    assert [event["event"] for event in history.events()] == ["attempt", "end"]
    history.add("attempt", attempt=2)
    assert [event["event"] for event in History(tmp_path).events()] == ["attempt", "end", "attempt"]


def test_progress_is_read_back(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    progress = ProgressFile(tmp_path, 1_000_000)
    progress.step(1_000_001)
    found = read_progress(tmp_path)
    assert (found.started_at, found.step) == (1_000_000, 1_000_001)
    assert found.first_time <= found.time


RUN = ["run", "--", "torchrun", "-m", "megagate.pretrain"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "does not start the trainer: it must end with -m megagate.pretrain FLAGS"),
        (["run", "--", "torchrun", "-m", "megagate.pretrain"], "needs --save"),
        (["status", "nowhere"], "nowhere has no history of a supervised run"),
        (["run", "--backoff", "1"], "--backoff"),
        (["run", "--same-step", "0"], "argument --same-step: must be at least 1, not 0"),
        (["run", "--hang-after", "nan"], "argument --hang-after: must be at least 1, not nan"),
        (["run", "--back-off", "soon"], "argument --back-off: invalid number value: 'soon'"),
        (
            [*RUN, "--save", "s", "--finetune"],
            "--finetune would hold at each restart of a supervised run: leave it out",
        ),
        ([*RUN, "--save", "s", "--ckpt-step=5"], "write that step into latest_checkpointed_iteration.txt"),
        ([*RUN, "--recipe", "nowhere.yaml"], "nowhere.yaml"),
        (["run", "--preflight-flags", "--slow 'x", *RUN[1:]], "No closing quotation; correct the quotes"),
        (["run", "--preflight-flags", "--slow-facto=3 --x 1", *RUN[1:], "--save", "s"], "--x is no flag"),
    ],
)
def test_refused(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megagate.supervise import __main__ as command

    monkeypatch.setattr(sys, "argv", ["megagate.supervise", *words])
    with pytest.raises(UserError, match=message):
        command.main()


def test_flags_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words as a shell takes them; what is typed wins."""
    from megagate.supervise import __main__ as command

    seen = []
    monkeypatch.setattr(command, "Supervisor", lambda *arguments: seen.append(arguments) or sys.exit(0))
    words = "--hang-after 60 --same-step 5 --preflight on --preflight-flags '--slow-factor 3 --min-disk 2'"
    monkeypatch.setenv("MEGAGATE_SUPERVISOR", words)
    monkeypatch.setattr(sys, "argv", ["megagate.supervise", "run", "--same-step", "7", *RUN[1:], "--save", "s"])
    with pytest.raises(SystemExit):
        command.main()
    _, save, settings = seen[0]
    assert (save, settings.hang_after, settings.policy.same_step) == (Path("s"), 60, 7)
    assert settings.preflight == ("--slow-factor", "3", "--min-disk", "2")


def test_what_a_first_start_loads(tmp_path: Path) -> None:
    """Where the recipe or the command line names it, that; later starts load the run's own."""
    (tmp_path / "plain.yaml").write_text("lr: 1")
    (tmp_path / "loads.yaml").write_text("load: /base")
    own = ["--load", str(tmp_path / "save"), "--allow-fresh-start"]
    for recipe, flags, expected in (
        ("plain.yaml", [], own),
        ("loads.yaml", [], []),
        ("plain.yaml", ["--load=/base"], []),
    ):
        command = ["torchrun", "-m", "megagate.pretrain", "--recipe", str(tmp_path / recipe), *flags]
        supervisor = Supervisor(command, tmp_path / "save", Settings(Policy(), 1, 1, 1))
        assert supervisor._trainer() == [*command, *expected]
    (tmp_path / "save" / "iter_0000001").mkdir(parents=True)
    assert supervisor._trainer() == [*command, *own]


def test_going_back_without_torch(tmp_path: Path) -> None:
    """As the supervisor of a container may have to: nothing that it needs imports torch."""
    for step in (10, 20):
        (tmp_path / f"iter_{step:07d}").mkdir()
        (tmp_path / f"iter_{step:07d}" / ".metadata").write_text("")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    code = """
import sys
from pathlib import Path
sys.modules["torch"] = None
from megagate.supervise import __main__, checkpoints
print(checkpoints.go_back(Path(sys.argv[1])))
"""
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr) == ("10\n", "")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert [path.name[:12] for path in (tmp_path / "rolled_back").iterdir()] == ["iter_0000020"]
    assert not (tmp_path / "iter_0000020").exists()
