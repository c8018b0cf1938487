"""tools/report.py: the page says what the runs are, what they lack, and needs nothing but itself."""

import dataclasses
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megagate.errors import UserError
from megagate.gate import PRESETS
from megagate.report import figures
from megagate.report.command import PAGE, main
from megagate.report.runs import Run
from megagate.report.sections import FIGURES
from megagate.report.tables import gate_of
from tests.distributed import ROOT
from tests.report.runs import ARGUMENTS, BATCH, SEQUENCE, Writer, write_whole

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """What a browser would make of it: ids, links, tables by section, text, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.elements: list[str] = []
        self.rows: list[list[str]] = []
        self.text: dict[str, str] = {}
        self._section = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.elements.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if "id" in values:
            self.ids.append(values["id"])
        self.targets += [values[name] for name in ("src", "href", "xlink:href", "data", "srcset") if name in values]
        if tag == "section":
            self._section = values["id"]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text[self._section] = self.text.get(self._section, "") + data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def row(self, name):
        (row,) = [row[1:] for row in self.rows if row[0] == name]
        return row


def report(output: Path, *runs: Path | str) -> Page:
    assert main([*map(str, runs), "--output", str(output)]) == 0
    return Page((output / PAGE).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An ungated run with a loss spike, and a gated one, with everything that telemetry logs."""
    root = tmp_path_factory.mktemp("runs")
    write_whole(root / "baseline" / "tensorboard", 1, is_gated=False)
    write_whole(root / "gated" / "tensorboard", 2, is_gated=True, lr=0.002, data_path="['<a&b>']", save="x")
    return root / "baseline", root / "gated"


@pytest.fixture(scope="module")
def whole(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    """The page on both, and its folder."""
    output = tmp_path_factory.mktemp("report") / "new" / "folder"
    return output, report(output, *folders)


def test_every_figure_is_drawn(whole: tuple[Path, Page]) -> None:
    output, page = whole
    assert {path.name for path in output.iterdir()} == {PAGE, *(f"{name}.png" for name in FIGURES)}
    assert page.elements.count("svg") == page.elements.count("figcaption") == len(FIGURES)
    assert "None of these runs has logged" not in "".join(page.text.values())
    for path in output.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_tables_say_what_was_logged(whole: tuple[Path, Page]) -> None:
    _, page = whole
    assert page.row("gate") == ["baseline", "sdpa-headwise"]
    assert page.row("tokens") == [f"{120 * BATCH * SEQUENCE:,}"] * 2
    assert page.row("loss spikes") == ["1", "0"]
    assert page.row("restarts") == ["0", "0"]
    last = np.arange(30, 121, 10) / 120
    expected = [np.mean(top * last + 0.02) for top in (0.5, 0.05)]
    shares = [float(cell.split(" ")[0]) for cell in page.row("attention on the first token")]
    assert shares == pytest.approx(expected, rel=1e-2)
    assert page.row("mean gate score") == ["-", f"{np.mean(0.5 - 0.35 * last):.3f}"]
    assert [float(cell) for cell in page.row("largest activation")] == pytest.approx(
        [np.mean(10 + top * last) for top in (900, 80)], rel=1e-3
    )
    assert page.row("--lr") == ["0.001", "0.002"]
    assert page.row("--gate-preset") == ["baseline", "sdpa-headwise"]
    assert [row[0] for row in page.rows if row[0].startswith("--")] == [
        "--gate-preset",
        "--lr",
        "--seed",
        "--data-path",
    ]
    assert page.row("--data-path") == ["-", "['<a&b>']"]
    assert "1 arguments that some of the runs do not have" in page.text["configuration"]
    assert "Not logged by baseline." in page.text["gate"]
    assert "Not logged by" not in page.text["attention"]
    assert "more than 6 robust standard deviations" in page.text["loss"]


def test_the_page_needs_nothing_else(whole: tuple[Path, Page]) -> None:
    output, page = whole
    assert len(set(page.ids)) == len(page.ids)
    assert "script" not in page.elements
    inside = {target.removeprefix("#") for target in page.targets if target.startswith("#")}
    assert inside <= set(page.ids)
    outside = {target for target in page.targets if not target.startswith("#")}
    assert outside and all(target.startswith("data:image/png;base64,") for target in outside)
    text = (output / PAGE).read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"url\((?!#)|@import", text)
    assert "<title>Training report: baseline, gated</title>" in text
    assert str(output) not in text


