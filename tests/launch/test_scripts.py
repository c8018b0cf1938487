"""The shell scripts and what launch/submit.py makes of them, without a cluster."""

import importlib.util
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megagate.errors import run_command
from megagate.pretrain import slurm
from megagate.supervise.slurm import parse_limit
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


@pytest.fixture
def submit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Run launch/submit.py with words; return its status, output and errors."""
    spec = importlib.util.spec_from_file_location("submit", ROOT / "launch" / "submit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["launch/submit.py", *words])
        with pytest.raises(SystemExit) as ending:
            run_command(module.main)
        return ending.value.code, *capsys.readouterr()

    return run


def test_shipped_scripts() -> None:
    assert len(SCRIPTS) == 9
    check_shell(*SCRIPTS)


def test_a_single_process_has_the_environment_of_ranks(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "words: $*"\nenv\n')
    python.chmod(0o755)
    own = {"PATH": os.environ["PATH"], "MEGAGATE_PYTHON": str(python), "NCCL_DEBUG": "INFO"}

    def run(name: str, environment: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(ROOT / "launch" / name), "a b", "c"]
        variables = own | {"MEGAGATE_ENV": environment}
        return subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)

    ranks, single = (run(name, "h100_infiniband").stdout.splitlines() for name in ("node.sh", "process.sh"))
    assert single[0] == "words: a b c"
    assert {"NCCL_IB_HCA=mlx5", "CUDA_DEVICE_MAX_CONNECTIONS=1", "NCCL_DEBUG=INFO", f"PYTHONPATH={ROOT}"} <= set(single)
    assert sorted(single[1:]) == sorted(ranks[1:])
    for name in ("node.sh", "process.sh"):
        refused = run(name, "nowhere")
        assert refused.returncode == 2 and refused.stderr.startswith("error: there is no "), refused.stderr


@pytest.mark.parametrize(
    "options",
    [
        "--nodes 2 --gpus-per-node 0",
        "--nodes 64 --env h100_infiniband --partition gpu --account me --qos high --sbatch=--reservation=x",
        "--nodes 2 --container /images/a.sqsh --mounts /data,/home",
        "--nodes 2 --container a.sif --container-runtime apptainer",
    ],
)
def test_the_script_for_a_recipe(options: str, tmp_path: Path, submit: Callable[..., tuple[int, str, str]]) -> None:
    recipe_path = str(ROOT / "examples" / "quickstart" / "recipe.yaml")
    status, text, errors = submit(recipe_path, *options.split(), "--dry-run", "--", "--data-path", "a b'c")
    assert (status, errors) == (0, "")
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    check_shell(script)
    given = dict(re.findall(r"^#SBATCH (--[\w-]+)=?(.*)$", text, flags=re.MULTILINE))
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
            f'sbatch() {{ :; }}; {re.search("^set -- .*$", text, flags=re.MULTILINE)[0]}; printf "%s\\n" "$@"',
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
        (
            ["tiny.yaml", "--nodes", "2", "--env", "h100"],
            r"^error: launch/env has no h100.sh: --env takes b200, cpu,",
        ),
        (["tiny.yaml", "--nods", "2"], r"^error: "),
        (
            ["tiny.yaml", "--nodes", "2", "--ranks-per-node", "0"],
            r"^error: --ranks-per-node must be at least 1, not 0$",
        ),
        (["tiny.yaml", "--nodes", "2", "--time", "4h"], r"^error: --time 4h is no time limit: write minutes, hours:"),
        (["tiny.yaml", "--nodes", "2", "--time", "5"], r"^error: --warn 600 leaves nothing of --time 5 \(300 s\)"),
        (
            ["tiny.yaml", "--nodes", "2", "--supervisor", "--hang-afer 9"],
            r"^error: --hang-afer is no flag$",
        ),
        (["tiny.yaml", "--nodes", "2", "--sbatch=-p gpu"], r"^error: --sbatch=-p gpu: write a long option of sbatch"),
        (["tiny.yaml", "--nodes", "2", "--name", "a\nb"], r"^error: the value of --job-name for sbatch, 'a\\nb', has"),
        (["tiny.yaml", "--nodes", "2", "--", "--finetune"], r"^error: --finetune would hold at each restart"),
        (["tiny.yaml", "--nodes", "2"], r"^error: there is no sbatch here"),
    ],
)
def test_refused_in_one_sentence(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    submit: Callable[..., tuple[int, str, str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe(TINY) | {"save": str(tmp_path / "save")}))
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, errors = submit(*words)
    assert status == 2
    assert re.search(message, errors), errors
    assert len(errors.splitlines()) == 1, errors
    assert not (tmp_path / "save").exists()


def test_names_that_shells_take_apart(tmp_path: Path, submit: Callable[..., tuple[int, str, str]]) -> None:
    """tests/launch/test_steps.py has a real Slurm read them."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe(TINY)))
    save = tmp_path / "it's 100% mine"
    words = ["--nodes", "1", "--name", "my run", "--sbatch=--comment two words", "--sbatch=--time=7"]
    status, text, _ = submit(str(tmp_path / "tiny.yaml"), *words, "--dry-run", "--", "--save", str(save))
    assert status == 0
    quoted = shlex.quote(str(save / "main.log").replace("%", "%%"))
    assert f"#SBATCH --output={quoted}\n" in text
    assert "#SBATCH --job-name='my run'\n" in text
    assert "#SBATCH --comment='two words'\n" in text
    assert re.findall("^#SBATCH --time.*", text, flags=re.MULTILINE) == ["#SBATCH --time=7"]


