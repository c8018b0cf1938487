"""The Triton kernels of the fused gate; `megagate.gate.fused` says what they compute and launches them.

A tensor of heads is a set of rows of `channels` entries, and a row has an index among the kept and one among the
reduced ones. Kept: those rows have a logit of their own. Reduced: those rows share the logits of a kept row, so that
its gradient is a sum over them. For most gates nothing is shared, and each kept row is one row. A program handles
BLOCK_ROWS kept rows, BLOCK_CHANNELS channels of each, and one part of the reduced rows.

Arguments of both kernels besides the tensors:
    rows, kept_sizes: number of kept rows, and the last three of the four dimensions that their index runs over.
    reduced, reduced_size, part: number of reduced rows, the last of their two dimensions, and how many a program has.
    *_strides: of an input, in elements: four over kept rows, two over reduced rows, one over channels.
    *_steps: of an output, whose channels are contiguous: from one kept row to the next, and from one reduced row.
    ACTIVATION, ADD: of the gate; HEADWISE: one logit for a row and not one for a channel.
    SHARED: reduced rows have logits of their own, and the score is the mean over them (part = reduced then).
    WIDE: an index of rows needs 64 bits; offsets always have them.
"""

import triton
import triton.language as tl


@triton.jit
def _activate(logits, ACTIVATION: tl.constexpr):
    if ACTIVATION == "identity":
        return logits
    score = 1 / (1 + tl.exp(-logits))
    if ACTIVATION == "silu":
        score = logits * score
    if ACTIVATION == "ns-sigmoid":
        score = 0.5 + 0.5 * score
    return score


@triton.jit
def _logits_gradient(score_gradient, pointers, mask, ACTIVATION: tl.constexpr):
    """Return the gradient of the logits at `pointers`, which are not read where it is that of the scores."""
    if ACTIVATION == "identity":
        return score_gradient
    logits = tl.load(pointers, mask, other=0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-logits))
    if ACTIVATION == "silu":
        return score_gradient * (sigmoid * (1 + logits * (1 - sigmoid)))
    if ACTIVATION == "ns-sigmoid":
        return score_gradient * (0.5 * sigmoid * (1 - sigmoid))
    return score_gradient * (sigmoid * (1 - sigmoid))


@triton.jit
def _kept_offset(row, sizes, strides):
    """Return the offsets of kept rows."""
    third = row // sizes[2]
    second = third // sizes[1]
    first = second // sizes[0]
    return (
        first.to(tl.int64) * strides[0]
        + (second - first * sizes[0]).to(tl.int64) * strides[1]
        + (third - second * sizes[1]).to(tl.int64) * strides[2]
        + (row - third * sizes[2]).to(tl.int64) * strides[3]
    )


@triton.jit
def _reduced_offset(index, size, strides):
    """Return the offset of a reduced row."""
    first = index // size
    return tl.cast(first, tl.int64) * strides[4] + tl.cast(index - first * size, tl.int64) * strides[5]


