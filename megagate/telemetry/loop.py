"""Observers in Megatron's training loop: which steps they watch, and where their results go.

Megatron's loop looks its functions up when it calls them, so two of them are wrapped: the training step, which is
observed in one of --telemetry-interval steps, and the log, whose line gains what `ON_THE_LINE` names and which is
followed by scalars in TensorBoard and Weights & Biases, written by the rank that writes Megatron's own.
"""

import argparse
import functools
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
from megatron.training import training
from megatron.training.global_vars import get_tensorboard_writer, get_timers, get_wandb_writer
from torch import nn

from megagate.around import put_around
from megagate.errors import UserError
from megagate.telemetry.curves import drop_after
from megagate.telemetry.observer import Findings, Histogram
from megagate.telemetry.telemetry import Telemetry

ON_THE_LINE = {
    "gate/mean-score": "gate score: {:.3f}",
    "attention/first-token-share": "first-token share: {:.4f}",
    "activation/max": "max activation: {:.4g}",
    "experts/max-to-mean-load": "max/mean expert load: {:.2f}",
    "throughput/tokens-per-second": "tokens/s: {:.0f}",
}
"""What the iteration's line shows of the results, and how."""


def add_telemetry_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of telemetry."""
    group = parser.add_argument_group("telemetry")
    group.add_argument(
        "--telemetry-interval",
        type=int,
        metavar="N",
        help="observe gates, attention, activations, experts and speed every N steps (--log-interval); 0 for never",
    )
    group.add_argument(
        "--telemetry-rows",
        type=int,
        default=16,
        metavar="N",
        help="rows of a sequence that are looked at after the first ones (16); the sequence length for all",
    )


def check_telemetry(args: argparse.Namespace) -> None:
    """Set the default interval, and raise UserError for a number that makes no sense."""
    if args.telemetry_interval is None:
        args.telemetry_interval = args.log_interval
    if args.telemetry_interval < 0:
        raise UserError(f"--telemetry-interval must be 0 or more, not {args.telemetry_interval}")


def apply(args: argparse.Namespace, until_end: ExitStack) -> None:
    """Let Megatron's training loop be observed until the run's end."""
    watch = Watch(args)
    put_around(until_end, training, "train_step", watch.around_step)
    put_around(until_end, training, "training_log", watch.around_log)
    put_around(until_end, training, "print_rank_last", watch.around_line)


class Watch:
    """What is observed of one training run, and the functions of its loop with that.

    Args:
        args: of the run.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.telemetry: Telemetry | None = None
        """From the first step on, which brings the model."""
        self.findings: Findings | None = None
        """Of the step that was observed last, until they are written."""

    def around_step(self, original: Any) -> Any:
        """Return Megatron's training step, observed if it is its turn; `iteration` is that before it."""

        @functools.wraps(original)
        def train_step(forward_step: Any, data_iterator: Any, model: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
            if self.telemetry is None:
                self.telemetry = self._begin(model)
            run = functools.partial(original, forward_step, data_iterator, model, *args, **kwargs)
            return self._step(self.telemetry, run, kwargs["iteration"] + 1)

        return train_step

    def around_log(self, original: Any) -> Any:
        """Return Megatron's log, and then ours; the fourth argument is the iteration."""

        @functools.wraps(original)
        def training_log(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._write(iteration=args[3])
            return result

        return training_log

    def around_line(self, original: Any) -> Any:
        """Return Megatron's printing; the line of an iteration shows what was observed in it."""

        @functools.wraps(original)
        def print_rank_last(message: str, *args: Any, **kwargs: Any) -> Any:
            if re.search(r"\] iteration +\d+/", message):
                message += self._line()
            return original(message, *args, **kwargs)

        return print_rank_last

    def _begin(self, chunks: list[nn.Module]) -> Telemetry:
        writer = get_tensorboard_writer()
        if writer is not None:
            # Not the iteration of this step: --iterations-to-skip may leave out the first ones.
            forget_curves_after(self.args, self.args.iteration, Path(writer.file_writer.event_writer._file_name))
        return Telemetry(self.args, chunks, self.args.telemetry_rows)

    def _step(self, telemetry: Telemetry, run: Callable[[], Any], iteration: int) -> Any:
        interval = self.args.telemetry_interval
        if not interval:
            return run()
        with telemetry.speed.step(get_current_running_global_batch_size()):
            if iteration % interval:
                return run()
            with telemetry.observing(), telemetry.speed.detailed(get_timers()):
                result = run()
        samples = telemetry.speed.samples
        operations = training.num_floating_point_operations(self.args, samples)
        world_size = torch.distributed.get_world_size()
        self.findings = telemetry.findings(samples * self.args.seq_length, operations, world_size)
        return result

    def _line(self) -> str:
        scalars = self.findings.scalars if self.findings else {}
        return "".join(f" {form.format(scalars[tag])} |" for tag, form in ON_THE_LINE.items() if tag in scalars)

    def _write(self, iteration: int) -> None:
        """Write the findings once, where this rank has a writer."""
        found, self.findings = self.findings, None
        writer, wandb_writer = get_tensorboard_writer(), get_wandb_writer()
        if found is None:
            return
        if writer:
            for tag, value in found.scalars.items():
                writer.add_scalar(tag, value, iteration)
            for tag, histogram in found.histograms.items():
                write_histogram(writer, tag, histogram, iteration)
        if wandb_writer:
            wandb_writer.log(found.scalars, iteration)


def forget_curves_after(args: argparse.Namespace, iteration: int, own: Path) -> None:
    """Take what an earlier attempt wrote after `iteration` out of the curves, and say where it is."""
    kept = drop_after(Path(args.tensorboard_dir), iteration, own)
    if kept:
        print(
            f"megagate: the curves in {args.tensorboard_dir} go on from iteration {iteration}; what an earlier attempt "
            f"wrote after it is kept in {', '.join(path.name for path in kept)}",
            flush=True,
        )


def write_histogram(writer: Any, tag: str, histogram: Histogram, iteration: int) -> None:
    """Write a histogram, with sums over the centers of its bins."""
    pairs = list(zip(histogram.centers, histogram.counts, strict=True))
    writer.add_histogram_raw(
        tag,
        min=histogram.lowest,
        max=histogram.limits[-1],
        num=sum(histogram.counts),
        sum=sum(center * count for center, count in pairs),
        sum_squares=sum(center * center * count for center, count in pairs),
        bucket_limits=histogram.limits,
        bucket_counts=histogram.counts,
        global_step=iteration,
    )
