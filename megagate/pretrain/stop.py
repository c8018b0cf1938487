"""Save and end in time: on SIGTERM, on SIGUSR1, and before a time limit.

Megatron's --exit-signal-handler knows one signal and looks at it between steps only, and data-loader workers, which get
the signal too when a whole job gets it, die of another one. Its --exit-duration-in-mins is looked at during evaluation
as well, and all ranks agree on it. So a signal here means that the duration is over: the step, or the evaluation, that
is in progress is the last one, and a checkpoint is written.
"""

import argparse
import faulthandler
import functools
import importlib
import os
import signal
import threading
import time
from contextlib import ExitStack
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

from megagate.around import put_around
from megagate.supervise.records import END_TIME_VARIABLE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
FOREVER = 100 * 365 * 24 * 60
OVER = 1e-9
"""A duration, in minutes, that has passed. Megatron takes 0 for none."""

_received: str | None = None
_args: argparse.Namespace | None = None


def received() -> str | None:
    """Return the name of the signal that told this rank to end, if one did."""
    return _received


def install() -> None:
    """Note the signals from now on; a rank that is still starting ends after its first step.

    Processes that the rank starts, such as the one that checkpoints need, get the signals too when a whole job gets
    them. They inherit from this thread that it blocks them; another thread takes them for the rank.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _note)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    resource_tracker.ensure_running()  # Python unblocks SIGTERM when it starts this one, for whatever reason it does
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _note(number: int, frame: FrameType | None) -> None:
    global _received
    _received = signal.Signals(number).name
    if _args is not None:
        _args.exit_duration_in_mins = OVER


def over() -> None:
    """Ignore the signals from now on: Python, as it ends, would give them back their power to kill."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _note:
            signal.signal(number, signal.SIG_IGN)


def apply(args: argparse.Namespace, until_end: ExitStack) -> None:
    """Have Megatron's training loop end on a signal or at the time limit, and its data-loader workers live through it.

    Every rank of a run must call it: Megatron asks all ranks for the duration or none.
    """
    global _args
    training: Any = importlib.import_module("megatron.training.training")
    limits = [args.exit_duration_in_mins or FOREVER]
    if END_TIME_VARIABLE in os.environ:
        limits.append((float(os.environ[END_TIME_VARIABLE]) - training._TRAIN_START_TIME) / 60)
    args.exit_duration_in_mins = OVER if _received else max(OVER, min(limits))
    _args = args
    put_around(until_end, training, "build_pretraining_data_loader", _with_workers_that_stay)


def _with_workers_that_stay(original: Any) -> Any:
    @functools.wraps(original)
    def build(*positional: Any, **named: Any) -> Any:
        loader = original(*positional, **named)
        if getattr(loader, "num_workers", 0):
            loader.worker_init_fn = WorkerStart(loader.worker_init_fn)
        return loader

    return build


class WorkerStart:
    """What a data-loader worker does first."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, worker: int) -> None:
        """Run the loader's own start, then deal with signals."""
        if self.original is not None:
            self.original(worker)
        leave_signals_to(os.getppid())


def leave_signals_to(rank: int) -> None:
    """Have this process, which a rank has started, live through signals; only the rank, by its pid, can end it."""
    faulthandler.unregister(signal.SIGUSR2)  # it would answer in its rank's name when the run hangs
    for number in (signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # SIGTERM from the rank is how Python ends what it has started; from anyone else it is meant for the rank.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_with, args=(rank,), daemon=True).start()


def _end_with(rank: int) -> None:
    while True:
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == rank:
            os._exit(0)


def reached_time_limit() -> bool:
    """Whether the supervisor's time limit has passed."""
    return time.time() >= float(os.environ.get(END_TIME_VARIABLE, "inf"))