def bare(directory: Path, values: np.ndarray) -> Path:
    """Write a run with nothing but a loss."""
    writer = Writer(directory, {})
    for step, value in enumerate(values, start=1):
        writer.scalar("lm loss", value, step)
    writer.close()
    return directory


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run = bare(tmp_path / "run", np.ones(20))
    for output in ("one", "two"):
        report(tmp_path / output, run)
    for name in (PAGE, "loss.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_each_validation_set_has_a_curve_and_a_row(tmp_path: Path) -> None:
    """A run has several named sets, or one without a name; perplexities, which Megatron can log too, are left out."""
    losses = {"validation-books": 3.0, "validation-books ppl": 20.0, "validation-code-2": 2.0}
    for name, logged in {"several": losses, "single": {"validation": 4.0}}.items():
        writer = Writer(tmp_path / name, ARGUMENTS)
        writer.steps("lm loss", np.ones(20))
        for tag, loss in logged.items():
            writer.both(f"lm loss {tag}", loss, 10, 10 * BATCH)
            writer.both(f"lm loss {tag}", loss - 1, 20, 20 * BATCH)
        writer.close()
    with mock.patch.object(figures, "curves", wraps=figures.curves) as drawn:
        page = report(tmp_path / "report", tmp_path / "several", tmp_path / "single")
    (panels,) = [call.args[0] for call in drawn.call_args_list if "validation" in call.args[0][0].title]
    found = {panel.title: {name: list(y) for name, (_, y) in panel.curves.items()} for panel in panels}
    assert found == {
        "validation loss of books (nats per token)": {"several": [3.0, 2.0]},
        "validation loss of code-2 (nats per token)": {"several": [2.0, 1.0]},
        "validation loss (nats per token)": {"single": [4.0, 3.0]},
    }
    assert page.row("best validation loss of books") == ["2.000 at iteration 20", "-"]
    assert page.row("best validation loss") == ["-", "3.000 at iteration 20"]
    assert not [row for row in page.rows if "ppl" in row[0]]


def test_missing_tags_are_said_and_old_figures_go(tmp_path: Path) -> None:
    output = tmp_path / "report"
    output.mkdir()
    for name in ("gate.png", "mine.png"):
        (output / name).write_bytes(b"old")
    page = report(output, f"<b>={bare(tmp_path / 'bare', np.insert(np.ones(29), 20, np.nan))}")
    assert {path.name for path in output.iterdir()} == {PAGE, "loss.png", "mine.png"}
    for section in ("gate", "attention", "activations", "experts", "throughput"):
        assert "None of these runs has logged:" in page.text[section]
    assert "Training loss" in page.text["loss"]
    assert page.row("loss spikes") == ["0; 1 values are not finite"]
    assert page.row("tokens") == ["-"]
    assert "<b>: the sequence length or the consumed samples are not recorded" in page.text["summary"]
    assert "The arguments of <b> are not recorded" in page.text["configuration"]
    assert "iterations" in (output / PAGE).read_text(encoding="utf-8").partition('id="loss"')[2]


def test_a_truncated_file_and_a_restart_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files: list[Path] = []
    for iteration in (0, 20):
        writer = Writer(tmp_path / "run", ARGUMENTS | {"lr": 1 + iteration}, iteration)
        writer.steps("lm loss", np.ones(30), first=iteration + 1)
        writer.close()
        files += set((tmp_path / "run").iterdir()) - set(files)
    newest = files[-1]
    newest.write_bytes(newest.read_bytes()[:-5])
    page = report(tmp_path / "report", tmp_path / "run")
    assert "bytes could be read" in page.text["summary"]
    assert "bytes could be read" in capsys.readouterr().err
    assert "10 points are left out" in page.text["summary"]
    assert page.row("--lr") == ["1, then 21"]
    assert page.row("restarts") == ["1"]


@pytest.mark.filterwarnings("error")
def test_odd_values_are_drawn(tmp_path: Path) -> None:
    """One step, values that are zero, negative or not finite, on every kind of axis."""
    for name, values in {"zero": [0.0, 0.0], "broken": [np.nan, np.inf], "negative": [-1.0], "none": []}.items():
        writer = Writer(tmp_path / name)
        writer.both("lm loss", 1.0, 1, BATCH)
        for step, value in enumerate(values, start=1):
            for tag in ("grad-norm", "activation/max", "activation/max/layer-07", "time/forward", "iteration-time"):
                writer.scalar(tag, value, step)
            writer.scalar("gate/head-mean/layer-02/head-00", value, step)
        writer.histogram("experts/tokens/layer-01", np.zeros(4), 1)
        writer.histogram("gate/scores/layer-01", np.array([-3.0, 7.0]), 1)
        writer.close()
    page = report(tmp_path / "report", *(tmp_path / name for name in ("zero", "broken", "negative", "none")))
    assert page.row("largest activation") == ["0", "-", "-1.000", "-"]
    assert page.row("7") == ["0", "inf", "-1.000"]
    assert "Histogram of loads by layer" in page.text["experts"]


def test_wrong_options(tmp_path: Path) -> None:
    run = bare(tmp_path / "run", np.ones(3))
    (tmp_path / "file").write_text("")
    for words, said in (
        (["--output", str(tmp_path / "file")], "is not a directory"),
        (["--output", str(tmp_path / "file" / "x")], "cannot write to --output .*: Not a directory"),
        (["--spike-deviations", "0"], "must be positive"),
        (["--spike-deviations", "nan"], "must be positive"),
    ):
        with pytest.raises(UserError, match=said):
            main([str(run), *words])
    assert {path.name for path in tmp_path.iterdir()} == {"file", "run"}
    (tmp_path / "out" / "loss.png").mkdir(parents=True)
    with pytest.raises(UserError, match=r"cannot write to --output .*: Is a directory"):
        main([str(run), "--output", str(tmp_path / "out")])
    assert not list((tmp_path / "out").glob("*.partial-*"))


def test_gates_are_named_from_the_arguments() -> None:
    """By their preset, however the flags were written; the texts are those of parsed flags."""
    for name, gate in PRESETS.items():
        axes = {f"gate_{axis}": value for axis, value in dataclasses.asdict(gate).items()}
        axes = {axis.replace("gate_sdpa", "sdpa"): str(value) for axis, value in axes.items()}
        axes["sdpa_output_norm"] = "True" if gate.sdpa_output_norm else "None"
        for arguments in ({"gate_preset": name}, axes, {"gate_preset": name, "gate_position": "None"}):
            run = Run("run", Path(), arguments={key: [value] for key, value in arguments.items()})
            assert gate_of(run) == name
    own = {"attention_output_gate": ["True"], "gate_preset": ["None"]}
    assert gate_of(Run("run", Path(), arguments=own)) == "sdpa-elementwise"
    assert gate_of(Run("run", Path(), arguments={"gate_preset": ["of-another-version"]})) == "of-another-version"
    assert gate_of(Run("run", Path())) == "-"


def test_the_command_without_matplotlib(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """One sentence, no traceback, nothing written."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['matplotlib'] = None\n")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    command = [sys.executable, str(ROOT / "tools" / "report.py"), str(folders[0]), "--output", str(tmp_path / "out")]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert finished.returncode == 2
    assert finished.stderr == "error: figures need matplotlib: pip install 'megagate[plot]'\n"
    assert not (tmp_path / "out").exists()
