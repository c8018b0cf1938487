"""A run's files become one curve for each tag, over the tokens that its final weights have seen."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from megagate.errors import UserError
from megagate.report.runs import Run, find_events, read_runs
from megagate.report.sections import ACTIVATIONS, ATTENTION, EXPERTS, GATE, TIME_PARTS
from megagate.report.tables import FLOOR, tokens_per_second
from tests.distributed import run_distributed
from tests.report.runs import ARGUMENTS, BATCH, SEQUENCE, Writer
from tests.training import TINY, train


def read(directory: Path) -> Run:
    (run,) = read_runs([str(directory)])
    return run


def test_resumed_runs_do_not_overlap(tmp_path: Path) -> None:
    """Three starts: the second from iteration 6 of 10, the third from iteration 4, before the second's."""
    random = np.random.default_rng(1)
    values = random.standard_normal((3, 20)).astype(np.float32)
    starts = [(0, 10), (6, 12), (4, 8)]
    for number, (iteration, last) in enumerate(starts):
        writer = Writer(tmp_path, ARGUMENTS | {"lr": number}, iteration)
        writer.steps("lm loss", values[number, iteration:last], first=iteration + 1)
        if number < 2:
            writer.scalar("lm loss validation", number, last)  # after the third's checkpoint, which never got so far
            writer.scalar("grad-norm", number, 3 + 4 * number)
            writer.histogram("gate/scores/layer-01", values[number] * 0 + number, 4 + 8 * number)
        writer.close()
    run = read(tmp_path)
    assert run.restarts == 2
    loss = run.scalars["lm loss"]
    assert list(loss.steps) == list(range(1, 9))
    np.testing.assert_array_equal(loss.values, np.concatenate([values[0, :4], values[2, 4:8]]))
    assert "lm loss validation" not in run.scalars
    assert list(run.scalars["grad-norm"].steps) == [3]
    assert run.histograms["gate/scores/layer-01"][0] == 4
    assert run.dropped == 6 + 6 + 3
    assert run.arguments["lr"] == ["0", "1", "2"]
    assert run.arguments["gate_preset"] == ["sdpa-headwise"]
    assert run.tokens is not None
    np.testing.assert_array_equal(run.tokens.values, np.arange(1, 9) * BATCH * SEQUENCE)


def test_a_start_that_logged_nothing_changes_nothing(tmp_path: Path) -> None:
    first = Writer(tmp_path)
    first.steps("lm loss", np.ones(10))
    first.close()
    Writer(tmp_path, iteration=4).close()
    run = read(tmp_path)
    assert run.restarts == 0
    assert len(run.scalars["lm loss"].steps) == 10


def test_without_arguments_the_first_scalar_says_where_a_file_begins(tmp_path: Path) -> None:
    for number, first in enumerate((1, 5)):
        writer = Writer(tmp_path, {})
        writer.steps("lm loss", np.full(8, number), first=first)
        writer.close()
    run = read(tmp_path)
    assert list(run.scalars["lm loss"].values) == [0] * 4 + [1] * 8
    assert run.tokens is None
    assert run.samples is not None
    assert run.samples.values[-1] == 12 * BATCH


def test_tokens_under_a_ramp_of_the_batch_and_a_longer_sequence(tmp_path: Path) -> None:
    first = Writer(tmp_path, ARGUMENTS | {"seq_length": 100})
    for step, samples in ((1, 2), (2, 6), (3, 14)):
        first.both("batch-size", samples, step, samples)
    first.close()
    second = Writer(tmp_path, ARGUMENTS | {"seq_length": 1000}, iteration=2)
    for step, samples in ((3, 16), (4, 26)):
        second.both("batch-size", 10, step, samples)
        second.scalar("iteration-time", 2.0, step)
    second.close()
    run = read(tmp_path)
    assert run.tokens is not None
    assert dict(zip(run.tokens.steps, run.tokens.values, strict=True)) == {1: 200, 2: 600, 3: 10_600, 4: 20_600}
    speed = tokens_per_second(run)
    assert speed is not None
    assert list(speed.values) == [5000, 5000]


def test_the_test_set_is_not_the_validation_set(tmp_path: Path) -> None:
    """Megatron ends with the losses of the validation set and of the test set, under one tag and step."""
    writer = Writer(tmp_path)
    for loss in (3.0, 3.1, 9.0):
        writer.both("lm loss validation", loss, 12, 96)
    writer.close()
    assert list(read(tmp_path).scalars["lm loss validation"].values) == [3.0]


