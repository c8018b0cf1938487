"""Each replacement of the CPU platform is still needed: without it, Megatron's training loop fails here.

All run the same two steps of the same model, on one rank where that reaches the patched place; with all patches they
succeed on each of these layouts. A patch whose probe passes without it has become superfluous and goes.
"""

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from megagate.model.backends import torch_backend
from megagate.platform import cpu, on_cpu
from tests.distributed import run_distributed
from tests.training import TINY

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform is active only without CUDA")

DELTA_NET = (
    "--gate-preset sdpa-headwise --experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"
)
TENSOR2 = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = {
    "one rank": (1, ""),
    "tensor 2": (2, TENSOR2),
    "expert 2": (2, "--expert-model-parallel-size 2"),
    "all": (4, f"{TENSOR2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 2"),
}
"""Name -> (ranks, flags)."""
ELSEWHERE = {
    "all_to_all_splits": "expert 2",
    "uneven_gather": "all",
    "properties_and_memory": "tensor 2",
    "tp_comm_overlap": "tensor 2",
}
"""A patch or an argument that is needed only on some layout -> which; the others are needed on one rank already."""


def train(
    layout: str, without: contextlib.AbstractContextManager[None] | None = None, flags: Sequence[str] = ()
) -> None:
    from megagate.pretrain.arguments import parse
    from megagate.pretrain.train import train

    cpu.activate_training()
    with without or contextlib.nullcontext():
        train(parse([*TINY, *DELTA_NET.split(), *LAYOUTS[layout][1].split(), *flags]))


def train_without_patch(layout: str, name: str) -> None:
    train(layout, cpu.without(name))


def train_without_argument(layout: str, name: str) -> None:
    table = cpu.ARGUMENTS if name in cpu.ARGUMENTS else torch_backend.ARGUMENTS
    rest = {key: value for key, value in table.items() if key != name}
    train(layout, mock.patch.dict(table, rest, clear=True), GPU_FLAGS[name])


GPU_FLAGS = {
    "apply_rope_fusion": [],  # Megatron's default
    "moe_grouped_gemm": ["--moe-grouped-gemm"],
    "moe_permute_fusion": ["--moe-permute-fusion"],
    "moe_router_fusion": ["--moe-router-fusion"],
    "cross_entropy_loss_fusion": ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"],
    "tp_comm_overlap": ["--tp-comm-overlap"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_works_with_all_patches(layout: str) -> None:
    run_distributed(train, LAYOUTS[layout][0], layout, timeout=90)


@pytest.mark.parametrize("patch", cpu.TORCH_PATCHES + cpu.TRAINING_PATCHES, ids=lambda patch: patch.name)
def test_patch_is_needed(patch: cpu.Patch) -> None:
    layout = ELSEWHERE.get(patch.name, "one rank")
    with pytest.raises(Exception) as failure:
        run_distributed(train_without_patch, LAYOUTS[layout][0], layout, patch.name, timeout=90)
    assert "Timeout" not in type(failure.value).__name__


@pytest.mark.parametrize("name", GPU_FLAGS)
def test_argument_is_needed(name: str) -> None:
    layout = ELSEWHERE.get(name, "one rank")
    with pytest.raises(Exception) as failure:
        run_distributed(train_without_argument, LAYOUTS[layout][0], layout, name, timeout=90)
    assert "Timeout" not in type(failure.value).__name__


def test_a_recipe_for_gpus_runs_here() -> None:
    flags = [flag for flags in GPU_FLAGS.values() for flag in flags]
    run_distributed(train, 2, "tensor 2", None, flags, timeout=90)


def test_every_argument_has_a_probe() -> None:
    elsewhere = {
        "distributed_backend",
        "use_cpu_initialization",
    }  # NCCL needs a GPU; tests/model/test_initialization.py
    assert set(cpu.ARGUMENTS) | set(torch_backend.ARGUMENTS) == set(GPU_FLAGS) | elsewhere


def test_patches_say_why() -> None:
    names = [patch.name for patch in cpu.TORCH_PATCHES + cpu.TRAINING_PATCHES]
    assert len(set(names)) == len(names)
    assert all(len(patch.reason) > 30 for patch in cpu.TORCH_PATCHES + cpu.TRAINING_PATCHES)
    assert on_cpu()


def test_device_keyword_means_the_cpu() -> None:
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.tensor([1.0], device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.ones(2).to("cuda").device.type == "cpu"
    assert torch.ones(2).to(device="cuda", dtype=torch.float64).dtype == torch.float64
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
    assert torch.empty(2, device="meta").device.type == "meta"


def test_memory_counters_tell_of_the_process() -> None:
    before = torch.cuda.memory_allocated()
    ballast = torch.ones(16 << 20, dtype=torch.float32)
    assert torch.cuda.memory_allocated() - before > 32 << 20
    assert torch.cuda.max_memory_allocated() >= ballast.numel() * 4


def run_python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, [*path, Path.cwd()])), CUDA_VISIBLE_DEVICES="")
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_transformer_engine_without_a_gpu_is_hidden(tmp_path: Path) -> None:
    """An installed Transformer Engine that cannot find the driver raises OSError, which Megatron does not expect."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text('raise OSError("libcuda.so.1: cannot open shared object file")\n')
    bare = run_python("import megatron.core", tmp_path)
    assert bare.returncode != 0
    assert "libcuda.so.1" in bare.stderr
    hidden = run_python(
        "import megagate.platform; import megatron.core, megatron.training; print('imported')", tmp_path
    )
    assert hidden.stdout.strip() == "imported", hidden.stderr


def test_importing_megatron_first() -> None:
    """It is refused, and would let Megatron compile."""
    result = run_python(
        """
        import torch
        import megatron.core.jit
        print(megatron.core.jit.jit_fuser is torch.compile)
        import megagate.platform
        """
    )
    assert result.stdout.strip() == "True", result.stderr
    assert "import megagate.platform before megatron" in result.stderr
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"


def test_announcement_is_one_line_on_the_first_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    cpu.announce()
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    cpu.announce()
    assert capsys.readouterr().out == ""
