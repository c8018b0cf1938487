"""The backend is chosen by what the machine has; the user can force one, and reads what is missing."""

import argparse

import pytest

from megagate.errors import UserError
from megagate.model.backends import BACKENDS, te_backend
from megagate.pretrain import backend
from megagate.pretrain.backend import choose_backend


def chosen(given: str | None, fp8: str | None = None, rank: int = 0) -> str:
    args = argparse.Namespace(transformer_impl=given, fp8=fp8, fp8_recipe="mxfp8", rank=rank)
    choose_backend(args)
    return args.transformer_impl


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "on_cpu", lambda: False)


@pytest.fixture
def installed(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_backend, "is_available", lambda: True)
    monkeypatch.setattr(te_backend, "reason_against", lambda recipe: "")


def test_with_a_gpu_and_transformer_engine(installed: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(None) == chosen("transformer_engine") == chosen(None, fp8="hybrid") == "transformer_engine"
    assert chosen("local") == "local"
    assert not capsys.readouterr().out
    assert set(BACKENDS) == {"local", "transformer_engine"}


def test_a_gpu_without_the_recipe(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_backend, "reason_against", lambda recipe: f"{recipe} needs another one.")
    assert chosen(None) == "transformer_engine"
    with pytest.raises(UserError, match=r"^--fp8-recipe mxfp8 does not run on this GPU: mxfp8 needs another one\.$"):
        chosen(None, fp8="e4m3")


def test_a_gpu_without_transformer_engine(gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert not te_backend.is_available()
    assert chosen(None) == "local"
    told = capsys.readouterr().out
    assert told.startswith("megagate: Transformer Engine is not installed, so layers are torch's and slower")
    assert told.count("\n") == 1
    assert chosen(None, rank=1) == chosen("local") == "local"
    assert not capsys.readouterr().out
    with pytest.raises(UserError, match=r"^--transformer-impl transformer_engine needs .* not installed: pip install"):
        chosen("transformer_engine")
    with pytest.raises(UserError, match=r"^--fp8-format needs Transformer Engine, which is not installed: pip"):
        chosen(None, fp8="e4m3")


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(None) == chosen("local") == "local"
    assert not capsys.readouterr().out
    with pytest.raises(UserError, match=r"^--transformer-impl transformer_engine needs a GPU, and there is none here"):
        chosen("transformer_engine")
    with pytest.raises(UserError, match=r"^--fp8-format needs a GPU, and there is none here: .*--dry-run"):
        chosen(None, fp8="hybrid")
    with pytest.raises(UserError, match="inference_optimized is for serving"):
        chosen("inference_optimized")
