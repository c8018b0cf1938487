"""The demo's short form from end to end, as a user runs it, and that running it again repeats nothing."""

import json
import re
import subprocess
import sys

import pytest

from tests.distributed import ROOT

RUN = [sys.executable, str(ROOT / "examples" / "quickstart" / "run.py")]
MODELS = ("gated", "baseline")
pytestmark = pytest.mark.timeout(900)  # three trainings' worth of imports, on a machine that does other things too


def demo(output, *words):
    command = [*RUN, "--output", str(output), *words]
    return subprocess.run(command, cwd=output.parent, capture_output=True, text=True, timeout=800, check=False)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The finished demo: its folder and what it printed."""
    output = tmp_path_factory.mktemp("demo") / "quickstart"
    finished = demo(output, "--short")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert not finished.stderr
    return output, finished.stdout


def table_of(text):
    """Return the table's rows: first word of the model's name -> cells."""
    lines = text.split("\n\n")[1].splitlines()
    assert re.split(r"  +", lines[0])[:3] == ["model", "held-out loss", "perplexity"]
    return {row[0].split(" ")[0]: row for row in (re.split(r"  +", line) for line in lines[2:])}


def test_the_table_says_what_the_evaluations_found(short):
    output, text = short
    rows = table_of(text)
    assert list(rows) == ["gated", "baseline", "unigram"]
    for name in MODELS:
        report = json.loads((output / f"{name}.json").read_text())
        scores = " ".join(f"{layer['score']:.3f}" for layer in report["gate_scores"]) or "-"
        parameters = report["parameters"]
        assert rows[name][1:4] == [f"{report['loss']:.3f}", f"{report['perplexity']:.1f}", scores]
        assert rows[name][5:] == [f"{parameters['total']:,}", f"{parameters['active']:,}"]
        assert float(rows[name][4]) > 0
        assert report["perplexity"] < float(rows["unigram"][2]), "it has learned more than how frequent tokens are"
        assert parameters["active"] < parameters["total"]
        held_out = (output / "corpus" / "held_out.jsonl").read_text().splitlines()
        assert report["bytes"] == sum(len(json.loads(line)["text"].encode()) for line in held_out)
    assert len(json.loads((output / "gated.json").read_text())["gate_scores"]) == 2


def test_no_file_is_in_both_parts(short):
    output, _ = short
    parts = [
        {json.loads(line)["path"] for line in (output / "corpus" / name).read_text().splitlines()}
        for name in ("train.jsonl", "held_out.jsonl")
    ]
    assert all(parts)
    assert not parts[0] & parts[1]


def test_everything_it_names_is_there(short):
    output, text = short
    for name in MODELS:
        assert (output / name / "latest_checkpointed_iteration.txt").read_text() == "40"
        assert list((output / name / "tensorboard").glob("events.out.tfevents.*"))
        assert (output / name / "logs" / "rank_1.log").stat().st_size
        log = (output / "logs" / f"train_{name}.log").read_text()
        assert log.startswith("$ ")
        assert "megagate.pretrain" in log.splitlines()[0]
        assert len(re.findall(r"iteration +\d+ of 40   loss [\d.]+ +\d+ tokens/s", text)) == 2 * 5
    assert "quickstart/logs" in text
    assert not list(output.parent.glob("runs"))


def test_the_picture_shows_two_curves(short):
    pytest.importorskip("matplotlib")
    from matplotlib import image

    output, _ = short
    pixels = image.imread(output / "loss.png")[..., :3]
    assert min(pixels.shape[:2]) > 300
    coloured = pixels[pixels.max(axis=-1) - pixels.min(axis=-1) > 0.3]
    blue, orange = (coloured[:, 2] > coloured[:, 0]).sum(), (coloured[:, 0] > coloured[:, 2]).sum()
    assert blue > 200
    assert orange > 200


def test_the_second_run_reuses_everything(short):
    output, text = short
    finished = demo(output, "--short")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count(": reused") == 8
    assert table_of(finished.stdout) == table_of(text)


def test_an_output_that_cannot_be_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    finished = demo(tmp_path / "file", "--short")
    assert finished.returncode == 2
    assert re.fullmatch(r"error: --output .*file cannot be used: .*\n", finished.stderr)
