"""Telemetry in the trainer: when, where and how often it is written, across a resume too; and its flags."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from megagate.errors import UserError
from megagate.pretrain.arguments import read
from megagate.report import events as report
from megagate.report.layers import shares
from megagate.telemetry import speed
from megagate.telemetry.observer import Histogram
from megagate.telemetry.speed import peak_tflops, split
from megagate.telemetry.totals import Totals
from tests.distributed import run_distributed
from tests.training import TINY, scalars, train

TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel".split()


def run(argv: list[str]) -> str:
    """Train, and return what this rank printed of iterations."""
    import contextlib
    import io

    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        train(argv)
    return "\n".join(line for line in written.getvalue().splitlines() if "iteration" in line or "megagate" in line)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """A run of 6 steps on 2 ranks that saved at 4 and went on from there to 8, without 5: its directory, and what the
    ranks printed."""
    folder = tmp_path_factory.mktemp("resumed")
    base = [*TINY, *TENSOR, "--gate-preset", "sdpa-headwise", "--tensorboard-dir", str(folder / "tb"), "--save"]
    base += [str(folder / "checkpoints"), "--save-interval", "4", "--telemetry-interval", "2", "--train-iters"]
    first = run_distributed(run, 2, [*base, "6", "--exit-interval", "6"], timeout=100)
    again = [*base, "8", "--load", str(folder / "checkpoints"), "--ckpt-step", "4", "--override-opt-param-scheduler"]
    again += ["--iterations-to-skip", "5"]
    second = run_distributed(run, 2, again, timeout=100)
    return folder, [first, second]


def test_each_value_is_written_once(resumed: tuple[Path, list[list[str]]]) -> None:
    """Also after a resume, whose curves take the place of those after the checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = resumed
    events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(tag)]
        assert len(steps) == len(set(steps)), tag
    steps = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert steps["lm loss"] == [1, 2, 3, 4, 6, 7, 8]
    for tag in ("gate/mean-score", "attention/first-token-share/layer-02", "activation/max", "time/forward"):
        assert steps[tag] == [2, 4, 6, 8], tag
    assert [event.step for event in events.Histograms("gate/scores/layer-01")] == [2, 4, 6, 8]
    assert [event.step for event in events.Histograms("experts/tokens/layer-02")] == [2, 4, 6, 8]
    assert len(list((folder / "tb").glob("replaced_after_4.*"))) == 1


def test_the_iterations_line(resumed: tuple[Path, list[list[str]]]) -> None:
    folder, (first, second) = resumed
    lines = [line for line in first[1].splitlines() if re.search(r"\] iteration +\d+/", line)]
    observed = [line for line in lines if "gate score" in line]
    assert [int(re.search(r"iteration +(\d+)/", line).group(1)) for line in observed] == [2, 4, 6]  # type: ignore[union-attr]
    for name in ("gate score", "first-token share", "max activation", "max/mean expert load", "tokens/s"):
        assert all(re.search(rf" {name}: [0-9.]+", line) for line in observed), name
    (shown,) = re.findall(r"gate score: ([0-9.]+)", observed[0])
    assert float(shown) == pytest.approx(scalars(folder / "tb")["gate/mean-score"][2], abs=1e-3)
    assert "replaced_after_4" in second[1]
    assert "replaced_after" not in second[0]


def test_speed(resumed: tuple[Path, list[list[str]]]) -> None:
    curves = scalars(resumed[0] / "tb")
    for step in (4, 8):
        seconds = 4 * 32 / curves["throughput/tokens-per-second"][step]  # of a step: 4 sequences of 32 tokens
        phases = {name: curves[f"time/{name}"][step] for name in ("data", "forward", "backward", "optimizer")}
        assert all(value > 0 for value in phases.values()), phases
        assert sum(phases.values()) + curves["time/communication"][step] < 4 * seconds
        assert 0.2 < curves["memory/max-allocated"][step] < 50
        assert curves["throughput/tflops-per-device"][step] > 0
    assert "throughput/mfu" not in curves
    # The steps since the last time, 7 and 8, take no longer than these iterations, of which they are a part.
    pairs = re.findall(r"iteration +(\d+)/.*time per iteration \(ms\): ([0-9.]+)", resumed[1][1][1])
    elapsed = {int(step): float(milliseconds) / 1000 for step, milliseconds in pairs}
    assert 2 * 4 * 32 / curves["throughput/tokens-per-second"][8] < 1.01 * (elapsed[7] + elapsed[8])


