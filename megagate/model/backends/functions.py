"""Functions of Megatron in fewer passes over memory: rotary embedding, cross entropy, and the sorting of tokens.

Megatron fuses them with Transformer Engine and otherwise spells them out, with a copy for almost every operator. The
ones here have the arguments and the results of its plain versions, of which they take the place when the torch backend
is chosen. They are replaced and not passed in, since Megatron calls them by name.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ReduceOp, all_reduce

rotate_by_megatron = rope_utils._apply_rotary_pos_emb_bshd


class Rotary(torch.autograd.Function):
    """Turn channel pairs (i, i + c/2) of [s, b, heads, d] by the angles [s, 1, 1, c], c <= d (arXiv 2104.09864)."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return a new tensor like `heads`; channels after c pass through."""
        ctx.save_for_backward(cos, sin)
        (cos_first, cos_second), (sin_first, sin_second) = cos.chunk(2, dim=-1), sin.chunk(2, dim=-1)
        return _turn(heads, cos_first, cos_second, -sin_first, sin_second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Turn back."""
        cos, sin = ctx.saved_tensors
        (cos_first, cos_second), (sin_first, sin_second) = cos.chunk(2, dim=-1), sin.chunk(2, dim=-1)
        return _turn(grad, cos_first, cos_second, sin_second, -sin_first), None, None


def _turn(heads: Tensor, first_kept: Tensor, second_kept: Tensor, first_added: Tensor, second_added: Tensor) -> Tensor:
    """Return [x1 * first_kept + x2 * first_added, x2 * second_kept + x1 * second_added, the channels after these]."""
    half = first_kept.shape[-1]
    result = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    x1, x2 = heads[..., :half], heads[..., half : 2 * half]
    y1, y2 = result[..., :half], result[..., half : 2 * half]
    torch.mul(x1, first_kept, out=y1).addcmul_(x2, first_added)
    torch.mul(x2, second_kept, out=y2).addcmul_(x1, second_added)
    result[..., 2 * half :] = heads[..., 2 * half :]
    return result


@functools.wraps(rotate_by_megatron)
def rotate(t: Tensor, freqs: Tensor, rotary_interleaved: bool = False, *args: Any, **kwargs: Any) -> Tensor:
    """Apply the rotary embedding to t [s, b, heads, d]; pairs other than (i, i + c/2) are left to Megatron."""
    mscale = kwargs.get("mscale", 1.0)
    if rotary_interleaved or args or kwargs.get("mla_rotary_interleaved") or kwargs.get("multi_latent_attention"):
        return rotate_by_megatron(t, freqs, rotary_interleaved, *args, **kwargs)
    return Rotary.apply(t, (freqs.cos() * mscale).to(t.dtype), (freqs.sin() * mscale).to(t.dtype))


class CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] with the vocabulary divided over tensor-parallel ranks.

    A rank takes the log-softmax of its part, L = logits - Z with Z the log of its sum of exponentials, in one pass. The
    whole softmax is then exp(L + Z - log sum over ranks of exp(Z)).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        """Return the loss [...] in fp32 of logits [..., v], v of the vocabulary's tokens, and target [...]."""
        size, part = get_pg_size(group), logits.shape[-1]
        log_softmax = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        index = target - get_pg_rank(group) * part
        inside = (index >= 0) & (index < part)
        index = index.clamp(0, part - 1).unsqueeze(-1)
        predicted = log_softmax.gather(-1, index).squeeze(-1)
        share = None
        if size > 1:
            local = logits.amax(dim=-1).float() - log_softmax.amax(dim=-1)  # Z; the largest L loses no digits to it
            largest = local.clone()
            all_reduce(largest, op=ReduceOp.MAX, group=group)
            total = (local - largest).exp_()
            all_reduce(total, group=group)
            share = local - total.log_() - largest  # log of this part's share of the probability
            predicted = (predicted + share) * inside
            all_reduce(predicted, group=group)
        ctx.save_for_backward(log_softmax, index, inside, share)
        return predicted.neg_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the logits; like Megatron's, it overwrites what was saved."""
        log_softmax, index, inside, share = ctx.saved_tensors
        if share is not None:
            log_softmax += share.unsqueeze(-1)
        gradient = log_softmax.exp_().mul_(grad.unsqueeze(-1))
        gradient.scatter_add_(-1, index, -(grad * inside).unsqueeze(-1))
        return gradient, None, None


@functools.wraps(vocab_parallel_cross_entropy)
def cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    """Return the loss [s, b] of logits [s, b, v]; label smoothing is left to Megatron."""
    if label_smoothing or tp_group is None:
        return vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing, tp_group)
    return CrossEntropy.apply(vocab_parallel_logits, target, tp_group)


@functools.wraps(sort_chunks_by_idxs)
def sort_chunks(
    input: Tensor, split_sizes: Tensor, sorted_idxs: Tensor, probs: Tensor | None = None, fused: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Put the chunks of `input` and `probs` in order; where a rank holds all experts they are, and need no copy.

    On a GPU, looking would wait for it.
    """
    if not sorted_idxs.is_cuda and sorted_idxs.tolist() == list(range(len(sorted_idxs))):
        return input, probs
    return sort_chunks_by_idxs(input, split_sizes, sorted_idxs, probs=probs, fused=fused)


REPLACED: dict[tuple[Any, str], tuple[Callable[..., Any], Callable[..., Any]]] = {
    (rope_utils, "_apply_rotary_pos_emb_bshd"): (rotate_by_megatron, rotate),
    (tensor_parallel, "vocab_parallel_cross_entropy"): (vocab_parallel_cross_entropy, cross_entropy),
    (token_dispatcher, "sort_chunks_by_idxs"): (sort_chunks_by_idxs, sort_chunks),
}
"""Where Megatron looks a function up -> its function, ours."""


def replace() -> None:
    """Put the functions of this module in the place of Megatron's; idempotent."""
    for (owner, name), (_, ours) in REPLACED.items():
        setattr(owner, name, ours)


def restore() -> None:
    """Put Megatron's functions back, to compare with them."""
    for (owner, name), (megatrons, _) in REPLACED.items():
        setattr(owner, name, megatrons)
