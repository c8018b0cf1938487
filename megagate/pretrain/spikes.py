"""Loss spikes and NaN: noticed on every rank alike, and dealt with as --spike-policy says.

    continue    say so in the log and go on
    skip        go back to the last checkpoint before the spike, and leave out the batches of the spike
    rollback    go back --spike-rollback checkpoints before it, and leave out all batches from there to the spike's end

To go back, the run ends with status `EXIT_SPIKE`; the supervisor, or whoever starts it again, has it go on. Steps to
leave out stand in SAVE/skipped_iterations.json, and every later start leaves them out too, counting their samples as
seen (Megatron's --iterations-to-skip).
"""

import argparse
import functools
import importlib
import json
import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megagate.around import put_around
from megagate.checkpoint import keep
from megagate.errors import UserError
from megagate.supervise.records import write_outcome, write_whole

EXIT_SPIKE = 76
SKIPPED = "skipped_iterations.json"
TENSORBOARD_TAG = "skipped iterations"
DECAY = 0.98
"""Of the averages of loss and gradient norm, a step."""
NORM_FACTOR = 10.0
"""A gradient norm of so many times its average belongs to a spike."""
SMALLEST_DEVIATION = 0.005
"""Of the mean loss: a loss that hardly varies does not make a spike of everything."""


def add_spike_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("loss spikes")
    group.add_argument(
        "--spike-policy",
        choices=("continue", "skip", "rollback"),
        default="continue",
        help="what to do when the loss or the gradient norm jumps, or is NaN: go on; go back to the last checkpoint "
        "and skip the batches at fault; go back --spike-rollback checkpoints and skip all batches up to there",
    )
    group.add_argument("--spike-rollback", type=int, default=1, metavar="K", help="checkpoints to go back (default: 1)")
    group.add_argument(
        "--spike-deviations", type=float, default=6.0, help="standard deviations above the smoothed loss (default: 6)"
    )
    group.add_argument("--spike-patience", type=int, default=3, help="such steps in a row (default: 3)")
    group.add_argument(
        "--spike-warmup", type=int, default=200, help="first steps of a run, without judgement (default: 200)"
    )


def check_spikes(args: argparse.Namespace) -> None:
    """Check the flags, and add what earlier spikes have made the run leave out.

    Raises:
        UserError: going back has nowhere to go, or the file of what is left out is damaged.
    """
    if args.spike_policy != "continue" and args.save is None:
        raise UserError(f"--spike-policy {args.spike_policy} goes back to a checkpoint: add --save")
    for first, last in read_skipped(args.save):
        args.iterations_to_skip = sorted({*args.iterations_to_skip, *range(first, last + 1)})


def read_skipped(save: str | None) -> list[tuple[int, int]]:
    """Return the ranges of steps, first and last, that a run leaves out.

    Raises:
        UserError: the file is damaged.
    """
    if save is None or not (Path(save) / SKIPPED).is_file():
        return []
    path = Path(save) / SKIPPED
    try:
        return [(int(first), int(last)) for first, last in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} must be a list of [first, last] steps to skip: correct it ({error})") from error


type Averages = tuple[int, float, float, float, float]
"""Steps that went in, mean of the loss, half its mean squared change, mean of the gradient norm, last loss."""


@dataclass(frozen=True)
class Spike:
    """Steps at fault and what was seen there."""

    first: int
    last: int
    message: str


class Detector:
    """Judges each step by its loss and gradient norm; equal numbers give equal judgements.

    Args:
        deviations: --spike-deviations.
        patience: --spike-patience.
        warmup: --spike-warmup.
        averages: of an earlier detector, to go on with.
    """

    def __init__(self, deviations: float, patience: int, warmup: int, averages: Averages | None = None) -> None:
        self.deviations, self.patience, self.warmup = deviations, patience, warmup
        self._seen, self._loss, self._variance, self._norm, self._last = averages or (0, 0.0, 0.0, 0.0, 0.0)
        self._run: list[str] = []

    @property
    def averages(self) -> Averages:
        """What it compares the next step with."""
        return self._seen, self._loss, self._variance, self._norm, self._last

    def judge(self, step: int, loss: float, norm: float) -> Spike | None:
        """Take a step's loss and gradient norm, and return the spike that it completes, if any."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Spike(step - len(self._run), step, f"loss {loss:g}, gradient norm {norm:g}")
        problem = self._problem(loss, norm) if self._seen >= self.warmup else None
        if problem is not None:
            self._run.append(problem)
            if len(self._run) < self.patience:
                return None
            spike = Spike(step - len(self._run) + 1, step, self._run[0])
            self._run, self._seen = [], 0  # what follows has a level of its own
            return spike
        self._run = []
        self._seen += 1
        weight = max(1 - DECAY, 1 / self._seen)
        self._norm += weight * (norm - self._norm)
        self._loss += weight * (loss - self._loss)
        if self._seen > 1:  # from step to step: a loss that falls fast is not one that scatters
            weight = max(1 - DECAY, 1 / (self._seen - 1))
            self._variance += weight * ((loss - self._last) ** 2 / 2 - self._variance)
        self._last = loss
        return None

    def _problem(self, loss: float, norm: float) -> str | None:
        deviation = max(math.sqrt(self._variance), SMALLEST_DEVIATION * abs(self._loss))
        if loss > self._loss + self.deviations * deviation:
            return f"loss {loss:.4g}, {(loss - self._loss) / deviation:.0f} deviations above {self._loss:.4g}"
        if norm > NORM_FACTOR * self._norm:
            return f"gradient norm {norm:.4g}, {norm / self._norm:.0f} times its average"
        return None


_spike: Spike | None = None


def apply(args: argparse.Namespace, until_end: ExitStack) -> None:
    """Judge each step of the training loop until the run's end."""
    global _spike
    _spike = None
    training: Any = importlib.import_module("megatron.training.training")
    _show_skipped(args)
    put_around(until_end, training, "train_step", functools.partial(_judged, args))


