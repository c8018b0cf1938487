"""The gate in one kernel forward and one backward, for GPUs (Triton): `megagate.gate.functional` in fewer bytes.

Forward reads the gated tensor Y and the logits L and writes the result; backward reads both again, with the result's
gradient, computes the scores anew, and writes both gradients. Nothing else is saved, and no score is ever written.
bf16, fp16 and fp32 tensors are computed in fp32 and rounded once, as in the reference. L may be a strided view, as it
is of linear_qkv's output; it is not copied.

The floor in bytes, with N elements of Y of e bytes each, elementwise and shared (the second look at the logits finds
them in the cache), and headwise, where a logit serves d channels:

    multiply    forward 3 e N    backward 5 e N        headwise  (2 + 1/d) e N    (3 + 2/d) e N
    add         forward 3 e N    backward 3 e N        headwise  (2 + 1/d) e N    (1 + 2/d) e N

(adding, the gradient of Y is the result's, and neither read for it nor written; logits without activation are not read
in the backward pass, and where they are added channel by channel there is no kernel). `floor_bytes` computes it.

Sums: a program has a head's channels whole, and goes through the heads that share a score; only the sum over tokens,
for the input-independent gate, has a second stage, over at most `PROGRAMS` partial sums.
"""

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megagate.gate.config import GateActivation, GateCombine, GateConfig, GateSharing

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

TILE = 2048
"""Elements that a program holds at a time, 16 for each thread: two loads of 16 bytes in bf16."""
MOST_CHANNELS = 512
"""Channels of a tile, unless all of a head's are needed for a sum."""
PROGRAMS = 1024
"""Programs that occupy a GPU; a sum over tokens is divided into so many partial ones."""


def is_available() -> bool:
    """Whether this machine can run the kernels: it has a CUDA device and Triton."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def supports(y: Tensor, logits: Tensor, config: GateConfig) -> bool:
    """Whether `fused_gate` computes this.

    It does not for fp64, for tensors that are not on the GPU, for Switch-Head, whose scores weigh a sum of experts, nor
    for a mean over heads of logits that are the same for all tokens, which is computed once.
    """
    is_here = y.is_cuda == logits.is_cuda == torch.cuda.is_available() and not y.is_meta
    shared_constant = config.sharing == GateSharing.HEAD_SHARED and logits.shape[:2] != y.shape[:2]
    has_kernel = not (shared_constant or config.is_switch_head)
    return y.dtype in DTYPES and logits.dtype in DTYPES and has_kernel and is_here


def fused_gate(y: Tensor, logits: Tensor, config: GateConfig) -> Tensor:
    """Return ``apply_gate(y, gate_scores(logits, config), config)``; a shared score is the mean over all heads.

    Args:
        y: [s, b, *heads, d], at most two head dimensions; any strides; bf16, fp16 or fp32.
        logits: [s, b, *heads, t], t = d or 1; any strides; [1, 1, *heads, t] for the input-independent gate.
        config: gives activation, combination and sharing.

    Returns:
        [s, b, *heads, d], contiguous, in the dtype of `y`. Differentiable once.
    """
    return FusedGate.apply(y, logits, config.activation, config.combine, config.sharing == GateSharing.HEAD_SHARED)


def apply_scores(y: Tensor, scores: Tensor, combine: GateCombine) -> Tensor:
    """Return ``y * scores`` or ``y + scores`` for scores that several heads share.

    Args:
        y: as for `fused_gate`.
        scores: [s, b, *ones, d], or with 1 for d.
        combine: how.
    """
    return FusedGate.apply(y, scores, GateActivation.IDENTITY, combine, False)


class FusedGate(torch.autograd.Function):
    """The gate, with a backward pass that computes the scores again."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, logits: Tensor, activation: GateActivation, combine: GateCombine, shared: bool
    ) -> Tensor:
        """Return the gated tensor; arguments are as for `fused_gate`."""
        ctx.options = options = (str(activation), combine == GateCombine.ADD, shared)
        adds = combine == GateCombine.ADD
        ctx.save_for_backward(None if adds else y, logits)
        ctx.logits_are_added = adds and activation == GateActivation.IDENTITY and y.shape == logits.shape and not shared
        result = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        if result.numel():
            _launch_forward(y, logits, result, *options)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of y and logits."""
        y, logits = ctx.saved_tensors
        activation, adds, shared = ctx.options
        if ctx.logits_are_added:
            return grad, grad.to(logits.dtype), None, None, None
        # The kernel does not look at y when it adds.
        grad_y, grad_logits = _launch_backward(grad if adds else y, logits, grad, activation, adds, shared)
        return grad_y, grad_logits, None, None, None


class Plan(NamedTuple):
    """How a launch sees its tensors; `megagate.gate.kernels` explains the arguments."""

    rows: int
    kept_sizes: tuple[int, ...]
    reduced: int
    reduced_size: int
    part: int
    strides: tuple[tuple[int, ...], ...]
    steps: tuple[int, int]
    """Of a contiguous tensor of y's shape, in rows."""
    parts: int
    headwise: bool
    wide: bool
    grid: tuple[int, int, int]
    block_rows: int
    block_channels: int


