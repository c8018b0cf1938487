"""The README's commands work: those for one process are run, those for several are checked for their world size."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from megagate.pretrain.arguments import read

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOT_RUN = ("source", "tensorboard")  # a shell's own state; a server


def commands() -> list[list[str]]:
    """Return the commands in the README's bash blocks, split into words."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if line and line[0] not in NOT_RUN]


def test_commands_for_one_process(tmp_path: Path) -> None:
    """All of them in order, on a small text and with few iterations."""
    text = tmp_path / "my_text"
    text.mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    for source in sorted(library.glob("*.py"))[:60]:
        beginning = source.read_text(encoding="utf-8")[:3000]
        (text / source.with_suffix(".txt").name).write_text(beginning, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    ran = 0
    for words in commands():
        if words[0] != "python":
            continue
        shortened = [{"200": "3", "100": "2", "4096": "1024"}.get(word, word) for word in words[1:]]
        if "megagate.pretrain" in words:
            shortened += ["--lr-warmup-iters", "1"]
        result = subprocess.run(
            [sys.executable, *shortened],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert result.returncode == 0, (words, result.stdout, result.stderr)
        ran += 1
    assert ran == 4
    assert (tmp_path / "runs/mine/checkpoints/latest_checkpointed_iteration.txt").read_text().strip() == "3"


def test_commands_for_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = [words for words in commands() if words[0] == "torchrun"]
    assert launched
    monkeypatch.chdir(ROOT)
    for words in launched:
        ranks = words[words.index("--nproc-per-node") + 1]
        monkeypatch.setenv("WORLD_SIZE", ranks)
        module = words.index("-m")
        assert words[module + 1] == "megagate.pretrain"
        read(words[module + 2 :])


def test_files_that_it_names_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
    for module in re.findall(r"`(megagate/[\w/.]+|docs/)`", README):
        assert (ROOT / module).exists(), module


def test_every_flag_that_it_names_exists() -> None:
    from megagate.pretrain.arguments import build_parser

    known = set(build_parser()[0]._option_string_actions)
    outside = re.sub(r"```bash\n.*?```", "", README, flags=re.DOTALL)
    for flag in re.findall(r"`(--[a-z-]+)", outside):
        assert flag in known, flag