STUB = """#!/bin/bash
for word in "$MEGAGATE_PYTHON" "$MASTER_ADDR" "$@"; do printf '%s\\n' "$word"; done
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", []),
        (
            "--container /images/a.sqsh --mounts /data,/home:/h",
            [
                "--container-image=/images/a.sqsh",
                "--no-container-mount-home",
                "--container-mounts={root}:{root},/data:/data,/home:/h,{save}:{save},{recipe}:{recipe}",
                "--container-workdir={root}",
            ],
        ),
        (
            "--container a.sif --container-runtime apptainer",
            ["apptainer", "exec", "--nv", "--bind", "{root},{save},{recipe}", "--pwd", "{root}", "a.sif"],
        ),
    ],
)
def test_the_command_of_the_ranks(
    options: str, expected: list[str], tmp_path: Path, submit: Callable[..., tuple[int, str, str]]
) -> None:
    """What the script starts, with stand-ins for Slurm, which does not know the node, and for the interpreter."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "tiny.yaml").write_text(yaml.safe_dump(recipe(TINY)))
    save = tmp_path / "my save"
    path = str(tmp_path / "recipe" / "tiny.yaml")
    status, text, errors = submit(path, "--nodes", "2", *options.split(), "--dry-run", "--", "--save", str(save))
    assert (status, errors) == (0, "")
    (tmp_path / "job").write_text(text)
    for name, stub in (("python", STUB), ("scontrol", "#!/bin/bash\n[ $2 = hostnames ] && echo gpu7\n")):
        (tmp_path / name).write_text(stub)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MEGAGATE_HOST_PYTHON": str(tmp_path / "python")}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(["bash", tmp_path / "job"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    python, address, *words = done.stdout.splitlines()
    assert python == ("python" if options else str(ROOT / ".venv" / "bin" / "python"))
    assert address == "gpu7"
    places = {"root": ROOT, "save": save, "recipe": tmp_path / "recipe"}
    started = words[words.index("--mem=0") + 1 : words.index("bash")]
    assert started == [word.format(**places) for word in expected]
    assert words[-2:] == ["--save", str(save)]


def test_help() -> None:
    words = [sys.executable, str(ROOT / "launch" / "submit.py"), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--dry-run" in done.stdout


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("01:30:30", 5430),
        ("1-2", 93600),
        ("1-2:3", 93780),
        ("1-02:03:04", 93784),
        ("UNLIMITED", math.inf),
        ("0", math.inf),
        ("4h", None),
        ("1:2:3:4", None),
        ("-5", None),
        ("", None),
    ],
)
def test_time_limits_as_sbatch_takes_them(text: str, seconds: float | None) -> None:
    assert parse_limit(text) == seconds


def test_counts_in_short_form() -> None:
    assert slurm.expand("2(x3),1") == [2, 2, 2, 1]
    assert slurm.expand("8") == [8]
    assert slurm.expand("") == []
