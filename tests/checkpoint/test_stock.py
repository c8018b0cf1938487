"""Checkpoints that Megatron's own training writes of its models load into megagate's: same logits, same next steps."""

from pathlib import Path

import pytest

from megagate.errors import UserError
from tests.checkpoint.stock import Stock, load, write
from tests.distributed import run_distributed

COMMON = "--micro-batch-size 2 --num-query-groups 4 --disable-bias-linear --ffn-hidden-size 48"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-router-load-balancing-type aux_loss"
GPT = {
    "dense": f"{COMMON} --num-layers 2",
    "experts": f"{COMMON} {EXPERTS} --num-layers 2 --add-qkv-bias",
    "dense-then-experts": f"{COMMON} {EXPERTS} --num-layers 3 --moe-layer-freq [0,1,1] "
    "--untie-embeddings-and-output-weights",
}
HYBRID = {
    "dense": f"{COMMON} --hybrid-layer-pattern *-*- --num-layers 4",
    "dense-then-experts": f"{COMMON} {EXPERTS} --hybrid-layer-pattern *-*E --num-layers 4 --add-qkv-bias",
    "delta-net": f"{COMMON} --hybrid-layer-pattern G-*- --num-layers 4 "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8",
}
TENSOR2 = "--tensor-model-parallel-size 2"
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"


def check(stock: Stock, flags: str, writers: int = 1, readers: int = 1) -> None:
    """Check that the run `flags` has the logits of the stock model, and the losses of its next steps."""
    written = run_distributed(write, writers, stock, timeout=100)
    expected = {"logits": written[0][0], "losses": written[-1][1]}
    read = run_distributed(load, readers, flags, stock.steps, timeout=100)
    actual = {"logits": read[0][0], "losses": read[-1][1]}
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert len(actual["losses"]) == stock.steps
    if expected["logits"] is not None and actual["logits"] is not None:
        error = (actual["logits"] - expected["logits"]).abs().max() / expected["logits"].abs().max()
        assert error < 1e-5, error


@pytest.mark.parametrize("gate", ["", "--attention-output-gate"])
@pytest.mark.parametrize("model", GPT)
def test_gpt_model(tmp_path: Path, model: str, gate: str) -> None:
    flags = f"{GPT[model]} {gate}"
    check(Stock(flags, str(tmp_path)), f"{flags} --pretrained-checkpoint {tmp_path}")


@pytest.mark.parametrize("gate", ["", "--attention-output-gate"])
@pytest.mark.parametrize("transformer_engine", [False, True])
@pytest.mark.parametrize("model", HYBRID)
def test_hybrid_model(tmp_path: Path, model: str, transformer_engine: bool, gate: str) -> None:
    flags = f"{HYBRID[model]} {gate}"
    stock = Stock(flags, str(tmp_path), transformer_engine=transformer_engine)
    check(stock, f"{flags} --load {tmp_path} --finetune")


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("models", "model", "before", "after"),
    [
        pytest.param(GPT, "dense", TENSOR2, "", id="tensor2-to-one"),
        pytest.param(GPT, "dense-then-experts", "", f"{TENSOR2} --sequence-parallel", id="numbered-one-to-tensor2"),
        pytest.param(GPT, "dense", "", f"{TENSOR2} --sequence-parallel", id="one-to-tensor2", marks=FULL),
        pytest.param(GPT, "experts", "", "--expert-model-parallel-size 2", id="one-to-expert2", marks=FULL),
        pytest.param(HYBRID, "dense-then-experts", "", f"{TENSOR2} --sequence-parallel", id="hybrid", marks=FULL),
    ],
)
def test_other_layouts(tmp_path: Path, models: dict[str, str], model: str, before: str, after: str) -> None:
    stock = Stock(f"{models[model]} {before} --attention-output-gate", str(tmp_path))
    flags = f"{models[model]} {after} --gate-preset sdpa-elementwise --load {tmp_path} --finetune"
    check(stock, flags, 2 if before else 1, 2 if after else 1)


@pytest.mark.parametrize(
    ("model", "optimizer", "transformer_engine"),
    [
        pytest.param(GPT["dense"], DISTRIBUTED, False, id="gpt"),
        pytest.param(GPT["dense"], "", False, id="gpt-not-distributed", marks=FULL),
        pytest.param(HYBRID["dense"], DISTRIBUTED, True, id="hybrid"),
        pytest.param(HYBRID["dense"], "", True, id="hybrid-not-distributed", marks=FULL),
    ],
)
def test_training_goes_on(tmp_path: Path, model: str, optimizer: str, transformer_engine: bool) -> None:
    """The second of the steps depends on the moments of the first ones."""
    flags = f"{model} {optimizer}"
    check(Stock(flags, str(tmp_path), 2, transformer_engine), f"{flags} --load {tmp_path}")


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(GPT["dense"], id="gpt"),
        pytest.param(GPT["dense-then-experts"], id="gpt-numbered"),
        pytest.param(HYBRID["dense-then-experts"], id="hybrid"),
    ],
)
def test_warm_start(tmp_path: Path, model: str) -> None:
    """With an additive gate that is almost zero, the gated model is the stock one."""
    gate = "--gate-warm-start --gate-preset sdpa-elementwise-additive-identity --init-method-std 1e-8"
    stock = Stock(model, str(tmp_path), transformer_engine="hybrid" in model)
    check(stock, f"{model} --pretrained-checkpoint {tmp_path} {gate}")


def test_an_optimizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    flags = f"{GPT['dense']} --use-distributed-optimizer"
    run_distributed(write, 1, Stock(flags, str(tmp_path / "dense"), 1), timeout=100)
    with pytest.raises(UserError, match="is of Megatron's GPTModel, with the optimizer's state as it lay in memory"):
        run_distributed(load, 1, f"{flags} --load {tmp_path / 'dense'}")
    run_distributed(load, 1, f"{flags} --load {tmp_path / 'dense'} --no-load-optim", timeout=100)
    flags = f"{GPT['experts']} {DISTRIBUTED}"
    run_distributed(write, 1, Stock(flags, str(tmp_path / "experts"), 1), timeout=100)
    with pytest.raises(UserError, match="has the state of experts and other weights in one optimizer"):
        run_distributed(load, 1, f"{flags} --load {tmp_path / 'experts'}")