def test_names_and_directories(tmp_path: Path) -> None:
    for name in ("gated", "baseline"):
        writer = Writer(tmp_path / name / "tensorboard")
        writer.scalar("lm loss", 1.0, 1)
        writer.close()
    paths = [str(tmp_path / "gated"), str(tmp_path / "baseline" / "tensorboard")]
    assert [run.name for run in read_runs(paths)] == ["gated", "baseline"]
    assert [run.name for run in read_runs([f"no gate={paths[1]}"])] == ["no gate"]
    equals = tmp_path / "lr=0.1"
    (tmp_path / "gated").rename(equals)
    assert [run.name for run in read_runs([str(equals)])] == ["lr=0.1"]
    assert find_events(equals) == equals / "tensorboard"
    for words, said in (
        ([str(tmp_path)], "holds event files of 2 runs; name those to compare: .*baseline.*lr=0.1"),
        ([str(tmp_path / "none")], "is not a directory: give what --save or --tensorboard-dir named"),
        ([str(equals), str(equals / "tensorboard")], "are the same run"),
        ([f"a={equals}", f"a={paths[1]}"], "are both called 'a': write NAME=DIR"),
        (["=x"], "write DIR or NAME=DIR"),
    ):
        with pytest.raises(UserError, match=said):
            read_runs(words)
    shutil.rmtree(equals / "tensorboard")
    with pytest.raises(UserError, match="holds no TensorBoard event files"):
        read_runs([str(equals)])
    (equals / "events.out.tfevents.1.host").write_bytes(b"")
    with pytest.raises(UserError, match=r"hold no scalars: events\.out\.tfevents\.1\.host is empty"):
        read_runs([str(equals)])


def test_a_real_run_that_was_resumed(tmp_path: Path) -> None:
    """The trainer, 5 iterations and again from its checkpoint at 2; then its arguments, from the checkpoint alone."""
    save = tmp_path / "run"
    argv = [*TINY, "--gate-preset", "sdpa-headwise", "--save", str(save), "--save-interval", "2", "--log-interval", "1"]
    argv += ["--tensorboard-dir", str(save / "tensorboard"), "--log-timers-to-tensorboard", "--no-save-optim"]
    argv += ["--eval-iters", "1", "--train-iters", "6"]
    run_distributed(train, 1, [*argv, "--exit-interval", "5"])
    resume = ["--load", str(save), "--ckpt-step", "2", "--no-load-optim", "--micro-batch-size", "2"]
    run_distributed(train, 1, [*argv, *resume])
    run = read(save)
    assert run.name == "run"
    assert run.restarts == 1
    assert run.dropped == 0  # the trainer has cut them out itself
    assert len(list((save / "tensorboard").glob("replaced_after_2.*"))) == 1
    for tag in ("lm loss", "grad-norm", "learning-rate", "batch-size"):
        assert list(run.scalars[tag].steps) == [1, 2, 3, 4, 5, 6], tag
    assert len(run.scalars["lm loss validation"].steps) == 1  # the validation set at the end, not the test set
    assert run.tokens is not None
    np.testing.assert_array_equal(run.tokens.values, np.arange(1, 7) * 4 * 32)
    assert run.arguments["micro_batch_size"] == ["1", "2"]
    assert run.arguments["gate_preset"] == ["sdpa-headwise"]
    speed = tokens_per_second(run)
    assert speed is not None
    assert (speed.values > 0).all()
    told = {re.sub(r"/(layer|head)-\d+", "", tag) for tag in (*run.scalars, *run.histograms)}
    own = {tag for tag in told if tag.partition("/")[0] in ("gate", "attention", "activation", "experts", "time")}
    assert own == {
        *GATE.values(),
        "gate/head-mean",
        "gate/scores",
        *ATTENTION.values(),
        FLOOR,
        *ACTIVATIONS.values(),
    } | {*EXPERTS.values(), "experts/tokens", *(f"time/{part}" for part in TIME_PARTS)}, (
        "telemetry and report speak of the same tags"
    )
    assert {"throughput/tokens-per-second", "throughput/tflops-per-device", "memory/max-allocated"} <= told

    shutil.rmtree(save / "tensorboard")
    writer = Writer(save / "tensorboard", {})
    writer.steps("lm loss", np.ones(3), batch=4)
    writer.close()
    run = read(save)
    assert run.argument("gate_preset") == "sdpa-headwise"
    assert run.tokens is not None
    np.testing.assert_array_equal(run.tokens.values, np.arange(1, 4) * 4 * 32)
