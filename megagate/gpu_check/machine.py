"""The device that is checked: sizes that fit it, and clocks that fit it."""

import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megagate.gpu_check.result import Skip
from megagate.plan.gpus import KNOWN, Gpu

Call = Callable[[], Any]

HEAD_START = 16
"""Overwrites of the cache that take a GPU longer, about a millisecond, than Python takes to launch a kernel or two."""


@dataclass(frozen=True)
class Machine:
    """Where and how long to check."""

    is_cuda: bool
    seconds: float
    """What a part's timed rounds may take; it ends with the round that it is in."""

    def require_cuda(self) -> None:
        """Raise Skip where there is no CUDA device to check."""
        if not self.is_cuda:
            raise Skip("it times CUDA kernels, and --device is cpu")

    def gpu(self) -> Gpu | None:
        """Return what the data sheets say about this GPU, None for one that is not known."""
        return gpu_called(torch.cuda.get_device_name()) if self.is_cuda else None


SLOWER = {"pcie", "nvl", "mig"}
"""Words of the name of a card, or of a part of a GPU, that is slower than the module whose name it has."""


def gpu_called(name: str) -> Gpu | None:
    """Return what is known of the GPU that CUDA calls by this name, for example "NVIDIA H100 80GB HBM3"."""
    words = set(name.lower().replace("-", " ").split())
    return None if words & SLOWER else next((gpu for key, gpu in KNOWN.items() if key in words), None)


def describe(is_cuda: bool) -> dict[str, str]:
    """Return what the results depend on."""
    import megagate.platform  # noqa: F401  # before Megatron

    # isort: split
    import megatron.core

    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
    }
    if is_cuda:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "cuda": str(torch.version.cuda),
        }
    else:
        facts["device"] = "cpu"
    for package in ("triton", "transformer_engine", "fused_weight_gradient_mlp_cuda"):
        try:
            module = __import__(package)
            facts[package] = str(getattr(module, "__version__", "there"))
        except ImportError:
            facts[package] = "missing"
        except Exception as error:  # compiled for another torch, or without its libraries
            facts[package] = f"broken ({type(error).__name__})"
    return facts


def time_in_turn(
    calls: dict[str, Call], machine: Machine, seconds: float, overwrites: int = 1, most: int = 50
) -> dict[str, list[float]]:
    """Return the seconds that each call took in each round; calls take turns, so that whatever drifts meets all alike.

    The first two rounds, which compile and allocate, are not counted; at least three are. On a GPU the clock is CUDA's
    own: events around each call, and its second-level cache is overwritten before it.

    Args:
        calls: by name.
        machine: whose clock it is.
        seconds: what the counted rounds may take; they end with the one that they are in.
        overwrites: how often the cache is overwritten, about 70 us each time on an H200. A call that is done sooner
            than it is launched needs several (`HEAD_START`), so that the GPU has not yet come to its beginning when
            all of it is launched: otherwise what is measured is Python.
        most: counted rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda") if machine.is_cuda else None
    deadline = math.inf
    for turn in range(most + 2):
        if turn == 2:
            deadline = time.monotonic() + seconds
        if turn >= 5 and time.monotonic() > deadline:
            break
        for name, call in calls.items():
            taken = _time_on_gpu(call, flush, overwrites) if flush is not None else _time(call)
            if turn >= 2:
                times[name].append(taken)
    return times


def _time(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _time_on_gpu(call: Call, flush: torch.Tensor, overwrites: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(overwrites):
        flush.zero_()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def median_ratio(times: dict[str, list[float]], name: str, reference: str) -> float:
    """Return the median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(times[name], times[reference], strict=True))
