"""The terminal shows progress; everything else, also what C++ code writes, is in the log file."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megagate.pretrain.output import SHOWN, Terminal

ITERATION = (
    " [2026-01-01 00:00:00.000000] iteration        1/      10 | consumed samples:            8 | lm loss: 5.55E+00 |"
)


@pytest.mark.parametrize(
    "line",
    [
        ITERATION,
        "megagate: gate sdpa-headwise, layers *E*E",
        " validation loss at iteration 10 on validation set | lm loss value: 4.9E+00 | lm loss PPL: 1.4E+02 | ",
        "saving checkpoint at iteration       4 to /x in torch_dist format",
        "  successfully saved checkpoint from iteration       4 to /x [ t 1/1, p 1/1 ]",
        " loading distributed checkpoint from /x at iteration 4",
        "[exiting program at iteration 4] datetime: 2026-01-01 00:00:00 ",
    ],
)
def test_shown(line: str) -> None:
    assert SHOWN.search(line)


@pytest.mark.parametrize(
    "line",
    [
        "  num_layers ...................................... 4",
        "> setting random seeds to 1234 ...",
        "time to initialize megatron (seconds): 0.3",
        "WARNING megatron.core.rerun_state_machine: Result validation enabled",
        "Evaluating iter 1/1",
        "  train_iters ..................................... 10",
    ],
)
def test_held_back(line: str) -> None:
    assert not SHOWN.search(line)


def test_lines_are_whole_before_they_are_judged() -> None:
    terminal = io.StringIO()
    stream = Terminal(terminal)
    print("mega", end="", file=stream)
    print("gate: ", "hello", sep="", file=stream)
    print("noise", file=stream)
    print(ITERATION, file=stream)
    assert terminal.getvalue() == f"megagate: hello\n{ITERATION.strip()}\n"
    assert stream.log.getvalue() == f"megagate: hello\nnoise\n{ITERATION}\n"  # type: ignore[attr-defined]


def test_log_has_everything_and_the_terminal_little(tmp_path: Path) -> None:
    code = """
import os, sys, warnings, logging
from pathlib import Path
from megagate.pretrain import output
stream = output.quiet()
print("early noise")
warnings.warn("a warning")
path = output.open_log(stream, Path(sys.argv[1]), 3)
print("megagate: progress")
logging.getLogger("x").warning("logged")
os.write(1, b"from C++\\n")
assert sys.stdout.isatty() is False
raise KeyError("a crash")
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHONPATH=str(Path.cwd())),
        timeout=60,
        check=False,
    )
    assert result.stdout == "megagate: progress\n"
    assert "KeyError: 'a crash'" in result.stderr
    log = (tmp_path / "rank_3.log").read_text()
    for text in ("early noise", "a warning", "megagate: progress", "WARNING x: logged", "from C++"):
        assert text in log


def test_a_log_on_a_full_disk() -> None:
    """Training goes on, and the terminal is told."""
    terminal = io.StringIO()
    stream = Terminal(terminal)
    with contextlib.suppress(OSError), open("/dev/full", "w", buffering=1) as full:
        stream.log = full
        print("megagate: hello", file=stream)
        stream.flush()
    assert terminal.getvalue() == "megagate: hello\n"
