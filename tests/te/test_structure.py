"""Models of Transformer Engine's layers have the parameters and the checkpoints of those of torch's layers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megagate.gate import PRESETS, GatePosition
from megagate.gate.config import ALL_PRESETS
from megagate.pretrain.refusals import FP8_LINEARS, RECIPES, alignment
from tests.distributed import ROOT
from tests.te import NEEDED

pytestmark = NEEDED

TENSOR_SIZES = (1, 2, 4, 8)
FUSED, APART = "TELayerNormColumnParallelLinear", "TEColumnParallelLinear"
BY_RECIPE = {
    "delayed": "TEDelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of this folder in a process of its own."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", PYTHONWARNINGS="ignore")
    environment.pop("NVTE_CUDA_INCLUDE_DIR", None)
    return subprocess.run(
        [sys.executable, "-m", f"tests.te.{module}", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def described(preset: str, directory: Path, *model: str) -> dict[str, Any]:
    result = run("describe", str(directory / "described.json"), preset, *model)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads((directory / "described.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("te")


@pytest.mark.parametrize("preset", [*PRESETS, "switch-head-kv-4-top-4"])
def test_preset(preset: str, directory: Path) -> None:
    """On each tensor-parallel size, without FP8 and with each recipe."""
    models = described(preset, directory)
    for tensor in TENSOR_SIZES:
        torchs = models.pop(f"{tensor} torch")
        for recipe in ("", *RECIPES):
            model = models.pop(f"{tensor} {recipe}")
            check_modules(model, preset)
            check_same_checkpoint(model, torchs)
            check_same_parameters(model, torchs)
            check_fp8(model, recipe)
    assert not models


@pytest.mark.parametrize("preset", ["sdpa-headwise", "output-elementwise"])
def test_a_gpt_model(preset: str, directory: Path) -> None:
    """Its checkpoint is that of a GPTModel of torch's layers, which a hybrid model reads."""
    models = described(preset, directory, "gpt")
    for tensor in TENSOR_SIZES:
        torchs = models.pop(f"{tensor} torch")
        assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight [0]" in torchs["tensors"]
        for recipe in ("", "delayed"):
            model = models.pop(f"{tensor} {recipe}")
            assert model["tensors"] == torchs["tensors"]
            assert set(torchs["objects"]) <= set(model["objects"])
            assert model["recipe"] == BY_RECIPE.get(recipe)
            assert model["modules"]["decoder.layers.0.mlp.linear_fc1"] == FUSED
            assert model["modules"]["decoder.layers.1.mlp.experts"] == "TEGroupedMLP"
    assert not models


def check_modules(model: dict[str, Any], preset: str) -> None:
    """Norms are fused where nothing else reads their result; experts are grouped."""
    modules = model["modules"]
    kinds = {name: modules[name] for name in modules if name.startswith("decoder.layers.")}
    apart = ALL_PRESETS[preset].position == GatePosition.OUTPUT
    assert kinds["decoder.layers.2.self_attention"] == (
        "SelfAttention" if preset == "baseline" else "GatedSelfAttention"
    )
    assert kinds["decoder.layers.2.self_attention.linear_qkv"] == (APART if apart else FUSED)
    assert kinds["decoder.layers.2.input_layernorm"] == ("RMSNorm" if apart else "IdentityOp")
    assert kinds["decoder.layers.2.self_attention.core_attention"] == "TEDotProductAttention"
    assert kinds["decoder.layers.2.self_attention.linear_proj"] == "TERowParallelLinear"
    assert kinds["decoder.layers.0.self_attention.in_proj"] == kinds["decoder.layers.1.mlp.linear_fc1"] == FUSED
    assert kinds["decoder.layers.3.mlp.experts"] == "TEGroupedMLP"
    assert kinds["decoder.layers.3.mlp.experts.linear_fc1"] == "TEColumnParallelGroupedLinear"
    assert kinds["decoder.layers.3.mlp.router"] == "Router"
    assert modules["decoder"] == "Stack"


def check_same_checkpoint(model: dict[str, Any], torchs: dict[str, Any]) -> None:
    """The same tensors, cut at the same places; only norms have an extra state more, which loading knows of."""
    assert model["tensors"] == torchs["tensors"]
    assert set(torchs["objects"]) <= set(model["objects"])
    more = set(model["objects"]) - set(torchs["objects"])
    assert all(name.endswith("norm._extra_state") for name in more), more


def check_same_parameters(model: dict[str, Any], torchs: dict[str, Any]) -> None:
    """Shapes, dtypes, and by which groups of ranks gradients are reduced."""

    def parameters(described: dict[str, Any]) -> list[tuple[Any, ...]]:
        return sorted((tuple(shape), dtype, name.rpartition(".experts.")[1]) for name, (shape, dtype, *_) in described)

    assert parameters(model["parameters"].items()) == parameters(torchs["parameters"].items())
    assert len(model["experts"]) == len(torchs["experts"]) == 8
    assert all(".mlp.experts." in name for name in model["experts"] + torchs["experts"])


def check_fp8(model: dict[str, Any], recipe: str) -> None:
    """The recipe is Transformer Engine's, and takes every matrix, the gate's rows and experts' tokens included."""
    assert model["recipe"] == BY_RECIPE.get(recipe)
    assert model["tokens"] == [alignment(recipe) if recipe else 0, False]
    kinds = model["modules"].values()
    assert ("Fp8Padding" in kinds) == ("Fp8Unpadding" in kinds) == bool(recipe)
    matrices = 0
    for name, (shape, *_) in model["parameters"].items():
        layer, _, kind = name.rpartition(".")
        if layer.rpartition(".")[2] in FP8_LINEARS and kind.startswith("weight"):
            matrices += 1
            assert not recipe or all(size % alignment(recipe) == 0 for size in shape), (name, shape)
    assert matrices == 16


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "mxfp8"])
def test_flags(recipe: str, directory: Path) -> None:
    """Megatron's settings, for some of which it has no flags, reach Transformer Engine."""
    result = run("flags", str(directory / "flags.json"), recipe)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads((directory / "flags.json").read_text(encoding="utf-8"))
    assert found == {
        "dot product": [True, False],
        "gate precision": [APART, "RMSNorm", False],
        "padded by the router": [alignment(recipe), True],
    } | ({"multi head": [False, True]} if recipe == "delayed" else {})


def test_a_gpu_that_is_too_old(directory: Path) -> None:
    result = run("flags", str(directory / "hopper.json"), "mxfp8", "hopper")
    assert result.returncode != 0
    assert "--fp8-recipe mxfp8 does not run on this GPU: Device compute capability 10.0 or higher" in result.stderr


@pytest.mark.parametrize(("source", "target"), [("local", "transformer_engine"), ("transformer_engine", "local")])
@pytest.mark.parametrize("preset", ["sdpa-headwise", "output-elementwise"])
def test_a_checkpoint_of_one_loads_in_the_other(preset: str, source: str, target: str, tmp_path: Path) -> None:
    """Every weight is the same bit for bit, those of experts and fused norms too; and so are initial weights, and
    the marks by which gradients are reduced, on a tensor-parallel rank under sequence parallelism.
    """
    result = run("exchange", str(tmp_path / "checkpoint"), preset, source, target)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines()[-1].endswith("tensors are equal")


def test_the_layers_of_the_check_on_a_gpu() -> None:
    result = run("gpu_check")
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == "17 layers, 16 with a fused norm"
