"""tools/gpu_check.py runs on a CPU as it will on a GPU; what needs one is left out with a reason."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megagate.gpu_check.command import PARTS, watch
from megagate.gpu_check.machine import Machine, describe, gpu_called, time_in_turn
from megagate.gpu_check.result import Outcome, Row, Skip, outcome_of, table
from tests import commands
from tests.distributed import ROOT

TOOL = ROOT / "tools" / "gpu_check.py"


def check(tmp_path: Path, *argv: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    result = commands.run(TOOL, [*argv, "--seconds", "0.5", "--json", "out.json"], directory=tmp_path)
    path = tmp_path / "out.json"
    return result, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def test_layers_of_every_preset(tmp_path: Path) -> None:
    result, found = check(tmp_path, "--parts", "presets", "--device", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    (part,) = found["parts"]
    assert part["status"] == "passed"
    assert len(part["rows"]) == 2 * 17
    assert all(0 < row["value"] <= row["limit"] for row in part["rows"])
    assert found["machine"]["device"] == "cpu"
    assert result.stdout.count("\n") == 2 + len(part["rows"])


def test_a_stack_of_the_15a2b_models_layers(tmp_path: Path) -> None:
    result, found = check(tmp_path, "--parts", "stack_15a2b", "--device", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {row["what"]: row["value"] for row in found["parts"][0]["rows"]}
    assert set(rows) == {"parameters", "step", "throughput", "model operations"}
    assert rows["throughput"] == pytest.approx(64 / rows["step"] * 1000)


def test_what_needs_a_gpu_is_left_out(tmp_path: Path) -> None:
    result, found = check(tmp_path, "--parts", "kernel_times", "--device", "cpu")
    assert result.returncode == 0
    assert found["parts"][0]["status"] == "skipped"
    assert "kernel_times  skipped in 0 s: it times CUDA kernels, and --device is cpu" in result.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--parts", "preset"], "--parts preset is not a part; did you mean presets?"),
        (["--device", "cuda"], "--device cuda, but torch finds no CUDA device"),
        (["--json", "missing/out.json"], "the folder of --json missing/out.json is not there"),
    ],
)
def test_refused(argv: list[str], message: str, tmp_path: Path) -> None:
    result, found = (
        check(tmp_path, *argv) if "--json" not in argv else (commands.run(TOOL, argv, directory=tmp_path), {})
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not found


def test_a_part_that_fails_keeps_what_it_has_found() -> None:
    def breaks():
        yield Row("first", 1.0, "s")
        raise RuntimeError("no more\nof it")

    outcome = outcome_of("part", breaks)
    assert (outcome.status, outcome.reason) == ("failed", "RuntimeError: no more of it")
    assert [row.what for row in outcome.rows] == ["first"]
    assert Outcome.from_dict(json.loads(json.dumps(outcome.as_dict()))) == outcome


@pytest.mark.parametrize(("value", "status"), [(1.0, "passed"), (1.1, "failed"), (math.nan, "failed")])
def test_limits(value: float, status: str) -> None:
    outcome = outcome_of("part", lambda: [Row("error", value, "relative", 1.0), Row("time", 5.0, "s")])
    assert outcome.status == status
    lines = list(table([outcome]))
    assert ("ABOVE 1" in lines[1]) == (status == "failed")
    assert lines[0].startswith(f"part  {status}")


def test_a_part_can_skip() -> None:
    def skips():
        raise Skip("there is none")

    outcome = outcome_of("part", skips)
    assert (outcome.status, outcome.reason) == ("skipped", "there is none")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (
            "import os, sys; print('CUDA error', file=sys.stderr, flush=True); os._exit(7)",
            "ended with status 7: CUDA e",
        ),
        ("import time; time.sleep(60)", "still running after 2 s"),
    ],
    ids=["dies", "hangs"],
)
def test_a_process_that_ends_badly_is_a_failure(program: str, reason: str, tmp_path: Path) -> None:
    outcome = watch("part", [sys.executable, "-S", "-c", program], tmp_path / "none.json", 2.0)
    assert outcome.status == "failed"
    assert outcome.reason.startswith(reason)


def test_a_process_that_does_not_end_after_its_part_is_believed(tmp_path: Path) -> None:
    part, path = Outcome("part", "passed", rows=[Row("error", 1.0, "relative", 2.0)]), tmp_path / "part.json"
    written = json.dumps({"parts": [part.as_dict()]})
    program = f"import pathlib, time; pathlib.Path({str(path)!r}).write_text({written!r}); time.sleep(60)"
    assert watch("part", [sys.executable, "-S", "-c", program], path, 5.0) == part


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_are_those_of_the_gpu(name: str, peak: float | None) -> None:
    """And of no other: a card for PCI Express has the name of the module, and is slower."""
    gpu = gpu_called(name)
    assert (gpu and gpu.bf16) == peak


def test_a_broken_package_does_not_cost_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "fused_weight_gradient_mlp_cuda":
                raise OSError("libcudart.so.99: cannot open shared object file")

    assert describe(is_cuda=False)["fused_weight_gradient_mlp_cuda"] == "missing"
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert describe(is_cuda=False)["fused_weight_gradient_mlp_cuda"] == "broken (OSError)"


def test_warming_up_takes_nothing_from_the_counted_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    naps, passed = iter([0.5, 0.5]), [0.0]

    def call() -> None:
        passed.append(passed[-1] + next(naps, 0.0))

    monkeypatch.setattr(time, "monotonic", lambda: passed[-1])
    times = time_in_turn({"call": call}, Machine(is_cuda=False, seconds=1), 0.5)
    assert len(times["call"]) == 50


@pytest.mark.full
@pytest.mark.timeout(900)
def test_all_parts(tmp_path: Path) -> None:
    result = commands.run(TOOL, ["--seconds", "1", "--json", "out.json"], directory=tmp_path, timeout=880)
    assert result.returncode == 0, result.stdout + result.stderr
    parts = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["parts"]
    assert [part["part"] for part in parts] == list(PARTS)
    assert {part["part"] for part in parts if part["status"] == "skipped"} == {"kernel_results", "kernel_times"}
