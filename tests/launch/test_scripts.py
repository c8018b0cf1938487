"""The shell scripts and what launch/submit.py makes of them, without a cluster."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megagate.pretrain import slurm
from tests.distributed import ROOT
from tests.launch.runs import recipe
from tests.training import TINY

SCRIPTS = sorted([*ROOT.glob("launch/**/*.sh"), *ROOT.glob("launch/**/*.sbatch")])


def check_shell(*paths: Path) -> None:
    """Have bash and shellcheck read scripts."""
    for path in paths:
        subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck") is None:
        assert os.environ.get("CI") != "true", "shellcheck not found: .ci/run installs it"
        pytest.skip("shellcheck not found: install it to run this test")
    checked = subprocess.run(
        ["shellcheck", "--external-sources", *paths], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def submit(*words: str, directory: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "launch" / "submit.py"), *words],
        cwd=directory,
        env=dict(os.environ, PATH="/usr/bin:/bin"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_shipped_scripts() -> None:
    assert len(SCRIPTS) == 6
    check_shell(*SCRIPTS)


@pytest.mark.parametrize(
    "options",
    [
        "--nodes 2 --gpus-per-node 0",
        "--nodes 64 --env h100_infiniband --partition gpu --account me --qos high --sbatch=--reservation=x",
        "--nodes 2 --container /images/a.sqsh --mounts /data,/home",
        "--nodes 2 --container a.sif --container-runtime apptainer",
    ],
)
def test_the_script_for_a_recipe(options: str, tmp_path: Path) -> None:
    done = submit("examples/quickstart/recipe.yaml", *options.split(), "--dry-run", "--", "--data-path", "a b'c")
    assert done.returncode == 0, done.stderr
    script = tmp_path / "job.sbatch"
    script.write_text(done.stdout)
    check_shell(script)
    given = dict(re.findall(r"^#SBATCH (--[\w-]+)=?(.*)$", done.stdout, flags=re.MULTILINE))
    assert {"--requeue", "--dependency", "--open-mode", "--signal", "--time"} <= set(given)
    assert given["--job-name"] == "quickstart"
    assert given["--nodes"] == options.split()[1]
    assert ("--gpus-per-node" in given) == ("--gpus-per-node 0" not in options)
    if "--partition" in options:
        assert (given["--partition"], given["--account"], given["--reservation"]) == ("gpu", "me", "x")
    words = subprocess.run(
        [
            "bash",
            "-c",
            f'sbatch() {{ :; }}; {re.search("^set -- .*$", done.stdout, flags=re.MULTILINE)[0]}; printf "%s\\n" "$@"',
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert words[words.index("--data-path") + 1] == "a b'c"
    assert words[words.index("--save") + 1] == str(ROOT / "runs" / "quickstart" / "checkpoints")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no.yaml", "--nodes", "2"], r"^error: cannot read the recipe no.yaml"),
        (["tiny.yaml", "--nodes", "0"], r"^error: --nodes must be at least 1, not 0$"),
        (["tiny.yaml", "--nodes", "2", "--env", "h100"], r"^error: launch/env has no h100.sh: --env takes cpu, gen"),
        (["tiny.yaml", "--nods", "2"], r"^error: "),
        (["tiny.yaml", "--nodes", "2"], r"^error: there is no sbatch here"),
    ],
)
def test_refused_in_one_sentence(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe(TINY) | {"save": str(tmp_path / "save")}))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "env").symlink_to("/usr/bin/env")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "submit.py"), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stdout
    assert re.search(message, done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_counts_in_short_form() -> None:
    assert slurm.expand("2(x3),1") == [2, 2, 2, 1]
    assert slurm.expand("8") == [8]
    assert slurm.expand("") == []