def _judged(args: argparse.Namespace, original: Any) -> Any:
    # A checkpoint holds the arguments, and so the averages.
    args.spike_averages = getattr(args, "spike_averages", None)
    detector = Detector(args.spike_deviations, args.spike_patience, args.spike_warmup, args.spike_averages)

    @functools.wraps(original)
    def judged(*positional: Any, iteration: int, **named: Any) -> Any:
        global _spike
        losses, skipped, should_save, should_exit, status, norm, *rest = original(
            *positional, iteration=iteration, **named
        )
        step, goes_back = iteration + 1, args.spike_policy != "continue"
        rerun: Any = importlib.import_module("megatron.core.rerun_state_machine")
        if should_exit:  # Megatron has found NaN, and after computing the step again has found it again
            if goes_back and status == rerun.EXIT_CODE_RESUME_TO_DISAMBIGUATE:
                _spike = Spike(step, step, "NaN or infinity, again when the step was computed again")
                should_save, status = False, EXIT_SPIKE
        else:
            spike = detector.judge(step, *_common(losses, norm))
            args.spike_averages = detector.averages
            if spike is not None and args.rank == 0:
                print(f"megagate: spike at steps {spike.first}-{spike.last}: {spike.message}", flush=True)
            if spike is not None and goes_back:
                _spike, should_save, should_exit, status = spike, False, True, EXIT_SPIKE
        return losses, skipped, should_save, should_exit, status, norm, *rest

    return judged


def _common(losses: dict[str, torch.Tensor], norm: Any) -> tuple[float, float]:
    """Return loss and gradient norm, which not every rank has, as all ranks see them."""
    loss = losses.get("lm loss")
    values = [-math.inf if value is None else float(value) for value in (loss, norm)]
    bad = [float(math.isnan(value) or value == math.inf) for value in values]
    seen = [-math.inf if is_bad else value for value, is_bad in zip(values, bad, strict=True)]
    shared = torch.tensor([*seen, *bad], dtype=torch.float64, device=torch.cuda.current_device())
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    both = shared.tolist()
    found = [math.nan if is_bad else value for value, is_bad in zip(both[:2], both[2:], strict=True)]
    return found[0], found[1]


def _show_skipped(args: argparse.Namespace) -> None:
    if not args.iterations_to_skip:
        return
    from megatron.training.global_vars import get_tensorboard_writer

    if args.rank == 0:
        print(f"megagate: skipping the steps {_ranges(args.iterations_to_skip)}", flush=True)
    writer = get_tensorboard_writer()
    for step in args.iterations_to_skip if writer else []:
        writer.add_scalar(TENSORBOARD_TAG, 1, step)


def _ranges(steps: list[int]) -> str:
    """Return sorted steps in short: 1-3, 7."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def go_back(args: argparse.Namespace) -> None:
    """On rank 0, after the run has ended for a spike: choose the checkpoint to go on from, and note what to skip."""
    if _spike is None or args.rank != 0:
        return
    save = Path(args.save)
    back = args.spike_rollback - 1 if args.spike_policy == "rollback" else 0
    target = keep.roll_back(save, back, before=_spike.first)
    first = target + 1 if args.spike_policy == "rollback" else _spike.first
    ranges = [*read_skipped(args.save), (first, _spike.last)]
    write_whole(save / SKIPPED, json.dumps(ranges))
    print(
        f"megagate: going back to step {target} for a spike ({_spike.message}); steps {first}-{_spike.last} will be "
        "skipped",
        flush=True,
    )
    write_outcome("spike", args.rank, _spike.message, step=_spike.last, first=first, last=_spike.last, target=target)
