"""Runs a function on N gloo ranks: ``run_distributed(function, world_size, *args, **kwargs)``.

Importing torch and Megatron takes longer than most tests, so it is done once: a template process imports them and
every rank is forked from it (multiprocessing's fork server). Ranks are then reused from call to call; a call on N
ranks takes the first N of them, gives them a fresh process group, and afterwards each rank puts back what the function
has changed. Ranks that hang or die are killed with everything they started, and the next call forks new ones.

What a caller needs to know:
- `function` is sent by reference, so it stands at the top level of an importable module (each test folder has an
  ``__init__.py``). Arguments and results are pickled; tensors arrive as ordinary CPU tensors.
- Each rank has this process's environment variables and working directory, sees no GPU, uses one thread, and starts
  from the same random seed.
- A function that fails on some rank fails here with the same exception. Its notes name the rank, and hold the traceback
  there, the rank's output, and how the other ranks ended.
"""

import argparse
import atexit
import contextlib
import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import queue
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

MAX_WORLD_SIZE = 4
ROOT = Path(__file__).resolve().parent.parent

# Seconds that the other ranks have to come to an end by themselves once one has failed or all have finished.
GRACE = 3.0
# Characters of a rank's output that a failure shows.
OUTPUT_SHOWN = 8000

STACK_SIGNAL = signal.SIGUSR2  # the launcher uses SIGUSR1
STACK = "(most recent call first)"
STACK_SECONDS = 10.0
TEMPLATE_VARIABLE = "MEGAGATE_TEST_TEMPLATE"
RANK_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",  # a host name that does not resolve must not matter
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}

# What training imports, some of it only on the way; ranks that were killed are forked anew with all of it.
PRELOADED = (
    "megagate.platform",  # the first: it teaches Megatron to run without CUDA
    "megatron.core.parallel_state",
    "megatron.training.training",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megagate.pretrain.arguments",
    "megagate.pretrain.train",
    "torch.utils.tensorboard",
    "pytest",
)

# Megatron's module-level state: what each loaded module needs after a call. tests/test_distributed_helper.py says which
# of these names an upgrade of Megatron has taken away.
MEGATRON_RESETS = (
    ("megatron.training.global_vars", "destroy_global_vars"),
    ("megatron.core.num_microbatches_calculator", "unset_num_microbatches_calculator"),
    ("megatron.core.rerun_state_machine", "destroy_rerun_state_machine"),
    ("megatron.core.transformer.moe.moe_logging", "destroy_moe_metrics_tracker"),
    ("megatron.core.parallel_state", "destroy_global_memory_buffer"),
    ("megatron.core.parallel_state", "destroy_model_parallel"),
)


class RankError(RuntimeError):
    """A rank died, or failed with an exception that cannot be sent to this process."""


class RankTimeoutError(RankError):
    """The function was still running on some rank when the time was over; the notes hold every rank's stack."""


@dataclass(frozen=True)
class _Call:
    """What a rank is asked to run; `payload` is unpickled there under the eye of the error handling."""

    payload: bytes
    rank: int
    world_size: int
    number: int
    store_port: int
    timeout: float
    environment: dict[str, str]
    directory: str


@dataclass(frozen=True)
class _Failure:
    rank: int
    summary: str
    details: str = ""
    pickled: bytes | None = None
    died: bool = False

    @property
    def is_consequence(self) -> bool:
        """Whether this rank failed only since another one left the process group."""
        return any(text in self.summary for text in ("closed by peer", "reset by peer", "Broken pipe"))


