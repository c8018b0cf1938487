"""A tiny training run inside a rank of `tests.distributed`: what the tests of platform, resume and telemetry share."""

import sys
from pathlib import Path

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
    "--kv-channels 8 --ffn-hidden-size 64 --swiglu --disable-bias-linear --normalization RMSNorm --qk-layernorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
).split()
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2"
).split()
RUN = (
    "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3 "
    "--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0 "
    "--log-interval 1 --eval-iters 0 --eval-interval 1000 --use-distributed-optimizer"
).split()
TINY = [*MODEL, *EXPERTS, *RUN]
"""A model with 2 blocks of attention and experts, 2 steps on mock data."""


def train(argv: list[str]) -> None:
    """Train with `argv`, as `python -m megagate.pretrain` does, in the process group that this rank has."""
    from megagate.platform import cpu, on_cpu
    from megagate.pretrain.arguments import parse
    from megagate.pretrain.train import train as run

    if on_cpu():
        cpu.activate_training()
    typed, sys.argv = sys.argv, ["megagate.pretrain", *argv]  # which Megatron reads too
    try:
        run(parse(argv))
    finally:
        sys.argv = typed


def scalars(directory: Path) -> dict[str, dict[int, float]]:
    """Return the TensorBoard scalars in a directory: tag -> step -> value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
