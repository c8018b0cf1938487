"""Saving in the background: when it is on, and the process of each rank that writes.

Megatron starts that process, and another that passes on what was written, and waits for them without a look at whether
they are alive. Here they live through signals that are meant for their rank and end when it does, however it does, and
the death of the one that writes ends the rank.
"""

import argparse
import functools
import importlib
import multiprocessing
import os
import sys
import threading
import time
from contextlib import ExitStack
from multiprocessing import connection
from multiprocessing.managers import SyncManager
from typing import Any

from megagate.around import put_around
from megagate.errors import UserError
from megagate.platform import on_cpu
from megagate.pretrain import stop
from megagate.processes import end_with
from megagate.supervise.records import write_outcome

GRACE = 5.0
"""Seconds between the end of the process and the question whether training has ended it."""


def add_background_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag that turns saving in the background off."""
    group = parser.add_argument_group("saving in the background")
    group.add_argument(
        "--no-async-save",
        action="store_false",
        dest="async_save",
        help="have training wait until a checkpoint is written (default: --async-save on GPUs, so that it does not)",
    )
    parser.set_defaults(async_save=None, async_strategy="mcore")


def choose(args: argparse.Namespace) -> None:
    """Set whether checkpoints are written in the background, and what Megatron needs for it.

    Raises:
        UserError: they are to be, in a format that Megatron cannot write so.
    """
    if args.async_save is None:
        args.async_save = args.save is not None and args.ckpt_format == "torch_dist" and not on_cpu()
    if not args.async_save:
        return
    if args.ckpt_format != "torch_dist":
        raise UserError(f"--async-save cannot write --ckpt-format {args.ckpt_format}: leave one of them out")
    args.use_persistent_ckpt_worker = True


def apply(args: argparse.Namespace, until_end: ExitStack) -> None:
    """Look after the processes that Megatron starts for its saves, until the run's end."""
    writer: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    put_around(until_end, writer, "get_write_results_queue", functools.partial(_ending_with_rank, writer))
    if not args.async_save:
        return
    callers: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.async_utils")
    initialize: Any = importlib.import_module("megatron.training.initialize")
    put_around(until_end, callers.PersistentAsyncCaller, "async_loop", lambda original: work)
    put_around(until_end, initialize, "init_persistent_async_worker", functools.partial(_watched, callers))


def work(*positional: Any) -> None:
    """Be the process: write what the rank hands over, until it says that this was all."""
    rank = multiprocessing.parent_process()
    assert rank is not None and rank.pid is not None
    belong_to(rank.pid)
    if on_cpu():
        from megagate.platform import cpu

        cpu.activate_training()
    callers: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.async_utils")
    callers.PersistentAsyncCaller.async_loop(*positional)


def belong_to(rank: int) -> None:
    """Have this process live as long as its rank, of the pid `rank`: through signals, and not after it."""
    stop.leave_signals_to(rank)
    end_with(rank)


def _ending_with_rank(writer: Any, original: Any) -> Any:
    """Stand for get_write_results_queue, of which there is one for all saves of a rank."""

    @functools.wraps(original)
    def queue(mp_mode: str = "spawn") -> Any:
        if writer._results_queue is None:
            manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
            manager.start(belong_to, (os.getpid(),))
            writer._results_queue = manager.Queue()
        return writer._results_queue

    return queue


def _watched(callers: Any, original: Any) -> Any:
    @functools.wraps(original)
    def start(rank: int, *positional: Any, **named: Any) -> None:
        original(rank, *positional, **named)
        process = callers.PersistentAsyncCaller._persistent_process
        threading.Thread(target=_end_with, args=(callers, process, rank), daemon=True).start()

    return start


def _end_with(callers: Any, process: Any, rank: int) -> None:
    connection.wait([process.sentinel])
    time.sleep(GRACE)
    if callers.PersistentAsyncCaller._persistent_process is not process:  # it was told to end
        return
    sentence = f"the process that writes the checkpoints of rank {rank} in the background died: is there memory for it?"
    write_outcome("failed", rank, sentence)
    print(f"megagate: {sentence}", file=sys.stderr, flush=True)
    os._exit(1)