@functools.lru_cache(maxsize=512)
def plan(
    shape: tuple[int, ...], logits_shape: tuple[int, ...], shared: bool, strides: tuple[tuple[int, ...], ...]
) -> Plan:
    """Return how to launch.

    Args:
        shape: of y, [s, b, *heads, d].
        logits_shape: its sizes are those of y, or 1.
        shared: whether the score is the mean over the heads.
        strides: of the inputs; of the logits where y has the size and they have 1, any.

    Raises:
        ValueError: the logits' sizes are others, or rows that share a logit lie between others.
    """
    *outer, channels = shape
    # A kernel would read whatever lies there.
    fits = len(shape) == len(logits_shape) and all(n in (1, size) for n, size in zip(logits_shape, shape, strict=True))
    if not fits or (shared and logits_shape[2:-1] != shape[2:-1]):
        raise ValueError(f"logits {logits_shape} cannot be broadcast over {shape}: each size must be 1 or the same")
    outer_indices = [index for index, size in enumerate(outer) if size > 1]
    others = [index for index in outer_indices if logits_shape[index] == 1 or (shared and index >= 2)]
    kept = [index for index in outer_indices if index not in others]
    # Rows that share logits are in front of the others (tokens) or behind them (heads).
    tokens_share = bool(kept and others) and others[0] < kept[0]
    if kept and others and not (others[-1] < kept[0] or kept[-1] < others[0]):
        raise ValueError(f"logits {logits_shape} cannot be broadcast over {shape}: one side must be tokens or heads")
    rows, reduced = (math.prod(outer[index] for index in group) for group in (kept, others))
    kept_sizes, kept_strides = _merged([outer[i] for i in kept], [[s[i] for i in kept] for s in strides], 4)
    reduced_sizes, reduced_strides = _merged([outer[i] for i in others], [[s[i] for i in others] for s in strides], 2)
    headwise = logits_shape[-1] != channels
    block_channels = _power_of_two(channels)
    if not headwise:
        block_channels = min(block_channels, MOST_CHANNELS)
    block_rows = max(1, min(TILE // block_channels, _power_of_two(rows)))
    blocks = -(-rows // block_rows), -(-channels // block_channels)
    parts = 1 if shared else max(1, min(reduced, PROGRAMS // (blocks[0] * blocks[1])))
    return Plan(
        rows=rows,
        kept_sizes=tuple(kept_sizes[1:]),
        reduced=reduced,
        reduced_size=reduced_sizes[1],
        part=-(-reduced // parts),
        strides=tuple(
            (*kept_part, *reduced_part, whole[-1])
            for kept_part, reduced_part, whole in zip(kept_strides, reduced_strides, strides, strict=True)
        ),
        steps=(1, rows) if tokens_share else (reduced, 1),
        parts=parts,
        headwise=headwise,
        wide=rows + block_rows >= 2**31 or reduced >= 2**31,
        grid=(*blocks, parts),
        block_rows=block_rows,
        block_channels=block_channels,
    )


def _merged(sizes: list[int], strides: list[list[int]], count: int) -> tuple[list[int], list[list[int]]]:
    """Return the dimensions as `count` ones, where neighbours that lie so in all tensors are one, with 1s in front."""
    merged: list[tuple[int, list[int]]] = []
    for index, size in enumerate(sizes):
        steps = [of_tensor[index] for of_tensor in strides]
        if size == 1:
            continue
        if merged and all(outer == inner * size for outer, inner in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = merged[-1][0] * size, steps
        else:
            merged.append((size, steps))
    merged = [(1, [0] * len(strides))] * (count - len(merged)) + merged
    return [size for size, _ in merged], [[steps[tensor] for _, steps in merged] for tensor in range(len(strides))]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _launch_forward(y: Tensor, logits: Tensor, result: Tensor, activation: str, adds: bool, shared: bool) -> None:
    from megagate.gate import kernels

    how = plan(tuple(y.shape), tuple(logits.shape), shared, (y.stride(), logits.stride()))
    channels = y.shape[-1]
    kernels.forward[how.grid](
        y,
        logits,
        result,
        how.rows,
        how.kept_sizes,
        how.reduced,
        how.reduced_size,
        how.part,
        channels,
        *how.strides,
        tuple(step * channels for step in how.steps),
        **_constants(how, activation, adds, shared),
    )


def _launch_backward(
    y: Tensor, logits: Tensor, grad: Tensor, activation: str, adds: bool, shared: bool
) -> tuple[Tensor, Tensor]:
    from megagate.gate import kernels

    if not grad.numel():
        return grad, torch.zeros_like(logits)
    how = plan(tuple(y.shape), tuple(logits.shape), shared, (y.stride(), logits.stride(), grad.stride()))
    channels, scores = y.shape[-1], logits.shape[-1]
    grad_y = grad if adds else torch.empty(y.shape, dtype=y.dtype, device=y.device)
    partial = how.parts > 1
    grad_logits = torch.empty(
        (how.parts, *logits.shape) if partial else logits.shape,
        dtype=torch.float32 if partial else logits.dtype,
        device=logits.device,
    )
    kernels.backward[how.grid](
        y,
        logits,
        grad,
        grad_y,
        grad_logits,
        how.rows,
        how.kept_sizes,
        how.reduced,
        how.reduced_size,
        how.part,
        channels,
        *how.strides,
        tuple(step * channels for step in how.steps),
        tuple(step * scores for step in (how.steps if shared else (1, how.rows))),
        **_constants(how, activation, adds, shared),
    )
    return grad_y, grad_logits.sum(dim=0).to(logits.dtype) if partial else grad_logits


def _constants(how: Plan, activation: str, adds: bool, shared: bool) -> dict[str, Any]:
    return {
        "ACTIVATION": activation,
        "ADD": adds,
        "HEADWISE": how.headwise,
        "SHARED": shared,
        "WIDE": how.wide,
        "BLOCK_ROWS": how.block_rows,
        "BLOCK_CHANNELS": how.block_channels,
    }


def floor_bytes(y: Tensor, logits: Tensor, config: GateConfig) -> tuple[int, int]:
    """Return how many bytes forward and backward must move at least, each tensor once."""
    values, scores = y.numel() * y.element_size(), logits.numel() * logits.element_size()
    if config.combine == GateCombine.MULTIPLY:
        return 2 * values + scores, 3 * values + 2 * scores
    if config.activation == GateActivation.IDENTITY and logits.shape == y.shape:
        return 2 * values + scores, 0
    read_again = 0 if config.activation == GateActivation.IDENTITY else scores
    return 2 * values + scores, values + scores + read_again
