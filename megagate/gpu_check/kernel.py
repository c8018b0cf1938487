"""The fused gate on a GPU: its results against the reference in float64, its time against torch.compile and a copy."""

import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch._functorch.config as functorch
from torch import Tensor

from megagate.gate import GateConfig, QKVLayout, fused
from megagate.gate.functional import activate, apply_gate
from megagate.gpu_check.machine import HEAD_START, Call, Machine, time_in_turn
from megagate.gpu_check.result import Row, Skip
from megagate.plan.gpus import GIGA

Function = Callable[[Tensor, Tensor], Tensor]
"""From y and logits to the gated tensor."""

TIMED = {
    "elementwise": GateConfig(position="sdpa"),  # type: ignore[arg-type]
    "headwise": GateConfig(position="sdpa", granularity="headwise"),  # type: ignore[arg-type]
    "shared": GateConfig(position="sdpa", sharing="head-shared"),  # type: ignore[arg-type]
    "constant": GateConfig(position="sdpa", input="constant"),  # type: ignore[arg-type]
    "added silu": GateConfig(position="sdpa", combine="add", activation="silu"),  # type: ignore[arg-type]
}
HEADS, GROUPS, CHANNELS = 32, 4, 128
"""Of the 15A2B model."""
TOKENS = {"results": 77, "times": 4096}
COPIED = 2**30
ACTIVATIONS = ("sigmoid", "silu", "ns-sigmoid", "identity")
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""What a tensor's largest error may be, over its largest value; in half precision one rounding."""


def kernel_results(machine: Machine) -> Iterator[Row]:
    """Yield the largest relative error of the kernels' results and gradients, for every gate.

    Each is compiled first, which takes longest, so bf16 alone has all activations.
    """
    _require(machine)
    for dtype, rounding in ROUNDING.items():
        for axes in itertools.product(
            ("elementwise", "headwise"),
            ("head-specific", "head-shared", "constant"),
            ("multiply", "add"),
            ACTIVATIONS if dtype == torch.bfloat16 else ACTIVATIONS[:1],
        ):
            granularity, sharing, combine, activation = axes
            constant = sharing == "constant"
            gate = GateConfig(
                position="sdpa",  # type: ignore[arg-type]
                granularity=granularity,  # type: ignore[arg-type]
                sharing="head-specific" if constant else sharing,  # type: ignore[arg-type]
                combine=combine,  # type: ignore[arg-type]
                activation=activation,  # type: ignore[arg-type]
                input="constant" if constant else "hidden",  # type: ignore[arg-type]
            )
            y, logits = tensors(gate, TOKENS["results"], dtype)
            grad = torch.randn_like(y)
            actual = results(partial(fused.fused_gate, config=gate), y, logits, grad)
            exact = results(partial(plain, gate=gate), *(part.cpu().double() for part in (y, logits, grad)))
            errors = [(a.cpu().double() - e).abs().max() / e.abs().max() for a, e in zip(actual, exact, strict=True)]
            error = float(torch.stack(errors).max())  # NaN where one is, unlike Python's max
            # Sums over tokens and channels lose some of their terms' digits.
            yield Row(f"{', '.join(axes)}, {str(dtype).removeprefix('torch.')}", error, "relative", 4 * rounding)


def kernel_times(machine: Machine) -> Iterator[Row]:
    """Yield times of forward and backward: fused, compiled, and what the bytes take at the rate of a copy."""
    _require(machine)
    rate = _copy_rate(machine)
    yield Row(f"copy of {COPIED / 2**20:.0f} MiB", rate / GIGA, "GB/s", note="read and written")
    for name, gate in TIMED.items():
        y, logits = (part.requires_grad_() for part in tensors(gate, TOKENS["times"], torch.bfloat16))
        floors = fused.floor_bytes(y, logits, gate)
        for (which, calls), floor in zip(_passes(gate, y, logits).items(), floors, strict=True):
            times = time_in_turn(calls, machine, machine.seconds / (2 * len(TIMED)), HEAD_START)
            for key, values in times.items():
                seconds = statistics.median(values)
                note = f"{floor / rate / seconds:.0%} of a copy's rate" if floor else "nothing to move"
                yield Row(f"{name}, {which}, {key}", 1e6 * seconds, "us", note=note)


def _passes(gate: GateConfig, y: Tensor, logits: Tensor) -> dict[str, dict[str, Call]]:
    """Return what is timed: forward and backward, fused and compiled."""
    functions: dict[str, Function] = {"fused": partial(fused.fused_gate, config=gate), "compiled": compiled(gate)}
    grad = torch.randn_like(y)
    passes: dict[str, dict[str, Call]] = {"forward": {}, "backward": {}}
    for name, function in functions.items():
        passes["forward"][name] = partial(function, y, logits)
        result = function(y, logits)
        passes["backward"][name] = partial(torch.autograd.grad, result, (y, logits), grad, retain_graph=True)
    return passes


def compiled(gate: GateConfig) -> Function:
    """Return what the attention layer does without the kernel, compiled for the shapes that it gets."""
    # Backward passes are timed again and again, which buffers that are handed on to the first do not allow.
    functorch.donated_buffer = False

    @torch.compile(dynamic=False)
    def function(y: Tensor, logits: Tensor) -> Tensor:
        return plain(y, logits.contiguous(), gate)

    return function


def plain(y: Tensor, logits: Tensor, gate: GateConfig) -> Tensor:
    """Return the gated tensor by plain operators; y [s, b, g, r, d], logits [s, b, g, r, t] or [1, 1, g, r, t]."""
    scores = activate(logits, gate)
    if gate.sharing == "head-shared":
        scores = scores.mean(dim=(2, 3), keepdim=True)
    return apply_gate(y, scores, gate)


def results(function: Function, y: Tensor, logits: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the result and both gradients."""
    y, logits = y.detach().requires_grad_(), logits.detach().requires_grad_()
    result = function(y, logits)
    return [result.detach(), *torch.autograd.grad(result, (y, logits), grad)]


def tensors(gate: GateConfig, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return y, and logits as they lie among the rows of linear_qkv."""
    layout, heads = QKVLayout(HEADS, GROUPS, CHANNELS, gate), (GROUPS, HEADS // GROUPS)
    y = torch.randn(tokens, 1, *heads, CHANNELS, device="cuda", dtype=dtype)
    if gate.input == "constant":
        return y, torch.randn(1, 1, *heads, layout.gate_channels, device="cuda", dtype=dtype)
    logits = layout.split(torch.randn(tokens, 1, layout.total_rows, device="cuda", dtype=dtype)).gate
    assert logits is not None
    return y, logits.detach()


def _copy_rate(machine: Machine) -> float:
    """Return the bytes per second, read and written, of a copy."""
    source = torch.empty(COPIED, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    times = time_in_turn({"copy": lambda: target.copy_(source)}, machine, 1.0, HEAD_START)
    return 2 * source.numel() / statistics.median(times["copy"])


def _require(machine: Machine) -> None:
    machine.require_cuda()
    if not fused.is_available():
        raise Skip("Triton is not installed")