def test_off_and_on_give_the_same_losses(tmp_path: Path) -> None:
    """The loss of the last step depends on all before it; timers that were on for a step are off again."""
    for name, interval in (("off", "0"), ("on", "1")):
        argv = [*TINY, "--train-iters", "3", "--gate-preset", "sdpa-elementwise", "--telemetry-interval", interval]
        run_distributed(train, 1, [*argv, "--tensorboard-dir", str(tmp_path / name)], timeout=100)
    off, on = scalars(tmp_path / "off"), scalars(tmp_path / "on")
    for tag, values in off.items():
        assert on[tag] == values, tag
    assert set(on) - set(off) and not any("/" in tag for tag in off)


@pytest.mark.full
def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own flags; the run is kept on the disk, and read from there."""
    pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags = ["--wandb-project", "gates", "--wandb-exp-name", "tiny", "--wandb-save-dir", str(tmp_path / "wandb")]
    argv = [*TINY, "--gate-preset", "sdpa-headwise", "--tensorboard-dir", str(tmp_path / "tb"), *flags]
    run_distributed(train, 1, argv, timeout=100)
    (path,) = (tmp_path / "wandb").rglob("*.wandb")
    content = path.read_bytes()
    for tag in ("lm loss", "gate/mean-score", "attention/first-token-share/layer-02"):
        assert tag.encode() in content, tag


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--telemetry-interval", "-1"], "--telemetry-interval must be 0 or more, not -1"),
        (["--telemetry-rows", "0"], "--telemetry-rows must be at least 1, not 0"),
    ],
)
def test_refused(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read([*TINY, *argv])


def test_the_interval_is_that_of_the_log() -> None:
    assert read([*TINY, "--log-interval", "7"]).telemetry_interval == 7


def test_speed_of_steps_of_several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a batch-size ramp, and with the time between steps left out."""
    clock = iter([10.0, 12.0, 100.0, 101.0])
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(clock))
    observer = speed.SpeedObserver(totals := Totals(1, torch.device("cpu")))
    for samples in (2, 4):
        with observer.step(samples):
            pass
    assert observer.samples == 6
    scalars = observer.findings(totals.reduce(), tokens=6 * 10, operations=9e12, devices=3).scalars
    assert scalars == {"throughput/tokens-per-second": 20.0, "throughput/tflops-per-device": 1.0}
    for rank in (1, 2):
        totals.add("ranks", 1, 1.0)
        totals.add("time forward", 1, float(rank))
        totals.raise_to("memory", 1, torch.tensor(float(rank)))
    times = observer.findings(totals.reduce(), 0, 0, 2).scalars
    assert (times["time/forward"], times["time/data"], times["memory/max-allocated"]) == (1.5, 0, 2)
    assert not any(tag.startswith("throughput") for tag in times)


def test_a_value_is_drawn_where_it_is() -> None:
    """Also by TensorBoard, which spreads a bin over the way from the limit before."""
    found = Histogram.of_values(torch.tensor([3.0, 100.0, 3.0, 7.0]))
    assert (found.lowest, sum(found.counts)) == (3, 4)
    drawn = report.Histogram(np.array(found.limits), np.array(found.counts), 3.0, 100.0, 28.25)
    edges = np.array([0.0, 2.5, 6.5, 7.5, 99.5, 100.5])
    assert shares(drawn, edges) == pytest.approx([0, 0.5, 0.25, 0, 0.25])


def test_peaks_by_name() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989
    assert peak_tflops("NVIDIA H100 PCIe") == 756
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312
    assert peak_tflops("NVIDIA GB200") == 2500
    assert peak_tflops("cpu") is None


def test_timers_inside_others_count_once() -> None:
    spent = {
        "forward-compute": 5.0,
        "batch-generator": 1.0,
        "backward-compute": 7.0,
        "forward-send-backward-recv": 0.5,
        "all-grads-sync": 0.25,
        "optimizer": 3.0,
        "params-all-gather": 1.0,
        "optimizer-inner-step": 1.5,
    }
    expected = {"data": 1.0, "forward": 4.0, "backward": 7.0, "communication": 1.75, "optimizer": 2.0}
    assert split(spent) == expected
