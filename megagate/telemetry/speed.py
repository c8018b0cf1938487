"""How fast training is, where a step's time goes, and the memory it takes.

- throughput/tokens-per-second: of all ranks together, over the steps since the last time; only time inside training
  steps counts, not evaluation and checkpoints.
- throughput/tflops-per-device: model TFLOP/s by Megatron's formula with the gate (`megagate.pretrain.flops`): forward
  and backward, active experts only, nothing for recomputation.
- throughput/mfu: that over the device's dense bf16 peak, where it is known (`PEAK_TFLOPS`).
- time/data, time/forward, time/backward, time/communication, time/optimizer: seconds of the observed step by Megatron's
  own timers, averaged over ranks. Communication is what is timed as such: between pipeline stages, of gradients and of
  parameters, as far as it does not overlap; that of tensor, expert and context parallelism is part of forward and
  backward.
- memory/max-allocated: the most GiB that torch has had allocated, of the rank with the most (on a CPU the process's
  largest resident memory).
"""

import contextlib
import time
from collections.abc import Iterator

import torch
from megatron.core.timers import Timers
from torch import Tensor

from megagate.telemetry.observer import Findings
from megagate.telemetry.totals import Totals

PEAK_TFLOPS = {
    "A100": 312.0,
    "A800": 312.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H800": 989.0,
    "H200": 989.0,
    "H200 NVL": 835.0,
    "H20": 148.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "GB300": 2500.0,
    "L40S": 362.0,
}
"""Dense bf16 TFLOP/s by NVIDIA's data sheets, by words of the device's name; the longest entry that fits counts."""

COMMUNICATION = ("-send", "-recv", "-sync", "-all-reduce")
"""How the names of Megatron's timers of communication end."""

PARAMETER_TIMER = "params-all-gather"
PHASES = ("data", "forward", "backward", "communication", "optimizer")


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device by its name, None if it is not known."""
    words = set(device_name.replace("-", " ").split())
    fitting = [name for name in PEAK_TFLOPS if words.issuperset(name.split())]
    return PEAK_TFLOPS[max(fitting, key=len)] if fitting else None


class SpeedObserver:
    """Times the steps; `step` is the context of each, `detailed` of one whose phases are timed."""

    def __init__(self, totals: Totals) -> None:
        self.totals = totals
        self.seconds, self.samples = 0.0, 0
        """Since the last time that findings were asked for; samples of all ranks together."""
        totals.declare_maximum("memory")
        for phase in PHASES:
            totals.declare_sum(f"time {phase}")
        totals.declare_sum("ranks")

    @contextlib.contextmanager
    def step(self, samples: int) -> Iterator[None]:
        """Count the time of a step and its samples, all ranks together."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self.samples += samples

    @contextlib.contextmanager
    def detailed(self, timers: Timers) -> Iterator[None]:
        """Let Megatron time the phases of a step, whatever --timing-log-level says, and add them up."""
        before = {name: timer.elapsed(reset=False) for name, timer in timers._timers.items() if not timer._started}
        level, timers._log_level = timers._log_level, 2
        try:
            yield
        finally:
            timers._log_level = level
        spent = {
            name: timer.elapsed(reset=False) - before.get(name, 0.0)
            for name, timer in timers._timers.items()
            if not timer._started
        }
        for name in [name for name, needed in timers._log_levels.items() if needed > level]:
            # A timer that exists runs on, and waits for the device each time.
            del timers._timers[name], timers._log_levels[name]
        for phase, seconds in split(spent).items():
            self.totals.add(f"time {phase}", 1, seconds)
        self.totals.add("ranks", 1, 1.0)
        allocated = torch.tensor(torch.cuda.max_memory_allocated() / 2**30)
        self.totals.raise_to("memory", 1, allocated)

    def findings(self, totals: dict[str, Tensor], tokens: float, operations: float, devices: int) -> Findings:
        """Return speed, times and memory, and begin to count anew.

        Args:
            totals: of all ranks.
            tokens: of the steps since the last time, all ranks together.
            operations: floating-point operations of these steps, all ranks together.
            devices: number of ranks.
        """
        found = Findings()
        if self.samples:
            found.scalars["throughput/tokens-per-second"] = tokens / self.seconds
            tflops = operations / self.seconds / devices / 1e12
            found.scalars["throughput/tflops-per-device"] = tflops
            peak = peak_tflops(torch.cuda.get_device_name())
            if peak:
                found.scalars["throughput/mfu"] = tflops / peak
        ranks = float(totals["ranks"][0])
        if ranks:
            for phase in PHASES:
                found.scalars[f"time/{phase}"] = float(totals[f"time {phase}"][0]) / ranks
            found.scalars["memory/max-allocated"] = float(totals["memory"][0])
        self.seconds, self.samples = 0.0, 0
        return found


def split(spent: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each phase from those of Megatron's timers, some of which run inside others."""
    data, parameters = spent.get("batch-generator", 0.0), spent.get(PARAMETER_TIMER, 0.0)
    communication = sum(seconds for name, seconds in spent.items() if name.endswith(COMMUNICATION))
    return {
        "data": data,
        "forward": spent.get("forward-compute", 0.0) - data,
        "backward": spent.get("backward-compute", 0.0),
        "communication": communication + parameters,
        "optimizer": spent.get("optimizer", 0.0) - parameters,
    }
