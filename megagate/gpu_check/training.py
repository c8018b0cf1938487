"""A small gated MoE trained for 50 steps: bf16 against fp32, and FP8 against bf16 where Transformer Engine is."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megagate.errors import UserError
from megagate.gpu_check.machine import Machine
from megagate.gpu_check.result import Row
from megagate.gpu_check.trainer import SEED, batches, trainer

VOCABULARY, STEPS, LAST = 128, 50, 10
MODEL = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 2 "
    "--kv-channels 32 --gate-preset sdpa-elementwise --qk-layernorm --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --micro-batch-size 4 --global-batch-size 8 "
    f"--train-iters {STEPS} --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 5 --lr-decay-style cosine --weight-decay 0.1 "
    f"--vocab-size {VOCABULARY - 1} --make-vocab-size-divisible-by {VOCABULARY} --use-distributed-optimizer "
    f"--seed {SEED}"
).split()
TRANSFORMER_ENGINE = ("--transformer-impl", "transformer_engine", "--bf16", "--cross-entropy-loss-fusion")
"""As the recipes for GPUs have it."""
FP8 = ("tensorwise", "delayed", "blockwise", "mxfp8")
FALL = 0.5
"""What the loss must have lost, of ln(vocabulary)."""
BF16_APART, FP8_APART = 0.03, 0.06
"""How far the mean of the last steps may be from the curve that it is compared with, as a share."""


def training(machine: Machine) -> Iterator[Row]:
    """Yield for each precision the loss at the end and its distance from the more exact one's."""
    length = 256 if machine.is_cuda else 32
    model = [*MODEL, "--seq-length", str(length), "--max-position-embeddings", str(length)]
    torch_backend = [*model, "--transformer-impl", "local", "--use-cpu-initialization"]  # the same weights in any dtype
    exact = losses(torch_backend)
    yield from _rows("fp32, torch backend", exact)
    reference = losses([*torch_backend, "--bf16"])
    yield from _rows("bf16, torch backend", reference, exact, BF16_APART)
    if not machine.is_cuda:
        return
    try:
        reference = losses([*model, *TRANSFORMER_ENGINE])
    except UserError as refusal:
        yield Row("Transformer Engine", 0, "runs", note=f"left out: {refusal}")
        return
    yield from _rows("bf16, Transformer Engine", reference, exact)
    for recipe in FP8:
        try:
            curve = losses([*model, *TRANSFORMER_ENGINE, "--fp8-format", "hybrid", "--fp8-recipe", recipe])
        except UserError as refusal:
            yield Row(f"FP8, {recipe}", 0, "runs", note=f"left out: {refusal}")
            continue
        yield from _rows(f"FP8, {recipe}", curve, reference, FP8_APART)


def losses(argv: Sequence[str]) -> list[float]:
    """Return the loss of each step of a run, from the same weights on the same tokens as every other."""
    with trainer(argv) as run:
        iterator = batches(run.args, Chain())
        return [run.step(iterator) for _ in range(STEPS)]


class Chain:
    """Tokens of a Markov chain with three successors of each token, so that there is something to learn."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(SEED)
        self.successors = torch.randint(VOCABULARY - 1, (VOCABULARY, 3), generator=self.generator)

    def __call__(self, shape: tuple[int, int]) -> Tensor:
        """Return the next tokens, [b, s]."""
        tokens = torch.zeros(shape, dtype=torch.long)
        tokens[:, 0] = torch.randint(VOCABULARY - 1, shape[:1], generator=self.generator)
        choices = torch.randint(3, shape, generator=self.generator)
        for position in range(1, shape[1]):
            tokens[:, position] = self.successors[tokens[:, position - 1], choices[:, position]]
        return tokens


def _rows(
    name: str, curve: list[float], reference: list[float] | None = None, apart: float | None = None
) -> Iterator[Row]:
    last = sum(curve[-LAST:]) / LAST
    yield Row(f"{name}: loss of the last {LAST} steps", last, "nats", (1 - FALL) * math.log(VOCABULARY))
    if reference is not None:
        expected = sum(reference[-LAST:]) / LAST
        yield Row(f"{name}: distance from the more exact curve", abs(last - expected) / expected, "relative", apart)