@triton.jit
def _tile(rows, channels, WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """Return this program's kept rows [BLOCK_ROWS] and channels [BLOCK_CHANNELS], and which of them there are."""
    block = tl.program_id(0)
    if WIDE:
        block = block.to(tl.int64)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    return row, channel, row < rows, (row < rows)[:, None] & (channel < channels)[None, :]


@triton.jit
def _score(pointers, mask, reduced, reduced_size, strides, ACTIVATION: tl.constexpr, SHARED: tl.constexpr):
    """Return the scores, in fp32, of the logits at `pointers`; for shared ones their mean over the reduced rows."""
    if SHARED:
        total = tl.zeros(pointers.shape, tl.float32)
        for index in range(reduced):
            offset = _reduced_offset(index, reduced_size, strides)
            total += _activate(tl.load(pointers + offset, mask, other=0).to(tl.float32), ACTIVATION)
        return total / reduced
    return _activate(tl.load(pointers, mask, other=0).to(tl.float32), ACTIVATION)


@triton.jit
def forward(
    y,
    logits,
    result,
    rows,
    kept_sizes,
    reduced,
    reduced_size,
    part,
    channels,
    y_strides,
    logits_strides,
    result_steps,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    HEADWISE: tl.constexpr,
    SHARED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """Write ``y * score`` or ``y + score``."""
    row, channel, has_row, mask = _tile(rows, channels, WIDE, BLOCK_ROWS, BLOCK_CHANNELS)
    y_pointers = y + _kept_offset(row, kept_sizes, y_strides)[:, None] + channel.to(tl.int64)[None, :] * y_strides[6]
    logit_pointers = logits + _kept_offset(row, kept_sizes, logits_strides)
    logit_mask = has_row
    if not HEADWISE:
        logit_pointers = logit_pointers[:, None] + channel.to(tl.int64)[None, :] * logits_strides[6]
        logit_mask = mask
    score = _score(logit_pointers, logit_mask, reduced, reduced_size, logits_strides, ACTIVATION, SHARED)
    if HEADWISE:
        score = score[:, None]
    result_pointers = result + row.to(tl.int64)[:, None] * result_steps[0] + channel[None, :]
    first = tl.program_id(2) * part
    for index in range(first, tl.minimum(first + part, reduced)):
        value = tl.load(y_pointers + _reduced_offset(index, reduced_size, y_strides), mask, other=0).to(tl.float32)
        if ADD:
            value += score
        else:
            value *= score
        pointers = result_pointers + tl.cast(index, tl.int64) * result_steps[1]
        tl.store(pointers, value.to(result.dtype.element_ty), mask)


@triton.jit
def backward(
    y,
    logits,
    grad,
    grad_y,
    grad_logits,
    rows,
    kept_sizes,
    reduced,
    reduced_size,
    part,
    channels,
    y_strides,
    logits_strides,
    grad_strides,
    grad_y_steps,
    grad_logits_steps,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    HEADWISE: tl.constexpr,
    SHARED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """Write ``grad * score``, unless ADD, and the logits' gradient: a part's, where parts share it."""
    row, channel, has_row, mask = _tile(rows, channels, WIDE, BLOCK_ROWS, BLOCK_CHANNELS)
    wide_channel, wide_row = channel.to(tl.int64), row.to(tl.int64)
    y_pointers = y + _kept_offset(row, kept_sizes, y_strides)[:, None] + wide_channel[None, :] * y_strides[6]
    grad_pointers = (
        grad + _kept_offset(row, kept_sizes, grad_strides)[:, None] + wide_channel[None, :] * grad_strides[6]
    )
    logit_pointers = logits + _kept_offset(row, kept_sizes, logits_strides)
    grad_logit_pointers = grad_logits + wide_row * grad_logits_steps[0]
    logit_mask = has_row
    if not HEADWISE:
        logit_pointers = logit_pointers[:, None] + wide_channel[None, :] * logits_strides[6]
        grad_logit_pointers = grad_logit_pointers[:, None] + channel[None, :]
        logit_mask = mask
    if not ADD:
        score = _score(logit_pointers, logit_mask, reduced, reduced_size, logits_strides, ACTIVATION, SHARED)
        if HEADWISE:
            score = score[:, None]
        grad_y_pointers = grad_y + wide_row[:, None] * grad_y_steps[0] + channel[None, :]
    score_grad = tl.zeros(logit_pointers.shape, tl.float32)
    first = tl.program_id(2) * part
    for index in range(first, tl.minimum(first + part, reduced)):
        upstream_pointers = grad_pointers + _reduced_offset(index, reduced_size, grad_strides)
        upstream = tl.load(upstream_pointers, mask, other=0).to(tl.float32)
        if not ADD:
            pointers = grad_y_pointers + tl.cast(index, tl.int64) * grad_y_steps[1]
            tl.store(pointers, (upstream * score).to(grad_y.dtype.element_ty), mask)
            value = tl.load(y_pointers + _reduced_offset(index, reduced_size, y_strides), mask, other=0)
            upstream *= value.to(tl.float32)
        if HEADWISE:
            score_grad += tl.sum(upstream, axis=1)
        else:
            score_grad += upstream
    if SHARED:
        score_grad /= reduced
        for index in range(reduced):
            offset = _reduced_offset(index, reduced_size, logits_strides)
            gradient = _logits_gradient(score_grad, logit_pointers + offset, logit_mask, ACTIVATION)
            pointers = grad_logit_pointers + tl.cast(index, tl.int64) * grad_logits_steps[1]
            tl.store(pointers, gradient.to(grad_logits.dtype.element_ty), logit_mask)
    else:
        gradient = _logits_gradient(score_grad, logit_pointers, logit_mask, ACTIVATION)
        pointers = grad_logit_pointers + tl.program_id(2).to(tl.int64) * grad_logits_steps[1]
        tl.store(pointers, gradient.to(grad_logits.dtype.element_ty), logit_mask)
