"""The math of gated attention in plain torch: the truth that every distributed result is compared with.

Written to be read and checked against the paper (Qiu et al. 2025, arXiv 2505.06708), not to be fast: one process, no
fused kernel, the attention matrix in full. Any floating dtype and device; tests run it in float64. The small functions
for scores and for applying them are also what the parallel attention layer calls, so both share one definition.

Letters in shapes: s sequence, b batch, H hidden size, q query heads, g key/value heads ("query groups"), d head
channels, t = d for elementwise gates and 1 for headwise ones. Tensors are [s, b, heads, channels], as in Megatron.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megagate.gate.config import (
    GateActivation,
    GateCombine,
    GateConfig,
    GateInput,
    GatePosition,
    GateSharing,
    SdpaOutputActivation,
)


def activate(logits: Tensor, config: GateConfig, in_own_dtype: bool = False) -> Tensor:
    """Return the gate's activation of `logits`, elementwise, before any sharing; of experts, only the largest.

    bf16 and fp16 logits are activated, and the scores returned, in fp32 unless `in_own_dtype`; fp32 and fp64 keep
    theirs. Under Switch-Head the last dimension is the head's experts, which do not compete (arXiv 2312.07987, section
    2.2): each has a score of its own, and those that are not among the top k have zero.
    """
    scores = _activate(logits if in_own_dtype else at_least_fp32(logits), config)
    if config.switch_head_top_k == config.switch_head_experts:
        return scores
    largest = scores.topk(config.switch_head_top_k, dim=-1).indices
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).scatter(-1, largest, False), 0)


def _activate(logits: Tensor, config: GateConfig) -> Tensor:
    match config.activation:
        case GateActivation.SIGMOID:
            return torch.sigmoid(logits)
        case GateActivation.SILU:
            return F.silu(logits)
        case GateActivation.NS_SIGMOID:
            return 0.5 + 0.5 * torch.sigmoid(logits)
        case GateActivation.IDENTITY:
            return logits


def gate_scores(logits: Tensor, config: GateConfig) -> Tensor:
    """Return the gate's scores.

    Args:
        logits: [..., heads, t], all heads of the gated tensor; the output gate has no head dimension, [..., H].

    Returns:
        The activated logits, [..., heads, t]; for head-shared gates their mean over heads, [..., 1, t]. The paper
        averages "scores", which are taken to be the activated values. fp32 for bf16 and fp16 logits.
    """
    scores = activate(logits, config)
    return scores.mean(dim=-2, keepdim=True) if config.sharing == GateSharing.HEAD_SHARED else scores


def apply_gate(y: Tensor, scores: Tensor, config: GateConfig) -> Tensor:
    """Return ``y * scores`` or ``y + scores``, with `scores` broadcast over `y`.

    Under Switch-Head `y` [..., heads, e*d] holds what each of e experts makes of a head, and the result [..., heads, d]
    is their sum, each multiplied by its score of [..., heads, e]. Computed in the wider dtype of the two and returned
    in that of `y`.
    """
    if config.is_switch_head:
        experts = y.unflatten(-1, (config.switch_head_experts, -1))  # [..., heads, e, d]
        return (experts * scores[..., None]).sum(dim=-2).to(y.dtype)
    gated = y * scores if config.combine == GateCombine.MULTIPLY else y + scores
    return gated.to(y.dtype)


def per_head_rms_norm(y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of each head on its own: ``y / sqrt(mean(y^2) + eps) * weight`` over the last dimension.

    Args:
        y: [..., heads, d].
        weight: [d], one for all heads, or [heads, d]. A zero-centred weight must come with its 1 already added.
        eps: added to the mean square.

    Returns:
        [..., heads, d] in the dtype of `y`; bf16 and fp16 are normalised in fp32.
    """
    wide = at_least_fp32(y)
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight).to(y.dtype)