def run_distributed(
    function: Callable[..., Any], world_size: int, /, *args: Any, timeout: float = 120, **kwargs: Any
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` on `world_size` gloo ranks and return the results in rank order.

    `timeout` is in seconds, and does not count the start of the ranks. Raises what `function` raised on the rank that
    failed first, `RankError` if a rank died, and `RankTimeoutError` if one was still running when the time was over.
    """
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"world_size must lie in 1..{MAX_WORLD_SIZE}, not {world_size}")
    payload = _pack((function, args, kwargs))
    try:
        return _POOL.run(payload, world_size, timeout)
    except BaseException:  # also a time-out of pytest or control-C: the ranks may be anywhere
        if not _POOL.idle:
            _POOL.kill()
        raise


def shutdown() -> None:
    """Kill every rank; a later call starts new ones."""
    _POOL.kill()


def start_from_template(function: Callable[..., Any], *args: Any) -> multiprocessing.Process:
    """Start ``function(*args)`` in a process that has torch and Megatron already, and return it."""
    # Not daemonic: Megatron's checkpoint writer starts children of its own.
    process = multiprocessing.get_context("forkserver").Process(target=function, args=args)
    with _template_environment():
        process.start()
    return process


# ---------------------------------------------------------------------------------------------------------------------
# In the process that asks


class _Worker:
    """One rank as seen from the process that asks: the process, the pipe to it, and the file with its output."""

    def __init__(self) -> None:
        # Nothing of it stays behind, however this process ends: both sides hold it open, and its name goes at once.
        self.output = tempfile.NamedTemporaryFile(prefix="megagate-rank-", delete=False)  # noqa: SIM115
        self.output_start = 0
        self.connection, theirs = multiprocessing.Pipe()
        try:
            self.process = start_from_template(_worker_main, theirs, self.output.name)
            theirs.close()
            self.store_port: int = self.receive()
        except EOFError as error:
            raise RankError(f"a rank died while starting: {self.read_output() or 'see the captured stderr'}") from error
        finally:
            os.unlink(self.output.name)

    def send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is noticed where we wait
            self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        return pickle.loads(self.connection.recv_bytes())

    def read_output(self) -> str:
        """Return the end of what the rank has written since its call began."""
        size = self.output_size()
        start = max(self.output_start, size - OUTPUT_SHOWN)
        text = os.pread(self.output.fileno(), size - start, start).decode(errors="replace").strip()
        return f"[...]\n{text}" if start > self.output_start else text

    def output_size(self) -> int:
        return os.fstat(self.output.fileno()).st_size

    @property
    def process_id(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process_id, signal.SIGKILL)  # the rank leads a group of everything it started
        self.process.join()
        self.connection.close()
        self.output.close()


class _Pool:
    """The ranks, started when first needed; `owner` keeps a forked copy of this process from using them."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.calls = 0
        self.idle = True
        self.owner = os.getpid()

    def run(self, payload: bytes, world_size: int, timeout: float) -> list[Any]:
        if self.owner != os.getpid():
            raise RankError("run_distributed works only in the process that imported it, not in a forked one")
        self._start(world_size)
        self.idle = False
        workers = self.workers[:world_size]
        self.calls += 1
        environment = {**os.environ, **RANK_ENVIRONMENT, "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
        environment["MASTER_PORT"] = str(_free_port())
        for rank, worker in enumerate(workers):
            worker.output_start = worker.output_size()
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
            worker.send(
                _Call(
                    payload=payload,
                    rank=rank,
                    world_size=world_size,
                    number=self.calls,
                    store_port=self.workers[0].store_port,
                    timeout=timeout,
                    environment=environment | ranks,
                    directory=os.getcwd(),
                )
            )
        results: dict[int, bytes] = {}
        failures: list[_Failure] = []
        unfinished = set(range(world_size))
        for rank, message in self._messages(workers, unfinished, timeout):
            if isinstance(message, _Failure):
                failures.append(message)
                break
            results[rank] = message
            unfinished.discard(rank)
        if unfinished and not failures:
            raise self._timeout_error(workers, unfinished, timeout)
        failures += self._settle(workers, finished=set(results))
        if failures:
            # A rank that left may be heard of only after those that it left alone.
            failures.sort(key=lambda failure: failure.is_consequence)
            error = self._as_exception(failures, world_size)
            if not self.idle:
                self.kill()
            raise error
        if not self.idle:
            self.kill()
        return [_unpack(results[rank]) for rank in range(world_size)]

    def kill(self) -> None:
        """End every rank, if this process is the one that started them."""
        if self.owner == os.getpid():
            while self.workers:
                self.workers.pop().kill()
        self.idle = True

    def _start(self, count: int) -> None:
        if any(worker.process.exitcode is not None for worker in self.workers):
            self.kill()
        while len(self.workers) < count:
            self.workers.append(_Worker())

    def _messages(self, workers: list[_Worker], wanted: set[int], timeout: float) -> Iterator[tuple[int, Any]]:
        """Yield (rank, message) as messages come, while `wanted` has ranks and the time lasts; a death is a failure."""
        deadline = time.monotonic() + timeout
        while wanted:
            sources = [(rank, workers[rank]) for rank in sorted(wanted)]
            waited = [source for _, worker in sources for source in (worker.connection, worker.process.sentinel)]
            ready = connection.wait(waited, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for rank, worker in sources:
                if worker.connection in ready:
                    try:
                        yield rank, worker.receive()
                        continue
                    except (EOFError, ConnectionResetError):
                        pass
                elif worker.process.sentinel not in ready:
                    continue
                yield rank, self._death(rank, worker)

    def _settle(self, workers: list[_Worker], finished: set[int]) -> list[_Failure]:
        """Let every rank come to rest, and return the failures seen meanwhile; `idle` says whether all of them did."""
        failures = []
        unsettled = set(range(len(workers)))
        for rank in finished:
            workers[rank].send("finish")
        for rank, message in self._messages(workers, unsettled, GRACE):
            if message == "idle":
                unsettled.discard(rank)
            elif isinstance(message, _Failure):
                failures.append(message)
                if message.died:
                    unsettled.discard(rank)
            else:
                workers[rank].send("finish")
        self.idle = not unsettled and all(worker.process.exitcode is None for worker in workers)
        return failures

    @staticmethod
    def _death(rank: int, worker: _Worker) -> _Failure:
        worker.process.join(GRACE)
        code = worker.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        return _Failure(rank, summary=f"rank {rank} {how}", died=True)

    def _as_exception(self, failures: list[_Failure], world_size: int) -> BaseException:
        first, *others = failures
        where = f"rank {first.rank} of {world_size}"
        error: BaseException = RankError(f"{where} failed: {first.summary}")
        if first.pickled is not None:
            with contextlib.suppress(Exception):
                error = pickle.loads(first.pickled)
        error.add_note(f"raised on {where}:\n{first.details or first.summary}")
        if output := self.workers[first.rank].read_output():
            error.add_note(f"output of {where}:\n{output}")
        for other in others:
            error.add_note(f"rank {other.rank} of {world_size} ended with: {other.summary}")
        return error

    def _timeout_error(self, workers: list[_Worker], unfinished: set[int], timeout: float) -> RankTimeoutError:
        for rank in unfinished:
            with contextlib.suppress(ProcessLookupError):
                os.kill(workers[rank].process_id, STACK_SIGNAL)
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline and not all(STACK in workers[rank].read_output() for rank in unfinished):
            time.sleep(0.05)  # the stacks are written by the signal handlers of the ranks
        time.sleep(0.5)  # one stack is that of a thread, and there are more
        ranks = ", ".join(str(rank) for rank in sorted(unfinished))
        error = RankTimeoutError(f"rank {ranks} of {len(workers)} still running after {timeout:g} s")
        for rank, worker in enumerate(workers):
            if rank in unfinished:
                error.add_note(f"output and stack of rank {rank}:\n{worker.read_output()}")
            else:
                error.add_note(f"rank {rank} had finished")
        return error


def _pack(value: Any) -> bytes:
    """Pickle `value` with torch.save: Megatron replaces how a plain pickle holds tensors, in the ranks but not here."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _template_environment() -> Iterator[None]:
    """What the template process finds when it starts, which it does with the first rank."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    wanted = {**RANK_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), TEMPLATE_VARIABLE: "1"}
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        forkserver.set_forkserver_preload([__name__])
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


_POOL = _Pool()
atexit.register(shutdown)  # later than multiprocessing's own exit handler, so earlier at exit: that one joins the ranks


# ---------------------------------------------------------------------------------------------------------------------
# In the ranks


def _preload() -> None:
    """Import what the ranks need, in the template; what fails here fails again, and is reported, where it is used."""
    os.environ.pop(TEMPLATE_VARIABLE)
    try:
        import torch
    except Exception:
        traceback.print_exc()
        return
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PRELOADED:
            try:
                importlib.import_module(name)
            except Exception:
                traceback.print_exc()
    _read_help_texts()
    sys.stdout.flush()  # or each rank would write it again
    gc.collect()
    gc.freeze()  # what is loaded now stays, so that no rank's collector looks at it again


def _read_help_texts() -> None:
    """Make a parser of Megatron's flags, so that no rank reads the source that their help stands in."""
    from tests import help_texts

    arguments = sys.modules.get("megatron.training.arguments")
    if arguments is not None:
        help_texts.remember()
        arguments.add_megatron_arguments(argparse.ArgumentParser())


def _worker_main(pipe: connection.Connection, output_path: str) -> None:
    """A rank: take calls until the other end of the pipe is gone."""
    os.setsid()
    _redirect_output(output_path)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    import torch

    with contextlib.suppress(ImportError):
        importlib.import_module("megagate.platform")
    torch.set_num_threads(1)

    # Rank 0's serves all of them. It lasts as long as the rank does; each call has a key space of its own.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_messages, args=(pipe, messages), daemon=True).start()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    pipe.send_bytes(pickle.dumps(store.port))
    while True:
        call = messages.get()
        outcome = _execute(call)
        pipe.send_bytes(pickle.dumps(outcome))
        if not isinstance(outcome, _Failure):
            messages.get()  # all ranks have left the function: none can miss this one in a collective
        elif not torch.distributed.is_initialized():
            return  # another rank left while the process group was made: this one counts its groups otherwise now
        del outcome
        _clean_up(handlers)
        pipe.send_bytes(pickle.dumps("idle"))


def _redirect_output(path: str) -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with open(path, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):  # they stand for descriptors 1 and 2 already
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, errors="replace")


def _read_messages(pipe: connection.Connection, messages: "queue.SimpleQueue[Any]") -> None:
    """Pass messages on; at the end of the pipe the process that asked is gone, so end this one and all it started."""
    while True:
        try:
            messages.put(pickle.loads(pipe.recv_bytes()))
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)


def _execute(call: _Call) -> bytes | _Failure:
    """Run one call and return its pickled result, or what went wrong."""
    try:
        _set_up(call)
        function, args, kwargs = _unpack(call.payload)
        return _pack(function(*args, **kwargs))
    except BaseException as error:
        summary = traceback.format_exception_only(error)[-1].strip()
        return _Failure(call.rank, summary, traceback.format_exc().strip(), _pickle_exception(error))


def _set_up(call: _Call) -> None:
    import numpy
    import torch

    os.environ.clear()
    os.environ.update(call.environment)
    os.chdir(call.directory)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    timeout = timedelta(seconds=call.timeout + 60)  # ours ends first, and shows the stacks
    store = torch.distributed.TCPStore("127.0.0.1", call.store_port, is_master=False, timeout=timeout)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.PrefixStore(f"call-{call.number}", store),
        rank=call.rank,
        world_size=call.world_size,
        timeout=timeout,
    )


def _pickle_exception(error: BaseException) -> bytes | None:
    """Return `error` pickled, or None where it would not survive that or must not be raised elsewhere."""
    if isinstance(error, KeyboardInterrupt):
        return None
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        return None
    return pickled


def _clean_up(handlers: Mapping[signal.Signals, Any]) -> None:
    """Put back what a call may have changed in this process, and free its process groups and memory."""
    import torch

    for module_name, attribute in MEGATRON_RESETS:
        if module_name in sys.modules:
            getattr(sys.modules[module_name], attribute)()
    moe_utils = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if moe_utils is not None:
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    rotary = sys.modules.get("megatron.core.models.common.embeddings.rotary_pos_embedding")
    if rotary is not None:
        rotary.RotaryEmbedding.forward.cache_clear()  # it keeps models alive
    training = sys.modules.get("megatron.training.training")
    if training is not None:
        # Set by the first run in a process, and ranks of which only some have it reduce a different number of times.
        training._STARTUP_TIMESTAMPS.update(dict.fromkeys(training._STARTUP_TIMESTAMPS))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    ddp = sys.modules.get("megatron.core.distributed.distributed_data_parallel")
    if ddp is not None:
        # Its gradient hooks, and tensors that its layers keep, hold it in cycles through C++ that no collector sees,
        # and with it the process groups, whose idle threads then slow down every later call.
        for wrapped in [
            held for held in gc.get_objects() if isinstance(held, ddp.DistributedDataParallel) and vars(held)
        ]:
            for parameter in wrapped.parameters():
                vars(parameter).clear()
            vars(wrapped).clear()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    gc.collect()


if os.environ.get(TEMPLATE_VARIABLE):
    _preload()
