"""The fused gate: its kernels' results in Triton's interpreter, and the code that they become for a GPU.

Both need a process of their own: Triton decides when it is imported whether it interprets, and asks a driver for the
GPU when it compiles.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megagate.gate import GateConfig, fused
from tests.distributed import ROOT

HERE = Path(__file__).parent


def run(*command: str, **environment: str) -> str:
    finished = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.timeout(600)
def test_results_in_the_interpreter() -> None:
    """Runs the tests of all files called in_interpreter.py: of the kernels, of layers, and of the check for GPUs."""
    files = [str(ROOT / "tests" / folder / "in_interpreter.py") for folder in ("gate", "model", "gpu_check")]
    output = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, TRITON_INTERPRET="1")
    counts = re.search(r"^(\d+) passed", output.splitlines()[-1])
    assert counts, output
    assert int(counts[1]) >= 70
    assert "skipped" not in output.splitlines()[-1]


@pytest.mark.parametrize(
    "capability", [pytest.param(90, id="h100"), pytest.param(100, id="b200", marks=pytest.mark.full)]
)
def test_the_compiled_code_moves_16_bytes_at_a_time(capability: int, tmp_path: Path) -> None:
    """Also where the logits are rows among those of linear_qkv."""
    output = run(str(HERE / "compile_kernels.py"), str(capability), TRITON_CACHE_DIR=str(tmp_path))
    lines = [line.split() for line in output.splitlines()]
    assert len(lines) == 10
    for kernel, gate, *widths in lines:
        single = [width for width in widths if width not in ("ld.global.v4", "st.global.v4")]
        # One logit for each head lies apart from the next.
        assert not single or gate == "headwise", (kernel, gate, single)
        assert len(widths) >= 4


def test_without_a_gpu_it_is_not_used() -> None:
    assert not fused.is_available()


def test_a_sum_over_the_middle_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be broadcast"):
        fused.plan((2, 3, 4, 8), (2, 1, 4, 8), False, ((96, 32, 8, 1), (32, 32, 8, 1)))


@pytest.mark.parametrize(
    ("logits", "shared"),
    [((2, 1, 4, 8), False), ((3, 1, 4, 2), False), ((3, 1, 8), False), ((6, 1, 4, 8), False), ((3, 1, 1, 8), True)],
    ids=str,
)
def test_logits_of_another_size_are_refused(logits: tuple[int, ...], shared: bool) -> None:
    """They would be read from beyond their end."""
    with pytest.raises(ValueError, match="cannot be broadcast"):
        fused.plan((3, 1, 4, 8), logits, shared, ((32, 32, 8, 1), (1,) * len(logits)))


def test_floor_bytes_count_each_tensor_once() -> None:
    import torch

    y, logits, few = torch.zeros(3, 2, 4, 8, dtype=torch.bfloat16), torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 1)
    multiply, add = GateConfig(position="sdpa"), GateConfig(position="sdpa", combine="add")
    size = y.numel()
    assert fused.floor_bytes(y, logits.bfloat16(), multiply) == (3 * 2 * size, 5 * 2 * size)
    assert fused.floor_bytes(y, few.bfloat16(), multiply) == (2 * (2 * size + size // 8), 2 * (3 * size + size // 4))
    assert fused.floor_bytes(y, logits.bfloat16(), add) == (3 * 2 * size, 3 * 2 * size)
    identity = GateConfig(position="sdpa", combine="add", activation="identity")
    assert fused.floor_bytes(y, logits.bfloat16(), identity) == (3 * 2 * size, 0)


def test_what_it_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    y, logits = torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8)
    assert fused.supports(y, logits, GateConfig(position="sdpa"))
    assert not fused.supports(y.double(), logits, GateConfig(position="sdpa"))
    assert not fused.supports(y.to("meta"), logits, GateConfig(position="sdpa"))
    shared = GateConfig(position="sdpa", sharing="head-shared", input="constant")
    assert not fused.supports(y, logits[:1, :1], shared)
    experts = GateConfig(position="value", granularity="headwise", switch_head_experts=4, switch_head_top_k=2)
    assert not fused.supports(torch.zeros(3, 2, 4, 32), torch.zeros(3, 2, 4, 4), experts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not fused.supports(y, logits, GateConfig(position="sdpa"))  # on a machine with a GPU they lie elsewhere
