"""A step is done once, done again when what it depends on changes, and takes up what an interrupted one left."""

import importlib.util
import os
import re
import sys

import pytest

from megagate.errors import UserError
from tests.distributed import ROOT


@pytest.fixture(scope="module")
def steps():
    """The module of the demo, which is not part of a package."""
    specification = importlib.util.spec_from_file_location("steps", ROOT / "examples" / "quickstart" / "steps.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def append(path, text="x"):
    """Return a command that appends to a file, so that the file tells how often it ran."""
    return [sys.executable, "-c", f"open({str(path)!r}, 'a').write({text!r})"]


def test_a_step_is_done_again_only_when_something_changed(steps, tmp_path, capsys):
    result, source = tmp_path / "result", tmp_path / "source"

    def run(command, **arguments):
        steps.Steps(tmp_path / "demo", 1, **arguments).run(
            "one", "first step", command, inputs=[source], outputs=[result]
        )
        return result.read_text()

    source.write_text("1")
    assert run(append(result)) == "x"
    assert run(append(result)) == "x"
    assert capsys.readouterr().out.splitlines()[1] == "[1/1] first step: reused"
    source.write_text("2")
    assert run(append(result)) == "xx"
    assert run(append(result, "y")) == "xxy"
    result.unlink()
    assert run(append(result, "y")) == "y"
    assert run(append(result, "y"), fresh=True) == "yy"
    assert re.fullmatch(r"\[1/1\] first step: [\d.]+ s", capsys.readouterr().out.splitlines()[-1])


def test_the_place_of_the_folder_does_not_matter(steps, tmp_path, monkeypatch):
    for folder in ("here", "there"):
        monkeypatch.chdir(tmp_path)
        output = tmp_path / folder
        command = append(steps.shown(output / "result"))
        steps.Steps(output, 1).run("one", "first", command, outputs=[output / "result"])
    stamps = [(tmp_path / folder / "stamps" / "one.json").read_text() for folder in ("here", "there")]
    assert stamps[0].split(",")[0] == stamps[1].split(",")[0]


def test_a_failing_command_names_its_log_and_is_tried_again_with_what_it_left(steps, tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "of another step").touch()
    part = folder / "part"
    # Fails at first, after it has left a part of its work; succeeds when it finds that part.
    program = (
        "import os, sys; print('why it fails'); found = os.path.exists(sys.argv[1]); "
        "os.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True); open(sys.argv[1], 'a').close(); sys.exit(not found)"
    )
    command = [sys.executable, "-c", program, str(part)]

    def run(*more):
        runner = steps.Steps(tmp_path / "demo", 1)
        runner.run("one", "first", [*command, *more], outputs=[part], folder=folder)

    with pytest.raises(UserError, match=r"step 'one' failed with exit status 1: its log .*demo/logs/one.log says why"):
        run()
    assert "why it fails" in (tmp_path / "demo" / "logs" / "one.log").read_text()
    assert os.listdir(folder) == ["part"], "what was there before belonged to something else"
    run()
    with pytest.raises(UserError, match="failed"):
        run("another command, which starts from nothing")
    capsys.readouterr()


def test_a_step_must_leave_what_it_promises(steps, tmp_path, capsys):
    with pytest.raises(UserError, match=r"the step 'one' left no .*missing; its log is .*one.log"):
        steps.Steps(tmp_path, 1).run("one", "first", [sys.executable, "-c", ""], outputs=[tmp_path / "missing"])


def test_lines_of_megatron_are_shortened(steps):
    report = steps.training_report(tokens_per_iteration=2048)
    line = (
        "[2030-01-01 00:00:00] iteration       20/     300 | consumed samples:          160 | "
        "elapsed time per iteration (ms): 512.0 | lm loss: 6.500000E+00 | grad norm: 1.0 |"
    )
    assert report(line) == "iteration   20 of 300   loss 6.500     4000 tokens/s"
    assert report("megagate: gate baseline, layers *E\n") == "megagate: gate baseline, layers *E"
    assert report("anything else") is None
