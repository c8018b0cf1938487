"""The long-context example's short form from end to end, as a user runs it."""

import re
import subprocess
import sys

import pytest

from tests.distributed import ROOT

RUN = [sys.executable, str(ROOT / "examples" / "long_context" / "run.py")]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_table_has_both_models_in_all_rows(tmp_path):
    command = [*RUN, "--short", "--output", str(tmp_path / "long_context")]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1700, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = finished.stdout.split("\n\n")[1].splitlines()
    assert lines[0].split() == ["perplexity", "gated", "baseline"]
    rows = {row[0]: [float(cell) for cell in row[1:]] for row in (re.split(r"  +", line) for line in lines[1:])}
    assert len(rows) == 5
    assert all(1 < value < 512 for row in rows.values() for value in row), "less than a vocabulary of equals"


def test_an_output_that_cannot_be_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    command = [*RUN, "--short", "--output", str(tmp_path / "file")]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert finished.returncode == 2
    assert re.fullmatch(r"error: --output .*file cannot be used: .*\n", finished.stderr)
