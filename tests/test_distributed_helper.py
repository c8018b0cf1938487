"""The helper that the distributed tests stand on: results, failures, time-outs, and what is left after each."""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

from tests.distributed import MEGATRON_RESETS, ROOT, RankError, RankTimeoutError, run_distributed


class OddError(Exception):
    """Cannot be unpickled: its constructor wants more than its message."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def sum_of_ranks(scale: float) -> tuple[int, int, torch.Tensor]:
    value = torch.full((3,), scale * (torch.distributed.get_rank() + 1))
    torch.distributed.all_reduce(value)
    return torch.distributed.get_rank(), torch.distributed.get_world_size(), value


def process_id() -> int:
    return os.getpid()


def fail_on(rank: int, error: Exception) -> None:
    """Raise `error` on one rank while the others wait for it in a collective."""
    if torch.distributed.get_rank() == rank:
        print("about to fail")
        raise error
    torch.distributed.barrier()


def drop_first(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    importlib.import_module("megatron.core")  # changes how tensors are pickled

    return [tensor[1:] for tensor in tensors]


def raise_odd_error() -> None:
    raise OddError(1, 2)


def fail_while_others_sleep() -> None:
    store = torch.distributed.distributed_c10d._get_default_store()
    if torch.distributed.get_rank() == 1:
        store.wait(["asleep"])
        raise ValueError("boom")
    store.set("asleep", "")
    time.sleep(100)


def die_on(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def wait_for_nobody() -> None:
    """Rank 0 leaves; the others wait for it in a collective."""
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()


def start_sleeping_child(directory: str) -> None:
    child = subprocess.Popen(["sleep", "100"])
    Path(directory, f"child-{torch.distributed.get_rank()}").write_text(f"{child.pid} {os.getpid()}")
    time.sleep(100)


def fork_child() -> int:
    """As Megatron's checkpoint writer does: put a value in a queue from a forked process."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=results.put, args=(torch.distributed.get_rank(),))
    child.start()
    value = results.get(timeout=30)
    child.join(30)
    return value


def change_everything() -> None:
    os.environ["MEGAGATE_TEST_LEFTOVER"] = "1"
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.rand(5)


def observe_everything() -> tuple:
    return (
        os.environ.get("MEGAGATE_TEST_LEFTOVER"),
        os.getcwd(),
        signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.rand(5).tolist(),
    )


def initialize_megatron(tensor_parallel: int) -> tuple[int, int]:
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    assert not parallel_state.model_parallel_is_initialized()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    init_num_microbatches_calculator(
        torch.distributed.get_rank(), None, 8, 1, parallel_state.get_data_parallel_world_size()
    )
    value = torch.tensor([torch.distributed.get_rank()])
    torch.distributed.all_reduce(value, group=parallel_state.get_tensor_model_parallel_group())
    return parallel_state.get_tensor_model_parallel_rank(), value.item()


def import_all_reset_modules() -> list[bool]:
    return [callable(getattr(importlib.import_module(module), name, None)) for module, name in MEGATRON_RESETS]


def process_groups_and_environment() -> tuple[str, str, str]:
    timeout = timedelta(seconds=30)
    torch.distributed.new_group([0], timeout=timeout)
    return os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_in_rank_order(world_size):
    results = run_distributed(sum_of_ranks, world_size, scale=0.5)
    total = 0.5 * sum(range(1, world_size + 1))
    for rank, (own_rank, size, value) in enumerate(results):
        assert (own_rank, size) == (rank, world_size)
        torch.testing.assert_close(value, torch.full((3,), total))


def test_tensors_travel_as_ordinary_tensors():
    tensors = [torch.arange(4).to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool)]
    for results in run_distributed(drop_first, 2, tensors):
        for tensor, result in zip(tensors, results, strict=True):
            assert (result.dtype, result.device.type, type(result)) == (tensor.dtype, "cpu", torch.Tensor)
            assert torch.equal(result.float(), tensor[1:].float())


def test_ranks_are_reused_for_every_world_size():
    processes = run_distributed(process_id, 4)
    assert len(set(processes)) == 4
    assert os.getpid() not in processes
    assert run_distributed(process_id, 2) == processes[:2]
    assert run_distributed(process_id, 1) == processes[:1]
    assert run_distributed(process_id, 4) == processes


def test_ranks_see_the_environment_of_torchrun_and_of_this_process(monkeypatch, tmp_path):
    assert run_distributed(process_groups_and_environment, 2) == [("0", "0", "2"), ("1", "1", "2")]
    monkeypatch.setenv("MEGAGATE_TEST_LEFTOVER", "here")
    monkeypatch.chdir(tmp_path)
    assert run_distributed(observe_everything, 1)[0][:2] == ("here", str(tmp_path))


