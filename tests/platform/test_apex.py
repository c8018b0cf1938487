"""NVIDIA's Apex is recognised by what it has, in packages made here that have the right parts or the wrong ones."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megagate.model.backends.norm import RMSNorm
from megagate.platform import apex
from megagate.pretrain.arguments import read
from tests.distributed import ROOT, run_distributed
from tests.training import TINY

WEIGHT_GRADIENTS = """
def wgrad_gemm_accum_fp32(total_input, grad_output, main_grad):
    calls.append(main_grad.shape)
    main_grad += grad_output.reshape(-1, grad_output.shape[-1]).T @ total_input.reshape(-1, total_input.shape[-1])

wgrad_gemm_accum_fp16, calls = wgrad_gemm_accum_fp32, []
"""
"""What Apex's module does, in torch."""

NVIDIAS = {
    "apex/__init__.py": "",
    "apex/multi_tensor_apply/__init__.py": "",
    "apex/optimizers/__init__.py": "raise ImportError('not compiled')",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": """
        import torch

        calls = []

        def fused_rms_norm_affine(input, weight, normalized_shape, eps):
            calls.append(input.shape)
            return torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)
        """,
}
COMPILED = {
    "fused_weight_gradient_mlp_cuda.py": WEIGHT_GRADIENTS,
    "fused_layer_norm_cuda.py": "rms_forward_affine = rms_backward_affine = None",
}
PYPIS = {
    "apex/__init__.py": "",  # imports a web framework, of an old version
    "apex/models.py": "",
    "apex/views.py": "",
    "apex/lib/__init__.py": "",
}
CLONE = {"apex/setup.py": "", "apex/apex/__init__.py": "", "apex/apex/optimizers/__init__.py": ""}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source), encoding="utf-8")
    return folder


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of what a test imports, hides or finds outlives it."""
    before = dict(sys.modules)
    monkeypatch.setattr(apex, "_unrelated", None)
    for name in ("apex", *(path.removesuffix(".py") for path in COMPILED)):
        sys.modules.pop(name, None)
    apex.fused_rms_norm.cache_clear()
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules.update(before)
    apex.fused_rms_norm.cache_clear()


IN_MEGATRON = """
import importlib, sys
import megagate.platform
from megagate.platform import apex
from megatron.core.models import backends
hidden = backends.HAVE_APEX
del sys.modules["apex"]
print(hidden, importlib.reload(backends).HAVE_APEX, apex.notice())
"""


def seen_by_megatron(folder: Path) -> str:
    """Return whether Megatron sees Apex where `folder` is among the installed packages, with it hidden and without.

    After these, the sentence about it.
    """
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_MEGATRON],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()[-1]


def test_the_package_of_that_name_on_pypi_is_hidden_from_megatron(tmp_path: Path) -> None:
    write(tmp_path, PYPIS)
    sentence = "is not NVIDIA's Apex and is not used; docs/installation.md says where that is, if you want it"
    assert seen_by_megatron(tmp_path) == f"False True {tmp_path / 'apex'} {sentence}"


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("files", "is_hidden"),
    [
        pytest.param(PYPIS, True, id="pypi"),
        pytest.param(CLONE, True, id="clone"),
        pytest.param({"apex.py": ""}, True, id="module"),
        pytest.param(NVIDIAS, False, id="nvidia"),
        pytest.param({}, False, id="none"),
    ],
)
def test_what_is_hidden(files: dict, is_hidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(write(tmp_path, files))
    apex.hide_unrelated()
    assert (apex.notice() is not None) == is_hidden
    if is_hidden:
        assert str(tmp_path / "apex") in apex.notice()
        with pytest.raises(ImportError):
            import apex as imported
    elif files:
        import apex as imported

        assert imported.__file__ == str(tmp_path / "apex" / "__init__.py")


@pytest.mark.usefixtures("forgotten")
def test_weight_gradients_are_fused_where_the_kernel_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, unless the user says otherwise; the CPU platform has no use for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not read(TINY).gradient_accumulation_fusion
    monkeypatch.syspath_prepend(write(tmp_path, COMPILED))
    assert read(TINY).gradient_accumulation_fusion
    assert not read([*TINY, "--no-gradient-accumulation-fusion"]).gradient_accumulation_fusion
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not read(TINY).gradient_accumulation_fusion


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("source", ["raise ImportError('undefined symbol')", "wgrad_gemm_accum_fp32 = None"])
def test_a_kernel_that_does_not_load_is_none(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.syspath_prepend(write(tmp_path, {"fused_weight_gradient_mlp_cuda.py": source}))
    assert not apex.has_fused_weight_gradients()


@pytest.mark.usefixtures("forgotten")
def test_rms_norm_is_apexs_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its compiled part is there too, and for what it computes: one dtype, a weight that is the factor."""
    from tests.model.test_norm import SIZE, config

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    hidden = torch.randn(5, 2, SIZE)
    plain, zero_centered = RMSNorm(config(), SIZE), RMSNorm(config(layernorm_zero_centered_gamma=True), SIZE)
    torch.nn.init.normal_(plain.weight)
    expected = plain(hidden)
    monkeypatch.syspath_prepend(write(tmp_path, NVIDIAS))
    apex.fused_rms_norm.cache_clear()
    assert apex.fused_rms_norm() is None, "its compiled part is missing"
    write(tmp_path, COMPILED)
    monkeypatch.syspath_prepend(tmp_path)
    apex.fused_rms_norm.cache_clear()
    torch.testing.assert_close(plain(hidden), expected)
    calls = sys.modules["apex.normalization.fused_layer_norm"].calls
    assert calls == [hidden.shape]
    zero_centered(hidden)
    plain(hidden.bfloat16())
    assert len(calls) == 1


def gradients(fused: bool) -> dict[str, Tensor]:
    """Return the gradients of a step with weight gradients fused, by a stand-in for the kernel, or not."""
    from types import ModuleType
    from unittest import mock

    from megatron.core.tensor_parallel import layers

    from tests.model import training

    kernel = ModuleType("fused_weight_gradient_mlp_cuda")
    exec(WEIGHT_GRADIENTS, vars(kernel))
    flags = "--num-layers 2 --num-query-groups 4 --gate-preset sdpa-headwise --micro-batch-size 4"
    case = training.Case(flags=f"{flags} --ffn-hidden-size 64 --disable-bias-linear")
    with (
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernel, create=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(apex, "has_fused_weight_gradients", lambda: fused),
    ):
        result = training.train(case)
    return {"calls": torch.tensor(len(kernel.calls))} | {piece.key: piece.value for piece in result.gradients}


def test_fused_weight_gradients_are_the_same() -> None:
    (fused,), (plain,) = (run_distributed(gradients, 1, choice, timeout=100) for choice in (True, False))
    assert fused.pop("calls") > 0
    assert plain.pop("calls") == 0
    assert fused.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-5, atol=1e-7)
        assert value.abs().max() > 0


@pytest.mark.full
def test_the_real_package_on_pypi(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), "apex"]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if installed.returncode or not (tmp_path / "apex").is_dir():
        pytest.skip(f"the registry does not answer: {installed.stderr.strip().splitlines()[-1:]}")
    # It does not import without the packages that it needs; with old versions of them it does.
    assert seen_by_megatron(tmp_path).startswith(f"False False {tmp_path / 'apex'} is not NVIDIA's Apex")
