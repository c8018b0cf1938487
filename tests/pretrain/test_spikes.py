"""Spikes are noticed alike on every rank, and what they made a run skip stays skipped."""

import functools
import json
import math
import random
from pathlib import Path

import pytest

from megagate.checkpoint import keep
from megagate.errors import UserError
from megagate.pretrain import spikes
from megagate.pretrain.spikes import Detector, Spike
from tests.distributed import run_distributed
from tests.training import TINY, scalars, train


def curve(length: int = 400, seed: int = 1) -> list[tuple[float, float]]:
    """Return losses and gradient norms of a run that goes well, noise included."""
    generator = random.Random(seed)
    return [
        (2 + 8 * math.exp(-step / 80) + generator.gauss(0, 0.05), math.exp(generator.gauss(0, 0.3)))
        for step in range(length)
    ]


def found(values: list[tuple[float, float]], **options: float) -> list[Spike]:
    detector = Detector(**{"deviations": 6.0, "patience": 3, "warmup": 100} | options)
    judged = [detector.judge(step, loss, norm) for step, (loss, norm) in enumerate(values, start=1)]
    return [spike for spike in judged if spike is not None]


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_goes_well_has_none(seed: int) -> None:
    assert found(curve(2000, seed)) == []


def test_a_jump_of_the_loss() -> None:
    values = curve()
    for step in range(300, 305):
        values[step] = (values[step][0] + 3, values[step][1])
    (spike,) = found(values)
    assert (spike.first, spike.last) == (301, 303)
    assert "deviations above" in spike.message


def test_one_bad_step_is_no_spike() -> None:
    values = curve()
    values[300] = (9.0, 50.0)
    assert found(values) == []
    assert [(spike.first, spike.last) for spike in found(values, patience=1)] == [(301, 301)]


def test_a_jump_of_the_gradient_norm() -> None:
    values = curve()
    for step in range(300, 303):
        values[step] = (values[step][0], 40.0)
    (spike,) = found(values)
    assert (spike.first, spike.last) == (301, 303)
    assert "times its average" in spike.message


def test_going_on_with_averages() -> None:
    """A detector that another goes on from finds what one alone does, and at once."""
    values = curve()
    values[202:206] = [(loss + 3, norm) for loss, norm in values[202:206]]
    first = Detector(6.0, 3, 100)
    assert not any(first.judge(step, *values[step - 1]) for step in range(1, 201))
    second = Detector(6.0, 3, 100, first.averages)
    judged = [second.judge(step, *values[step - 1]) for step in range(201, 401)]
    assert [spike for spike in judged if spike] == found(values) != []


def averages_after(argv: list[str]) -> tuple:
    """Train in a rank, and return the averages at the end."""
    from megatron.training import get_args

    train(argv)
    return get_args().spike_averages


def test_averages_are_in_the_checkpoint(tmp_path: Path) -> None:
    argv = [*TINY, *"--train-iters 4 --save-interval 2 --allow-fresh-start".split()]
    argv += ["--save", str(tmp_path), "--load", str(tmp_path)]
    run_distributed(averages_after, 2, [*argv, "--exit-interval", "2"], timeout=100)
    resumed = run_distributed(averages_after, 2, argv, timeout=100)
    argv[-3] = argv[-1] = str(tmp_path / "uninterrupted")
    uninterrupted = run_distributed(averages_after, 2, argv, timeout=100)
    assert resumed == uninterrupted
    assert resumed[0] == resumed[1] and resumed[0][0] == 4


def test_nan_needs_no_patience_and_no_warmup() -> None:
    for step, bad in ((0, math.nan), (300, math.inf)):
        values = curve()
        values[step] = (bad, values[step][1])
        first = found(values)[0]
        assert (first.first, first.last) == (step + 1, step + 1)
        values[step] = (2.0, math.nan)
        assert len(found(values)) == 1


def test_a_new_level_is_reported_once() -> None:
    values = curve()
    values[300:] = [(loss + 5, norm) for loss, norm in values[300:]]
    assert len(found(values)) == 1


def train_with_a_spike(argv: list[str], at: int, rank: int) -> tuple[int, str]:
    """Train in a rank; step `at` has a NaN gradient norm on one rank only. Return exit status and the steps done."""
    import torch
    from megatron.training import training

    original = training.train_step
    done: list[int] = []

    @functools.wraps(original)
    def with_spike(*positional, iteration, **named):
        result = list(original(*positional, iteration=iteration, **named))
        done.append(iteration + 1)
        if iteration + 1 == at and torch.distributed.get_rank() == rank:
            result[5] = math.nan
        return tuple(result)

    training.train_step = with_spike
    try:
        train(argv)
        return 0, str(done)
    except SystemExit as ending:
        torch.distributed.destroy_process_group()
        return ending.code, str(done)
    finally:
        training.train_step = original


@pytest.mark.parametrize(
    ("policy", "first", "target"),
    [("skip", 6, 4), pytest.param("rollback", 3, 2, marks=pytest.mark.full)],
)
def test_going_back(policy: str, first: int, target: int, tmp_path: Path) -> None:
    """On two stages, of which one knows the loss, and a NaN that one of them sees."""
    save = str(tmp_path / "save")
    argv = [*TINY, *"--pipeline-model-parallel-size 2 --train-iters 8 --save-interval 2 --spike-rollback 2".split()]
    argv += ["--save", save, "--load", save, "--allow-fresh-start", "--tensorboard-dir", str(tmp_path / "curve")]
    argv += ["--spike-policy", policy]
    ends = run_distributed(train_with_a_spike, 2, argv, 6, 0, timeout=100)
    assert ends == [(spikes.EXIT_SPIKE, str([1, 2, 3, 4, 5, 6]))] * 2
    assert keep.tracked(tmp_path / "save") == target
    assert json.loads((tmp_path / "save" / spikes.SKIPPED).read_text()) == [[first, 6]]
    ends = run_distributed(train_with_a_spike, 2, argv, 0, 0, timeout=100)
    assert ends == [(0, str([step for step in range(target + 1, 9) if not first <= step <= 6]))] * 2
    shown = scalars(tmp_path / "curve")
    assert set(shown[spikes.TENSORBOARD_TAG]) == set(range(first, 7))
    ends = run_distributed(train_with_a_spike, 2, argv, 0, 0, timeout=100)
    assert ends == [(0, "[]")] * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--spike-policy", "skip"], r"--spike-policy skip goes back to a checkpoint: add --save"),
        (["--spike-patience", "0"], r"--spike-patience must be at least 1, not 0"),
        (
            ["--save", "SAVE", "--save-interval", "1"],
            r"skipped_iterations.json must be a list of \[first, ",
        ),
    ],
)
def test_refused(flags: list[str], message: str, tmp_path: Path) -> None:
    from megagate.pretrain.arguments import read

    (tmp_path / spikes.SKIPPED).write_text('{"first": 1}')
    with pytest.raises(UserError, match=message):
        read([*TINY, *(str(tmp_path) if flag == "SAVE" else flag for flag in flags)])


def test_ranges() -> None:
    assert spikes._ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