def test_a_failing_rank_is_named_and_the_others_do_not_wait():
    run_distributed(process_id, 4)
    start = time.monotonic()
    with pytest.raises(ValueError, match="wrong on purpose") as caught:
        run_distributed(fail_on, 4, 2, ValueError("wrong on purpose"))
    assert time.monotonic() - start < 60
    notes = "\n".join(caught.value.__notes__)
    assert "raised on rank 2 of 4" in notes
    assert "raise error" in notes, "the traceback of the rank"
    assert "about to fail" in notes, "the output of the rank"
    assert "rank 0 of 4 ended with" in notes


def test_ranks_survive_a_failure_that_all_come_out_of():
    processes = run_distributed(process_id, 2)
    with pytest.raises(KeyError):
        run_distributed(fail_on, 2, 0, KeyError("missing"))
    assert run_distributed(process_id, 2) == processes
    torch.testing.assert_close(run_distributed(sum_of_ranks, 2, 1.0)[1][2], torch.full((3,), 3.0))


def test_an_exception_that_cannot_be_pickled_is_reported_as_text():
    with pytest.raises(RankError, match="OddError: 1 and 2"):
        run_distributed(raise_odd_error, 1)


def test_ranks_that_hang_after_a_failure_are_killed():
    processes = run_distributed(process_id, 2)
    with pytest.raises(ValueError, match="boom"):
        run_distributed(fail_while_others_sleep, 2)
    assert not any(psutil.pid_exists(process) for process in processes)
    assert len(run_distributed(sum_of_ranks, 2, 1.0)) == 2


def test_a_rank_that_dies_is_reported():
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        run_distributed(die_on, 2, 1)
    assert len(run_distributed(sum_of_ranks, 2, 1.0)) == 2


def test_a_time_out_shows_the_stacks_and_kills_the_ranks():
    processes = run_distributed(process_id, 3)
    with pytest.raises(RankTimeoutError, match="rank 1, 2 of 3 still running after 4 s") as caught:
        run_distributed(wait_for_nobody, 3, timeout=4)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 0 had finished" in notes
    assert notes.count("in wait_for_nobody") == 2
    assert not any(psutil.pid_exists(process) for process in processes)
    assert len(run_distributed(sum_of_ranks, 3, 1.0)) == 3


def test_what_a_rank_started_dies_with_it(tmp_path):
    with pytest.raises(RankTimeoutError):
        run_distributed(start_sleeping_child, 2, str(tmp_path), timeout=6)
    assert_all_end([int(word) for file in tmp_path.iterdir() for word in file.read_text().split()], count=4)


def test_ranks_end_when_the_process_that_asked_is_killed(tmp_path):
    program = (
        "from tests.distributed import run_distributed\n"
        "from tests.test_distributed_helper import start_sleeping_child\n"
        f"run_distributed(start_sleeping_child, 2, {str(tmp_path)!r})\n"
    )
    asking = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        deadline = time.monotonic() + 120
        while len([file for file in tmp_path.iterdir() if file.read_text()]) < 2:
            assert asking.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        asking.kill()
        asking.wait()
    assert_all_end([int(word) for file in tmp_path.iterdir() for word in file.read_text().split()], count=4)


def test_ranks_may_have_children():
    assert run_distributed(fork_child, 2) == [0, 1]


def test_a_call_leaves_nothing_for_the_next():
    before = run_distributed(observe_everything, 2)
    run_distributed(change_everything, 2)
    assert run_distributed(observe_everything, 2) == before


def test_megatron_can_be_initialized_anew_in_each_call():
    processes = run_distributed(process_id, 4)
    assert run_distributed(initialize_megatron, 4, 2) == [(0, 1), (1, 1), (0, 5), (1, 5)]
    assert run_distributed(initialize_megatron, 4, 4) == [(0, 6), (1, 6), (2, 6), (3, 6)]
    assert run_distributed(initialize_megatron, 2, 1) == [(0, 0), (0, 1)]
    assert run_distributed(process_id, 4) == processes, "cleaning up failed and cost the ranks"


def test_megatron_still_has_the_functions_that_reset_it():
    assert run_distributed(import_all_reset_modules, 1) == [[True] * len(MEGATRON_RESETS)]


def test_world_sizes_out_of_range_are_refused():
    for world_size in (0, 5):
        with pytest.raises(ValueError, match=r"must lie in 1\.\.4"):
            run_distributed(process_id, world_size)


def assert_all_end(processes: list[int], count: int) -> None:
    """Check that `count` processes are given and that all of them end, long before they would by themselves."""
    assert len(processes) == count
    deadline = time.monotonic() + 60
    while alive := [process for process in processes if is_running(process)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
