"""What a rank tells its supervisor: each step that is done, how it ended, and where it is when it hangs.

Without a supervisor nothing is written.
"""

import argparse
import faulthandler
import functools
import importlib
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megagate.around import put_around
from megagate.pretrain import stop
from megagate.supervise.records import ProgressFile, directory, host, write_outcome

HANG_SIGNAL = signal.SIGUSR2
"""Asks a rank for the stacks of its threads."""

RERUN = {
    16: "NaN or infinity, again when the step was computed again; another GPU has to compute it",
    17: "NaN or infinity that Megatron's rerun state machine puts down to this GPU, or to the model",
}
"""Megatron's exit codes for results that it does not accept."""

_stacks: Any = None  # stays open: the handler writes to it


def answer_hangs(folder: Path, rank: int) -> None:
    """Write the stacks of all threads to a file of this rank whenever `HANG_SIGNAL` comes."""
    global _stacks
    path = folder / "stacks" / f"rank_{rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    _stacks = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
    _stacks.write(f"{host()}\n")
    faulthandler.register(HANG_SIGNAL, file=_stacks, all_threads=True)


def apply(args: argparse.Namespace, until_end: ExitStack) -> None:
    """Note each step of the training loop on rank 0, until the run's end."""
    folder = directory()
    if folder is None:
        return
    answer_hangs(folder, args.rank)
    if args.rank == 0:
        training: Any = importlib.import_module("megatron.training.training")
        put_around(until_end, training, "train_step", functools.partial(_noted, folder))


def _noted(folder: Path, original: Any) -> Any:
    progress: list[ProgressFile] = []

    @functools.wraps(original)
    def noting_the_step(*positional: Any, iteration: int, **named: Any) -> Any:
        if not progress:
            progress.append(ProgressFile(folder, iteration))
        result = original(*positional, iteration=iteration, **named)
        progress[0].step(iteration + 1)
        return result

    return noting_the_step


def finished(args: argparse.Namespace, rank: int, asked_duration: int | None, ended_early: bool) -> None:
    """Write on rank 0 how training ended.

    Args:
        args: Megatron's, after the training.
        rank: this rank.
        asked_duration: --exit-duration-in-mins as the user gave it.
        ended_early: before the last step.
    """
    if rank != 0:
        return
    step = getattr(args, "curr_iteration", args.iteration - 1) + 1
    if not ended_early:
        write_outcome("finished", rank, step=step)
        return
    asked = bool(args.exit_interval and step % args.exit_interval == 0) or (
        asked_duration is not None and stop.received() is None and not stop.reached_time_limit()
    )
    write_outcome("asked" if asked else "stopped", rank, stop.received() or "", step=step)


def failed(rank: int, status: Any) -> None:
    """Write on rank 0 what an exit status of Megatron's training loop means."""
    if rank == 0 and status in RERUN:
        write_outcome("failed", rank, RERUN[status])
