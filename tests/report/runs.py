"""Event files of made-up runs, written as Megatron writes them: by SummaryWriter, scalars over steps and samples."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

BATCH, SEQUENCE = 8, 64
ARGUMENTS = {"seq_length": SEQUENCE, "global_batch_size": BATCH, "gate_preset": "sdpa-headwise", "lr": 0.001, "rank": 0}


class Writer:
    """One start of a run: a new event file in `directory`."""

    def __init__(self, directory: Path, arguments: Mapping[str, Any] = ARGUMENTS, iteration: int = 0) -> None:
        """Begin after `iteration`."""
        self._writer = SummaryWriter(str(directory))
        for name, value in arguments.items():
            self._writer.add_text(name, str(value), global_step=iteration)

    def scalar(self, tag: str, value: float, step: int) -> None:
        self._writer.add_scalar(tag, value, step)

    def histogram(self, tag: str, values: np.ndarray, step: int) -> None:
        self._writer.add_histogram(tag, values, step)

    def both(self, tag: str, value: float, step: int, samples: int) -> None:
        """Write as Megatron does what is seen over samples too."""
        self.scalar(tag, value, step)
        self.scalar(f"{tag} vs samples", value, samples)

    def steps(self, tag: str, values: Sequence[float], first: int = 1, batch: int = BATCH) -> None:
        for step, value in enumerate(values, start=first):
            self.both(tag, value, step, step * batch)

    def close(self) -> None:
        self._writer.close()


def write_whole(directory: Path, seed: int, *, is_gated: bool, iterations: int = 120, **arguments: Any) -> None:
    """Write a run with every tag that training and telemetry know; an ungated one has no gate/."""
    random = np.random.default_rng(seed)
    preset = "sdpa-headwise" if is_gated else "baseline"
    writer = Writer(directory, {**ARGUMENTS, "gate_preset": preset, "seed": seed, **arguments})
    blocks, heads, experts = 4, 8, 16
    every = iterations // 12
    for step in range(1, iterations + 1):
        progress = step / iterations
        loss = 2.5 + 6 * np.exp(-6 * progress) + 0.03 * random.standard_normal()
        samples = step * BATCH
        writer.both("learning-rate", 1e-3 * min(1.0, 10 * progress) * (1.1 - progress), step, samples)
        writer.both("batch-size", BATCH, step, samples)
        writer.both("lm loss", loss + (3.0 if not is_gated and step == 3 * iterations // 4 else 0.0), step, samples)
        writer.both("grad-norm", float(np.exp(random.normal(0, 0.2))), step, samples)
        writer.scalar("iteration-time", 0.1 + 0.01 * random.random(), step)
        writer.scalar("load_balancing_loss", 1 + 0.1 * random.random(), step)
        if step % every == 0:
            telemetry(writer, random, step, progress, is_gated, blocks, heads, experts)
        if step % (4 * every) == 0:
            writer.both("lm loss validation", loss + 0.1, step, samples)
    writer.close()


def telemetry(
    writer: Writer, random: Any, step: int, progress: float, is_gated: bool, blocks: int, heads: int, experts: int
) -> None:
    """Write what the observers log on one step."""
    sink = (0.05 if is_gated else 0.5) * progress + 0.02
    means = {
        "attention/first-token-share": sink,
        "attention/first-token-share-all-rows": sink + 0.02,
        "attention/first-token-share-uniform": 0.02,
        "attention/entropy": 3 - progress,
        "attention/max-logit": 10 + 10 * progress,
        "activation/max": 10 + (80 if is_gated else 900) * progress,
        "activation/max-to-median": 20 + (80 if is_gated else 2000) * progress,
        "experts/max-to-mean-load": 1.5 - 0.3 * progress,
        "experts/dead": 0.0,
        "experts/router-entropy": 2.0 + 0.1 * progress,
        "experts/drop-rate": 0.0,
    }
    if is_gated:
        means |= {
            "gate/mean-score": 0.5 - 0.35 * progress,
            "gate/share-below-0.1": 0.6 * progress,
            "gate/share-below-0.01": 0.2 * progress,
            "gate/magnitude-before": 0.7,
            "gate/magnitude-after": 0.7 - 0.5 * progress,
        }
    for tag, mean in means.items():
        writer.scalar(tag, mean, step)
        if not tag.endswith("uniform"):
            for block in range(1, blocks + 1):
                writer.scalar(f"{tag}/layer-{block:02}", mean * (0.8 + 0.1 * block), step)
    for block in range(1, blocks + 1):
        writer.histogram(f"experts/tokens/layer-{block:02}", random.poisson(40, experts).astype(float), step)
        if is_gated:
            scores = random.beta(1, 1 + 6 * progress, size=(200, heads))
            writer.histogram(f"gate/scores/layer-{block:02}", scores, step)
            for head, mean in enumerate(scores.mean(axis=0)):
                writer.scalar(f"gate/head-mean/layer-{block:02}/head-{head:02}", mean, step)
    writer.scalar("throughput/tokens-per-second", 5000 + 100 * random.random(), step)
    writer.scalar("throughput/tflops-per-device", 300 + 5 * random.random(), step)
    writer.scalar("throughput/mfu", 0.3 + 0.01 * random.random(), step)
    for part, seconds in {
        "data": 0.01,
        "forward": 0.3,
        "backward": 0.55,
        "optimizer": 0.05,
        "communication": 0.1,
    }.items():
        writer.scalar(f"time/{part}", seconds + 0.005 * random.random(), step)
    writer.scalar("memory/max-allocated", 60.0, step)
