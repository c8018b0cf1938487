"""Observers in Megatron's training loop: which steps they watch, and where their results go.

Megatron's loop looks its functions up when it calls them, so two of them are wrapped: the training step, which is
observed in one of --telemetry-interval steps, and the log, whose line gains what `ON_THE_LINE` names and which is
followed by scalars in TensorBoard and Weights & Biases, written by the rank that writes Megatron's own.
"""

import argparse
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
from megatron.training import training
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_timers, get_wandb_writer
from torch import nn

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
    if args.telemetry_rows < 1:
        raise UserError(f"--telemetry-rows must be at least 1, not {args.telemetry_rows}")


def apply() -> None:
    """Let Megatron's training loop be observed; idempotent, whatever else wraps its functions."""
    for name, wrap in (("train_step", _observed), ("training_log", _written), ("print_rank_last", _extended)):
        function = getattr(training, name)
        if not hasattr(function, "is_watched"):  # whatever functools.wraps has put around it has the mark too
            wrapped = wrap(function)
            wrapped.is_watched = True
            setattr(training, name, wrapped)


class Watch:
    """What is observed of one training run.

    Args:
        args: of the run.
        chunks: of the model on this rank.
    """

    def __init__(self, args: argparse.Namespace, chunks: list[nn.Module]) -> None:
        self.args = args
        self.telemetry = Telemetry(args, chunks, args.telemetry_rows)
        self.findings: Findings | None = None
        """Of the step that was observed last, until they are written."""
        writer = get_tensorboard_writer()
        if writer is not None:
            # Not the iteration of this step: --iterations-to-skip may leave out the first ones.
            forget_curves_after(args, args.iteration, Path(writer.file_writer.event_writer._file_name))

    def step(self, run: Callable[[], Any], iteration: int) -> Any:
        """Run a training step, observed if it is its turn, and return its result."""
        interval = self.args.telemetry_interval
        if not interval:
            return run()
        with self.telemetry.speed.step(get_current_running_global_batch_size()):
            if iteration % interval:
                return run()
            with self.telemetry.observing(), self.telemetry.speed.detailed(get_timers()):
                result = run()
        samples = self.telemetry.speed.samples
        operations = training.num_floating_point_operations(self.args, samples)
        world_size = torch.distributed.get_world_size()
        self.findings = self.telemetry.findings(samples * self.args.seq_length, operations, world_size)
        return result

    def line(self) -> str:
        """Return what the log line gains."""
        scalars = self.findings.scalars if self.findings else {}
        return "".join(f" {form.format(scalars[tag])} |" for tag, form in ON_THE_LINE.items() if tag in scalars)

    def write(self, iteration: int) -> None:
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


_watch: Watch | None = None


def forget() -> None:
    """Let go of the model that was watched last."""
    global _watch
    _watch = None


def _observed(original: Any) -> Any:
    @functools.wraps(original)
    def train_step(forward_step: Any, data_iterator: Any, model: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
        """Megatron's training step; `iteration` is that before it."""
        global _watch
        settings, iteration = get_args(), kwargs.get("iteration")
        run = functools.partial(original, forward_step, data_iterator, model, *args, **kwargs)
        if iteration is None or not hasattr(settings, "telemetry_interval"):
            return run()
        if _watch is None or _watch.args is not settings:
            _watch = Watch(settings, model)
        return _watch.step(run, iteration + 1)

    return train_step


def _written(original: Any) -> Any:
    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        """Megatron's log, and then ours; the fourth argument is the iteration."""
        result = original(*args, **kwargs)
        if _watch is not None and _watch.args is get_args():
            _watch.write(iteration=args[3])
        return result

    return training_log


def _extended(original: Any) -> Any:
    @functools.wraps(original)
    def print_rank_last(message: str, *args: Any, **kwargs: Any) -> Any:
        """Print; the line of an iteration with what was observed in it."""
        if _watch is not None and re.search(r"\] iteration +\d+/", message):
            message += _watch.line()
        return original(message, *args, **kwargs)

    return print_rank_last


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
