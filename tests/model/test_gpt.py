"""GPTModel of the gated layers: the same on every layout, the same as the hybrid model, and its checkpoints there."""

import argparse
import re
from pathlib import Path

import pytest

from megagate.checkpoint.convert import export_checkpoint
from megagate.checkpoint.verify import verify
from megagate.errors import UserError
from megagate.gate import PRESETS
from tests.distributed import run_distributed
from tests.model.test_layouts import Layout, compare
from tests.training import TINY, scalars, train

GATES = list(PRESETS)
GPT = ["--model-impl", "gpt"]
LAYOUTS = [
    Layout(ranks=4, tp=4),
    Layout(ranks=4, tp=2, sp=True, ep=2),
    Layout(ranks=2, pp=2, vpp=2),
    Layout(ranks=4, pp=2, cp=2),
    Layout(ranks=4, tp=2, sp=True, etp=2, ep=2),
]
MIXED = "--num-layers 4 --moe-layer-freq [0,1,1,0]"


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=map(str, LAYOUTS))
def test_layouts(index: int) -> None:
    """Losses, gradients and grad norm are those of one process; gates and models take turns."""
    layout = LAYOUTS[index]
    models = [model for model in ("mixed", "experts", "dense-untied") if layout.takes(model)]
    choices = [(models[turn % len(models)], GATES[(4 * index + turn) % len(GATES)]) for turn in range(4)]
    compare(layout, choices, " ".join(GPT))


def run(folder: Path, *flags: str, ranks: int = 1) -> dict[str, dict[int, float]]:
    """Train with `flags`, and return the scalars of this run."""
    curve = folder / "curve"
    run_distributed(train, ranks, [*TINY, "--save-interval", "2", "--tensorboard-dir", str(curve), *flags], timeout=150)
    return scalars(curve)


def loss_of(folder: Path) -> float:
    """Return the loss of some tokens with the checkpoint as the tools that evaluate load it."""
    import torch

    from megagate.evaluate.load import load_model

    tokens = torch.randint(255, (4, 32), generator=torch.Generator().manual_seed(1))
    with load_model(folder) as loaded:
        positions = torch.arange(32).expand(4, -1).contiguous()
        return float(loaded.model(tokens, positions, None, labels=tokens).mean())


@pytest.mark.parametrize(
    ("preset", "flags"),
    [("value-headwise", MIXED), ("sdpa-elementwise", ""), ("output-elementwise", "--add-qkv-bias")],
)
def test_the_hybrid_model_goes_on(preset: str, flags: str, tmp_path: Path) -> None:
    """From a GPTModel's checkpoint, optimizer included, with telemetry: the same curves, as on another layout."""
    common = ["--gate-preset", preset, *flags.split(), "--train-iters", "4"]
    run(tmp_path / "start", *common, *GPT, "--save", str(tmp_path / "save"), "--exit-interval", "2")
    assert 4 < run_distributed(loss_of, 1, tmp_path / "save", timeout=100)[0] < 7
    export_checkpoint(tmp_path / "save", tmp_path / "exported")
    assert "differ by at most" in verify(tmp_path / "exported", tmp_path / "save", run_code=True)
    common += ["--load", str(tmp_path / "save")]
    gpt = run(tmp_path / "gpt", *common, *GPT)
    hybrid = run(tmp_path / "hybrid", *common)
    spread = run(tmp_path / "spread", *common, *GPT, "--expert-model-parallel-size", "2", ranks=2)
    tags = ["lm loss", "grad-norm", "load_balancing_loss", "gate/mean-score"]
    tags += ["attention/first-token-share", "activation/max/layer-02"]
    for tag in tags:
        assert set(gpt[tag]) == set(hybrid[tag]) == {3, 4}, tag
        for step, value in gpt[tag].items():
            assert hybrid[tag][step] == pytest.approx(value, rel=1e-6), tag
            assert spread[tag][step] == pytest.approx(value, rel=1e-5), tag


def test_overlap_of_the_all_to_all(tmp_path: Path) -> None:
    """It computes in another order, and the same."""
    common = "--gate-preset sdpa-headwise --bf16 --expert-model-parallel-size 2 --train-iters 3 --num-layers 2".split()
    plain = run(tmp_path / "plain", *common, *GPT, ranks=2)
    overlapped = run(tmp_path / "overlapped", *common, *GPT, "--overlap-moe-expert-parallel-comm", ranks=2)
    assert plain["lm loss"] == overlapped["lm loss"]
    assert plain["grad-norm"] == pytest.approx(overlapped["grad-norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--model-impl gpt --hybrid-layer-pattern *E",
            "--hybrid-layer-pattern needs the hybrid model: leave out --model",
        ),
        (
            "--model-impl gpt --experimental-attention-variant gated_delta_net --linear-attention-freq 2",
            "--experimental-attention-variant needs the hybrid model",
        ),
        ("--overlap-moe-expert-parallel-comm", "is there for GPTModel only: add --model-impl gpt"),
    ],
)
def test_refused(flags: str, message: str) -> None:
    from megagate.pretrain.arguments import read

    with pytest.raises(UserError, match=re.escape(message)):
        read([*TINY, *flags.split()])


def test_a_hybrid_checkpoint_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", "--save", str(tmp_path / "save"))
    with pytest.raises(Exception, match="was written with the hybrid model, but this run has --model-impl gpt: leave"):
        run(tmp_path / "gpt", "--load", str(tmp_path / "save"), *GPT)


def test_operations_are_those_of_the_hybrid_model() -> None:
    from megagate.model.pattern import as_hybrid
    from megagate.pretrain.arguments import read
    from megagate.pretrain.flops import num_floating_point_operations

    for preset in GATES:
        args: argparse.Namespace = read([*TINY, *MIXED.split(), *GPT, "--gate-preset", preset])
        args.padded_vocab_size = 256
        counts = [num_floating_point_operations(given, 4) for given in (args, as_hybrid(args))]
        assert counts[0] == counts[1], preset
