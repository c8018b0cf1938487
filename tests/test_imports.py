"""Every module imports on a bare machine, and every tool answers ``--help``.

Bare means no GPU and none of the optional packages. One fresh process imports all modules, since each would spend its
time on torch and Megatron alone.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.distributed import ROOT

OPTIONAL_PACKAGES = (
    "apex",
    "fla",
    "flash_attn",
    "lm_eval",
    "matplotlib",
    "transformer_engine",
    "transformers",
    "wandb",
)
BARE_MACHINE = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
TOOLS = sorted(path for path in (ROOT / "tools").glob("*.py") if path.name != "__init__.py")

# Prints the imported modules and, for those that failed, the traceback.
IMPORT_ALL = """
import importlib, json, pkgutil, sys, traceback

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import megagate

failures, names = {}, ["megagate"]
walk = pkgutil.walk_packages(megagate.__path__, "megagate.", onerror=lambda name: None)
for name in (module.name for module in walk):
    if name.endswith(".__main__"):
        continue
    names.append(name)
    try:
        importlib.import_module(name)
    except BaseException:
        failures[name] = traceback.format_exc()
print(json.dumps({"names": names, "failures": failures}))
"""


def test_every_module_imports_without_cuda_and_optional_packages(tmp_path):
    program = f"OPTIONAL = {OPTIONAL_PACKAGES!r}\n{IMPORT_ALL}"
    finished = run_bare([sys.executable, "-W", "ignore", "-c", program])
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout.splitlines()[-1])
    failures = [f"{name}:\n{trace}" for name, trace in report["failures"].items()]
    assert not failures, "\n".join(failures)
    exported = ROOT / "megagate" / "checkpoint" / "exported"  # copied beside weights, for transformers to import
    files = {path for path in (ROOT / "megagate").rglob("*.py") if path.name != "__main__.py"} - set(exported.iterdir())
    assert set(report["names"]) == {module_name(path) for path in files}, "a folder has modules but no __init__.py"


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.name)
def test_every_tool_answers_help(tool, tmp_path):
    finished = run_bare([sys.executable, str(tool), "--help"], cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "usage:" in finished.stdout.lower()
    assert "Traceback" not in finished.stderr
    assert not list(tmp_path.iterdir()), "--help writes nothing"


def run_bare(command, cwd=ROOT):
    environment = {**os.environ, **BARE_MACHINE}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=250, check=False)


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