def rotary_tables(positions: Tensor, rotary_channels: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [s, rotary_channels], of the rotary embedding at `positions` [s], in their dtype.

    Channel i and channel i + rotary_channels/2 form a pair and turn by ``position * base^(-2i/rotary_channels)``
    (Su et al. 2021, arXiv 2104.09864, in the half-split pairing of GPT-NeoX that Megatron uses by default).
    """
    exponents = torch.arange(0, rotary_channels, 2, dtype=positions.dtype, device=positions.device) / rotary_channels
    angles = torch.outer(positions, base**-exponents)  # [s, rotary_channels/2]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of `x` [s, b, heads, d] by the tables [s, c], c <= d; the other d - c pass through."""
    channels = cos.shape[-1]
    cos, sin = cos[:, None, None, :], sin[:, None, None, :]
    turned, passed = x[..., :channels], x[..., channels:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(x.dtype), passed), dim=-1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return ``softmax(scale * Q K^T, causal) V``, each key/value head serving q/g consecutive query heads.

    Args:
        query: [s, b, q, d].
        key, value: [s, b, g, d].
        scale: factor on the logits, usually ``d ** -0.5``.

    Returns:
        [s, b, q, d] in the dtype of `query`; the softmax of bf16 and fp16 logits is taken in fp32.
    """
    heads_per_group = query.shape[2] // key.shape[2]
    key = key.repeat_interleave(heads_per_group, dim=2)  # [s, b, q, d]
    value = value.repeat_interleave(heads_per_group, dim=2)
    logits = at_least_fp32(torch.einsum("ibhd,jbhd->bhij", query, key) * scale)
    length = query.shape[0]
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(diagonal=1)
    probabilities = logits.masked_fill(future, float("-inf")).softmax(dim=-1).to(value.dtype)
    return torch.einsum("bhij,jbhd->ibhd", probabilities, value)


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of one attention block, whole (not sharded) and without padding rows; no biases.

    The first four are the fields of `QKVLayout.split_weight`, in its order. Rows are ordered by head, then channel.
    """

    query: Tensor  # [q*d, H]
    gate: Tensor | None  # rows of a gate that lives in linear_qkv: [q*t, H] (sdpa, query) or [g*t, H] (key, value)
    key: Tensor  # [g*d, H], with e experts for each head [g*e*d, H]
    value: Tensor  # likewise
    output: Tensor  # [H, q*d]
    query_norm: Tensor | None = None  # [d], QK-norm; None for none
    key_norm: Tensor | None = None  # [d]
    gate_constant: Tensor | None = None  # [q, t], logits of the input-independent gate
    gate_output: Tensor | None = None  # [H, H], projection of the output gate
    sdpa_norm: Tensor | None = None  # [q, d], weight of the baseline with a norm on the attention output

    def required(self, name: str) -> Tensor:
        """Return the weight called `name`; raise ValueError when it is None."""
        weight = getattr(self, name)
        if weight is None:
            raise ValueError(f"this gate needs the weight {name!r}, which is missing")
        return weight


def reference_attention(
    hidden: Tensor,
    weights: AttentionWeights,
    config: GateConfig,
    *,
    num_attention_heads: int,
    num_query_groups: int,
    rotary: tuple[Tensor, Tensor] | None = None,
    norm_epsilon: float = 1e-6,
    scale: float | None = None,
) -> Tensor:
    """Compute one whole attention block with any gate, from its normalised input to its output projection.

    Args:
        hidden: [s, b, H], the input after the block's pre-normalisation; the gate reads the very same tensor.
        weights: the block's weights; those that `config` needs must be there.
        config: which gate.
        num_attention_heads: q.
        num_query_groups: g.
        rotary: cos and sin tables as `rotary_tables` returns them, or None for no rotary embedding.
        norm_epsilon: of QK-norm and of the norm on the attention output.
        scale: of the attention logits; ``d ** -0.5`` where None.

    Returns:
        [s, b, H], what is added to the residual stream.

    Raises:
        ValueError: a weight that the gate needs is missing.

    Gates on query, key and value, and Switch-Head's sums over experts, act right after the projections, hence before
    QK-norm and rotary embedding.
    """
    sequence, batch, _ = hidden.shape

    def project(weight: Tensor, heads: int) -> Tensor:
        return (hidden @ weight.T).view(sequence, batch, heads, -1)

    def gated(y: Tensor, logits: Tensor) -> Tensor:
        return apply_gate(y, gate_scores(logits, config), config)

    query = project(weights.query, num_attention_heads)  # [s, b, q, d]
    key = project(weights.key, num_query_groups)  # [s, b, g, d], with e experts for each head [s, b, g, e*d]
    value = project(weights.value, num_query_groups)  # likewise

    match config.position:
        case GatePosition.QUERY:
            query = gated(query, project(weights.required("gate"), num_attention_heads))
        case GatePosition.KEY:
            key = gated(key, project(weights.required("gate"), num_query_groups))
        case GatePosition.VALUE:
            value = gated(value, project(weights.required("gate"), num_query_groups))
        case GatePosition.KEY_VALUE:
            logits = project(weights.required("gate"), num_query_groups)  # [s, b, g, e]
            key, value = gated(key, logits), gated(value, logits)

    if weights.query_norm is not None:
        query = per_head_rms_norm(query, weights.query_norm, norm_epsilon)
    if weights.key_norm is not None:
        key = per_head_rms_norm(key, weights.key_norm, norm_epsilon)
    if rotary is not None:
        query, key = apply_rotary(query, *rotary), apply_rotary(key, *rotary)

    y = causal_attention(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)  # [s, b, q, d]
    if config.position == GatePosition.SDPA:
        constant = config.input == GateInput.CONSTANT
        y = gated(
            y, weights.required("gate_constant") if constant else project(weights.required("gate"), num_attention_heads)
        )
    if config.sdpa_output_norm:
        y = per_head_rms_norm(y, weights.required("sdpa_norm"), norm_epsilon)
    if config.sdpa_output_activation == SdpaOutputActivation.SILU:
        y = F.silu(y)

    output = y.flatten(2) @ weights.output.T  # [s, b, q*d] -> [s, b, H]
    if config.position == GatePosition.OUTPUT:
        output = gated(output, hidden @ weights.required("gate_output").T)
    return output


def at_least_fp32(x: Tensor) -> Tensor:
    """Return bf16 and fp16 as fp32, and fp32 and fp64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
