"""Apply a function to a stream of items in several processes: in order, in bounded memory, and never hanging.

`multiprocessing.Pool` waits for ever when a worker is killed (typically by the kernel, for lack of memory);
`ProcessPoolExecutor` notices. Workers are forked, so that they share what the function already holds (a tokenizer,
imported libraries) instead of spending seconds to build it again.
"""

import gc
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from megagate.errors import UserError
from megagate.processes import end_with

ITEMS_PER_WORKER = 3
"""Items in flight for each worker: enough to keep it busy, few enough to bound memory."""

_function: Callable[[Any], Any] | None = None


def map_in_order(function: Callable[[Any], Any], items: Iterable[Any], workers: int) -> Generator[Any]:
    """Yield `function(item)` for each item, in the order of `items`; with one worker, in this very process.

    Raises:
        UserError: a worker process died. What `function` or `items` raise is raised here too.
    """
    if workers == 1:
        yield from map(function, items)
        return
    executor = ProcessPoolExecutor(
        workers, multiprocessing.get_context("fork"), initializer=_start_worker, initargs=(function,)
    )
    pending: deque[Future] = deque()
    try:
        for item in items:
            pending.append(executor.submit(_call, item))
            if len(pending) >= ITEMS_PER_WORKER * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died, most likely killed for using too much memory; give fewer --workers or more memory"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    gc.freeze()  # a collection would write to every inherited object, and so copy the parent's memory
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    end_with(parent.pid)  # which may be killed and not clean up


def _call(item: Any) -> Any:
    assert _function is not None
    return _function(item)
