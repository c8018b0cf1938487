"""A signal, or the time limit, ends a run with a checkpoint: in training and evaluation, with data-loader workers."""

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from megagate.checkpoint import keep
from megagate.pretrain import stop
from tests.distributed import run_distributed
from tests.training import TINY, train

LONG = "--train-iters 3000 --save-interval 3000 --num-workers 1 --eval-interval 3000 --eval-iters 0".split()
"""More than a test has time for."""


def told_in_rank(argv: list[str], number: int | None, during: str, rank: int) -> tuple[int, int]:
    """Train in a rank that is told to end, its workers first; return the steps done and the evaluation's samples."""
    import psutil
    from megatron.training import get_args
    from torch import distributed

    def tell() -> None:
        name = "curr_iteration" if during == "training" else "consumed_valid_samples"
        while not getattr(get_args(), name, 0):
            time.sleep(0.05)
        rank = psutil.Process()  # whose other children come from earlier tests
        workers = [str(child.pid) for child in rank.children() if child.cmdline() == rank.cmdline()]
        assert workers
        for processes in (workers, [str(os.getpid())]):  # by another process: a worker obeys its rank
            subprocess.run(["kill", f"-{int(number)}", *processes], check=True)
            time.sleep(0.5)

    stop.install()
    stop._received = None
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)  # as in a process that a launcher has started
    try:
        if number is not None and distributed.get_rank() == rank:
            import megatron.training.training as training

            original = training.train

            def telling(*positional, **named):
                threading.Thread(target=tell, daemon=True).start()
                return original(*positional, **named)

            training.train = telling
            try:
                train(argv)
            finally:
                training.train = original
        else:
            train(argv)
    finally:
        multiprocessing.set_start_method(method, force=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop.STOP_SIGNALS)
        for each in stop.STOP_SIGNALS:
            signal.signal(each, signal.SIG_DFL)
    args = get_args()
    return args.curr_iteration + 1, args.consumed_valid_samples


@pytest.mark.parametrize(
    ("number", "during"),
    [
        (signal.SIGTERM, "evaluation"),
        pytest.param(signal.SIGUSR1, "training", marks=pytest.mark.full),
        pytest.param(signal.SIGUSR1, "evaluation", marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, "training", marks=pytest.mark.full),
    ],
)
def test_a_signal_to_one_rank(number: signal.Signals, during: str, tmp_path: Path) -> None:
    evaluation = "--eval-interval 2 --eval-iters 3000".split() if during == "evaluation" else []
    argv = [*TINY, *LONG, *evaluation, "--save", str(tmp_path)]
    (step, samples), other = run_distributed(told_in_rank, 2, argv, number, during, 1, timeout=150)
    assert (step, samples) == other
    assert keep.tracked(tmp_path) == step < 3000
    assert list(keep.complete_steps(tmp_path)) == [step]
    if during == "evaluation":
        assert step == 2 and 0 < samples < 3000 * 4


def test_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [*TINY, *LONG, "--num-workers", "0", "--save", str(tmp_path)]
    environment = {stop.END_TIME_VARIABLE: f"{time.time() + 3:.0f}"}
    (step, _), _ = run_distributed(with_environment, 2, environment, argv, timeout=150)
    assert keep.tracked(tmp_path) == step < 3000


def with_environment(environment: dict[str, str], argv: list[str]) -> tuple[int, int]:
    """Train in a rank with variables in the environment."""
    from unittest import mock

    with mock.patch.dict(os.environ, environment):
        return told_in_rank(argv, None, "training", 0)
