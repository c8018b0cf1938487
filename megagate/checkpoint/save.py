"""Around Megatron's saving: room for it, a look at what was written before the tracker names it, and what stays.

Also for saves that go on in the background: then the look comes when the last of their files is written.
"""

import argparse
import functools
import importlib
import io
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from megagate.around import put_around
from megagate.checkpoint import keep
from megagate.checkpoint.load import TRACKER, missing_piece
from megagate.errors import UserError
from megagate.supervise.records import write_whole

WAITING_SHARE = 0.8
"""Of --distributed-timeout-minutes, after which the other ranks give up, to wait for room on a full disk."""
LOOK_AGAIN = 20.0
MARGIN = 1.05


def add_keep_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for how long checkpoints are kept."""
    group = parser.add_argument_group("checkpoints that are kept")
    group.add_argument(
        "--keep-last", type=int, metavar="N", help="remove older checkpoints than the last N (default: keep all)"
    )
    group.add_argument(
        "--keep-every", type=int, metavar="STEPS", help="with --keep-last, keep those at multiples of STEPS for ever"
    )


def check_keep(args: argparse.Namespace) -> None:
    """Raise UserError for flags that contradict each other."""
    if args.keep_every is not None and args.keep_last is None:
        raise UserError(f"--keep-every {args.keep_every} has no effect without --keep-last: add it")
    if args.keep_last is not None and args.save_retain_interval is not None:
        raise UserError("--keep-last and --save-retain-interval both remove checkpoints: leave one of them out")


def apply(until_end: ExitStack) -> None:
    """Put `Saving`, and a look at what was written, around Megatron's functions until the run's end.

    Every rank of a save must have it, or none.
    """
    training: Any = importlib.import_module("megatron.training.training")
    checkpointing: Any = importlib.import_module("megatron.training.checkpointing")
    saving = Saving(training.save_checkpoint)
    put_around(until_end, training, "save_checkpoint", lambda original: saving)
    put_around(until_end, checkpointing, "schedule_async_save", saving.ending)
    put_around(until_end, checkpointing.dist_checkpointing, "save", _looked_at)
    put_around(until_end, checkpointing, "maybe_msc", Files)


class Files:
    """Megatron's functions for files, but the tracker is at any moment the old one or the new one, and whole."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def open(self, path: str, mode: str = "r", *positional: Any, **named: Any) -> Any:
        """Open a file."""
        if mode == "w" and Path(path).name == TRACKER:
            return self._whole(Path(path))
        return self._original.open(path, mode, *positional, **named)

    @contextmanager
    def _whole(self, path: Path) -> Iterator[io.StringIO]:
        text = io.StringIO()
        yield text
        write_whole(path, text.getvalue())
        _to_disk(path.parent)


class Saving:
    """Megatron's save_checkpoint with room made before it, old checkpoints removed after it, and its time told."""

    def __init__(self, original: Any) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self._cleaned: str | None = None
        self._start = 0.0
        self._step = 0
        self._size = 0

    def __call__(self, iteration: int, *positional: Any, **named: Any) -> Any:
        """Save a checkpoint."""
        from megatron.training import get_args

        args = get_args()
        self._start, self._step = time.time(), iteration
        if args.save is not None and args.rank == 0:
            save = Path(args.save)
            if self._cleaned != args.save:  # before the first save none can be in progress
                self._cleaned = args.save
                _say("removed what an interrupted save left", keep.clean(save))
                _say("removed", keep.prune(save, args.keep_last, args.keep_every))
            if not self._size and (last := keep.tracked(save)):  # once: to look at each of its files takes time
                self._size = keep.size(keep.directory(save, last))
            wait_for_room(save, self._size, WAITING_SHARE * 60 * args.distributed_timeout_minutes)
        result = self.original(iteration, *positional, **named)
        if args.save is not None and args.rank == 0:
            seconds = time.time() - self._start
            if args.async_save:
                print(
                    f"megagate: training waited {seconds:.1f} s for the save of step {iteration} to begin", flush=True
                )
            else:
                print(f"megagate: saved step {iteration} in {seconds:.1f} s, in which training waited", flush=True)
                _say("removed", keep.prune(Path(args.save), args.keep_last, args.keep_every))
        return result

    def ending(self, original: Any) -> Any:
        """Wrap schedule_async_save, which hands a complete request to what saves in the background."""

        @functools.wraps(original)
        def schedule(request: Any) -> None:
            from megatron.training import get_args

            args, start, step = get_args(), self._start, self._step

            def end() -> None:
                if args.save is not None and args.rank == 0:
                    seconds = time.time() - start
                    print(f"megagate: saved step {step} in {seconds:.1f} s, in the background", flush=True)
                    _say("removed", keep.prune(Path(args.save), args.keep_last, args.keep_every))

            request.add_finalize_fn(end)
            original(request)

        return schedule


def _say(what: str, steps: list[int]) -> None:
    if steps:
        print(f"megagate: {what}: {', '.join(keep.directory(Path(), step).name for step in steps)}", flush=True)


def wait_for_room(save: Path, size: int, seconds: float) -> None:
    """Wait until there is room for a checkpoint.

    Args:
        save: the folder of checkpoints.
        size: bytes of an earlier one.
        seconds: how long.

    Raises:
        OSError: there is no room until then; nothing was written.
    """
    needed = size * MARGIN
    deadline = time.monotonic() + seconds
    while (free := shutil.disk_usage(save).free if save.is_dir() else needed) < needed:
        room = f"{save} has {free / 1e9:.2f} GB free, and a checkpoint needs {needed / 1e9:.2f} GB"
        if time.monotonic() > deadline:
            raise OSError(f"{room}: remove something, or use --keep-last")
        print(f"megagate: {room}; waiting for room", flush=True)
        time.sleep(LOOK_AGAIN)


def _looked_at(original: Any) -> Any:
    """Wrap dist_checkpointing.save, which returns when all is written, or returns the request to write it."""

    @functools.wraps(original)
    def save(state: Any, checkpoint: str, *positional: Any, **named: Any) -> Any:
        request = original(state, checkpoint, *positional, **named)
        if request is None:
            look_at(Path(checkpoint))
        else:
            request.add_finalize_fn(lambda: look_at(Path(checkpoint)))  # Megatron adds what moves the tracker after it
        return request

    return save


def look_at(checkpoint: Path) -> None:
    """Check on rank 0 that a checkpoint is whole, and have its small files on the disk, before the tracker names it.

    Every rank must call it.

    Raises:
        RuntimeError: it isn't whole; on every rank.
    """
    problem = None
    if _rank() == 0:
        problem = missing_piece(checkpoint)
        if problem is None:
            for path in (checkpoint / "metadata.json", checkpoint / ".metadata", checkpoint, checkpoint.parent):
                _to_disk(path)
    if torch.distributed.is_initialized():
        failed = torch.tensor([problem is not None], dtype=torch.int, device=torch.cuda.current_device())
        torch.distributed.broadcast(failed, 0)
        if failed.item():
            problem = problem or f"{checkpoint} is not whole: rank 0 says why"
    if problem is not None:
        raise RuntimeError(f"what was written is not what was to be saved: {problem}")


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
