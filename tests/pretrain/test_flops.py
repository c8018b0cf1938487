"""The gate's floating-point operations are counted in what the trainer logs and saves."""

import re
from pathlib import Path

import pytest

from megagate.gate import PRESETS, SWITCH_HEAD_PRESETS
from tests.distributed import run_distributed
from tests.training import TINY, scalars, train

# Of tests.training: 2 blocks "*E", 32 tokens, 4 sequences, padded vocabulary 256.
HIDDEN, HEADS, GROUPS, CHANNELS, LAYERS, TOKENS, SEQUENCE, VOCABULARY = 32, 8, 4, 8, 2, 4 * 32, 32, 256
WIDTH = HEADS * CHANNELS
GATE_ROWS = {
    "sdpa-elementwise": WIDTH,
    "sdpa-headwise": HEADS,  # padded to 64, of which 8 are computed for
    "value-elementwise": GROUPS * CHANNELS,
    "value-headwise": GROUPS,
    "key-elementwise": GROUPS * CHANNELS,
    "query-elementwise": WIDTH,
    "output-elementwise": HIDDEN,
    "sdpa-elementwise-shared": WIDTH,
    "value-elementwise-shared": GROUPS * CHANNELS,
    "sdpa-elementwise-additive-silu": WIDTH,
    "sdpa-elementwise-silu": WIDTH,
    "sdpa-elementwise-additive-identity": WIDTH,
    "sdpa-elementwise-ns-sigmoid": WIDTH,
    # A score for each expert and head, and each expert's projection beyond the first; all of them are computed.
    "switch-head-kv-8-top-8": GROUPS * (8 + 2 * 7 * CHANNELS),
    "switch-head-kv-4-top-4": GROUPS * (4 + 2 * 3 * CHANNELS),
    "switch-head-v-4-top-4": GROUPS * (4 + 3 * CHANNELS),
    "switch-head-v-8-top-2": GROUPS * (8 + 7 * CHANNELS),
}
"""Rows of the gate's weight matrix; presets that are not here have none."""
ALL = [*PRESETS, *SWITCH_HEAD_PRESETS]


def by_hand(preset: str) -> int:
    """Return the operations of one step: two for a multiplication and addition, three times the forward pass."""
    projections = HIDDEN * (2 * WIDTH + 2 * GROUPS * CHANNELS)  # queries and output, keys and values
    scores = 2 * WIDTH * SEQUENCE // 2  # causal
    attention = projections + scores + HIDDEN * GATE_ROWS.get(preset, 0)
    experts = 2 * 3 * HIDDEN * 32  # two of them for a token, three matrices each
    return 3 * 2 * TOKENS * (LAYERS * (attention + experts) + HIDDEN * VOCABULARY)


@pytest.fixture(scope="module")
def counted() -> dict[str, float]:
    return run_distributed(count, 1, timeout=100)[0]


def count() -> dict[str, float]:
    """Return what Megatron's loop is told about a step of each preset, after the arguments have been validated."""
    from megatron.training import training

    from megagate.pretrain import flops
    from megagate.pretrain.arguments import read, validate

    flops.apply()
    args = read(TINY)
    validate(args)
    counts = {}
    for args.gate_preset in ALL:
        counts[args.gate_preset] = training.num_floating_point_operations(args, 4)
        packed = training.num_floating_point_operations(args, 0, 4 * SEQUENCE**2, TOKENS)
        assert packed == counts[args.gate_preset]
    return counts


@pytest.mark.parametrize("preset", ALL)
def test_operations_of_a_step(preset: str, counted: dict[str, float]) -> None:
    assert counted[preset] == by_hand(preset)


def test_what_a_run_logs_and_saves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """--log-throughput and the progress log, on two ranks."""
    argv = [*TINY, *"--gate-preset value-elementwise --log-throughput --log-progress --save-interval 2".split()]
    argv += ["--save", str(tmp_path), "--tensorboard-dir", str(tmp_path / "tb"), "--log-timers-to-tensorboard"]
    argv += "--tensor-model-parallel-size 2 --sequence-parallel --log-params-norm".split()
    run_distributed(train, 2, argv, timeout=150)
    logged = scalars(tmp_path / "tb")
    seconds, throughput = logged["iteration-time"][2], logged["throughput"][2]
    assert throughput * 1e12 * seconds * 2 == pytest.approx(by_hand("value-elementwise"), rel=1e-5)
    progress = (tmp_path / "progress.txt").read_text()
    (total,) = re.findall(r"Floating-point operations: (\S+)", progress)
    assert float(total) == pytest.approx(2 * by_hand("value-elementwise"), rel=0.005)  # printed with three digits
