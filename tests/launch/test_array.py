"""A grid as an array of Slurm jobs: the script that is submitted, and, on a real Slurm, that it is run and measured."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megagate.ablate import command
from megagate.ablate.grid import read_grid
from megagate.ablate.settings import works
from megagate.ablate.slurm import freeze, frozen
from megagate.errors import UserError
from tests.ablate.test_run import FLAGS, MODEL, STEPS
from tests.distributed import ROOT
from tests.evaluate.runs import random_documents, write_dataset
from tests.launch.cluster import Cluster, wait_for
from tests.launch.runs import recipe
from tests.launch.test_scripts import check_shell

PRESETS = ["baseline", "sdpa-elementwise"]


def write_grid(folder: Path) -> Path:
    """Write a grid of two cells of two ranks each, and its data."""
    data = {name: write_dataset(folder / name, random_documents([900, 300], seed)) for seed, name in enumerate("ab")}
    (folder / "base.yaml").write_text(yaml.safe_dump(recipe([*MODEL, *FLAGS]) | {"data-path": data["a"]}))
    grid = {
        "recipe": "base.yaml",
        "world-size": 2,
        "flags": {"micro-batch-size": 1},
        "axes": {"gate-preset": PRESETS},
        "evaluation": {"data-path": data["b"]},
    }
    (folder / "grid.yaml").write_text(yaml.safe_dump(grid))
    return folder / "grid.yaml"


@pytest.mark.parametrize(
    "options",
    ["--gpus-per-node 0 --ranks-per-node 1", "--gpus-per-node 2 --container /a.sqsh --qos high --at-a-time 1"],
)
def test_the_script(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = write_grid(tmp_path)
    words = [
        str(grid),
        "--output",
        str(tmp_path / "out"),
        "--slurm",
        "--dry-run",
        *options.split(),
        "--",
        "--lr",
        "a b",
    ]
    monkeypatch.setattr(sys, "argv", ["ablate.py", *words])
    assert command.main() == 0
    text = capsys.readouterr().out
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    check_shell(script)
    given = dict(re.findall(r"^#SBATCH (--[\w-]+)=?(.*)$", text, flags=re.MULTILINE))
    assert given["--array"] == ("0,1%1" if "--at-a-time" in options else "0,1")
    assert given["--nodes"] == ("2" if "--ranks-per-node 1" in options else "1")
    assert given["--job-name"] == "grid"
    assert "--dependency" not in given and {"--requeue", "--signal"} <= set(given)
    assert f"set -- --output {tmp_path / 'out'} -- --lr 'a b'\n" in text
    single = re.search(r"^ +single=\(srun [^)]*\)", text, flags=re.MULTILINE)
    assert single is not None and single[0].split()[-1] == '"$MEGAGATE_ROOT/launch/process.sh")'
    copy = Path(re.findall(r"^export MEGAGATE_GRID=(.*)$", text, flags=re.MULTILINE)[0])
    assert copy.parents[1] == tmp_path / "out" / "submitted" and copy.name == grid.name
    assert not (tmp_path / "out").exists()


def test_tasks_read_the_grid_as_it_was_submitted(tmp_path: Path) -> None:
    path, output = write_grid(tmp_path), tmp_path / "out"
    grid = read_grid(path)
    grid.evaluation["data-path"] = [str(tmp_path / "a"), str(tmp_path / "b")]  # as by --evaluate-on
    cells = works(grid, output, [])
    copy, texts = frozen(grid, output)
    assert not output.exists()
    freeze(copy, texts, cells, output, [])

    path.write_text(path.read_text().replace("baseline", "sdpa-headwise"))
    assert frozen(read_grid(path), output)[0] != copy
    (tmp_path / "base.yaml").unlink()
    read = works(read_grid(copy), output, [])
    assert [work.fingerprint for work in read] == [work.fingerprint for work in cells]
    assert [work.folder for work in read] == [work.folder for work in cells]


def test_a_grid_that_is_edited_while_it_is_submitted_is_refused(tmp_path: Path) -> None:
    path, output = write_grid(tmp_path), tmp_path / "out"
    cells = works(read_grid(path), output, [])
    path.write_text(path.read_text().replace("baseline", "sdpa-headwise"))
    copy, texts = frozen(read_grid(path), output)
    with pytest.raises(UserError, match=r"the grid grid.yaml or its recipe changed while it was being submitted"):
        freeze(copy, texts, cells, output, [])


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_an_array_on_slurm(cluster: Cluster, tmp_path: Path) -> None:
    grid = write_grid(tmp_path)
    words = [sys.executable, "tools/ablate.py", str(grid), "--output", str(tmp_path / "out")]
    slurm = [*words, "--slurm", "--gpus-per-node", "0", "--ranks-per-node", "1", "--python", sys.executable]
    slurm += ["--supervisor", "--preflight off"]
    environment = cluster.environment | {"PYTHONPATH": str(ROOT)}

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
        )

    submitted = run(slurm)
    assert submitted.returncode == 0, submitted.stderr
    before = grid.read_text()
    grid.write_text(before.replace("baseline", "sdpa-headwise"))  # the tasks do not care
    logs = [tmp_path / "out" / f"grid_{number}.log" for number in range(2)]

    def said() -> str:
        return "\n".join(log.read_text() for log in logs if log.exists())

    results = tmp_path / "out" / "cells"
    wait_for(lambda: len(list(results.glob("*/result.json"))) == 2, 1000, f"two results\n{said()}")
    for path in results.glob("*/result.json"):
        result = json.loads(path.read_text())
        assert result["iterations"] == STEPS
        assert result["perplexity"] > 1
    grid.write_text(before)
    table = run([*words, "--table"])
    assert table.returncode == 0, table.stderr
    assert all(preset in table.stdout for preset in PRESETS)
    assert run(slurm).stdout == "every cell is finished: there is nothing to submit\n"
