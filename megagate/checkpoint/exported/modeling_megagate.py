"""A language model with gated attention (Qiu et al. 2025, arXiv 2505.06708), for transformers.

This file lies beside the weights that megagate exports. All that it needs is torch and transformers, 5.24 or newer:
`AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)`.

To understand the gates, read `gate_scores`, `apply_gate` and then `GatedAttention`. Everything else is a plain decoder:
blocks of attention and a feed-forward layer, each behind a norm and added to the residual stream. Feed-forward layers
are dense or mixtures of experts; attention may also be linear (Gated DeltaNet).

Letters in shapes: b batch, s new tokens, n tokens of all sequences (b*s), H hidden size, h query heads, g KV heads,
d channels per head, t channels of a head's gate scores (d for elementwise gates, 1 for headwise ones).
"""

import re
from dataclasses import field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import (
    create_causal_mask,
    create_recurrent_attention_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs


class MegagateConfig(PreTrainedConfig):
    """What the model is made of.

    hybrid_layer_pattern: the layers in order, `*` attention, `G` Gated DeltaNet, `-` dense, `E` experts. An attention
        layer and the feed-forward layer after it are one block, `model.layers.{i}`; either may be alone.
    gate: which gate the attention has; the keys and their values are those of `GATE`.
    zero_centered_norms: whether the weights of norms are stored minus 1; not the one inside of Gated DeltaNet.
    qkv_bias, linear_bias: biases of the query, key, value and gate projections; of all other linear layers.
    hidden_act, gated_mlp: of feed-forward layers, down(act(gate(x)) * up(x)) or down(act(up(x))).
    position_embedding: "rope", "learned" or "none".
    rope_layers: for each block, whether rotary embedding is applied; None for all.
    sliding_window: how many tokens a query sees, itself included; None for all.
    sliding_layers: for each block, whether it has the window; None for all.
    router_*: see `Router`.
    """

    model_type = "megagate"
    keys_to_ignore_at_inference: ClassVar = ["cache"]

    vocab_size: int = 32000
    hidden_size: int = 512
    hybrid_layer_pattern: str = "*-*-"
    num_hidden_layers: int = 0  # this and the next follow from the pattern
    layer_types: list[str] = field(default_factory=list)
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    use_cache: bool = True

    gate: dict[str, Any] = field(default_factory=dict)
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    head_dim: int = 64
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_dropout: float = 0.0
    position_embedding: str = "rope"
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    rope_layers: list[int] | None = None
    sliding_window: int | None = None
    sliding_layers: list[int] | None = None

    norm: str = "RMSNorm"
    norm_eps: float = 1e-5
    zero_centered_norms: bool = False
    linear_bias: bool = False
    hidden_act: str = "silu"
    gated_mlp: bool = True
    intermediate_size: int = 2048

    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 2048
    shared_expert_intermediate_size: int = 0
    shared_expert_gate: bool = False
    router_score_function: str = "softmax"
    router_softmax_before_topk: bool = False
    router_scaling_factor: float | None = None
    router_expert_bias: bool = False
    router_dtype: str | None = "float32"

    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4

    def __post_init__(self, **kwargs: Any) -> None:
        self.gate = {axis: values[0] for axis, values in GATE.items()} | self.gate
        chosen = {name: getattr(self, name) for name in CHOICES}
        chosen |= {axis: value for axis, value in self.gate.items() if axis != "row_alignment"}
        for name, value in chosen.items():
            if value not in (CHOICES | GATE).get(name, ()):
                raise ValueError(f"{name} {value!r} is not known to modeling_megagate.py: correct config.json")
        if "".join(self.blocks) != self.hybrid_layer_pattern:
            pattern = f"hybrid_layer_pattern {self.hybrid_layer_pattern!r}"
            raise ValueError(f"{pattern} has letters other than *, G, - and E: correct config.json")
        self.num_hidden_layers = len(self.blocks)
        self.layer_types = [self._layer_type(index, block) for index, block in enumerate(self.blocks)]
        super().__post_init__(**kwargs)

    @property
    def blocks(self) -> list[str]:
        """The layers of each block, such as "*-"."""
        return re.findall(r"[*G][-E]?|[-E]", self.hybrid_layer_pattern)

    def _layer_type(self, index: int, block: str) -> str:
        """The name that transformers has for the cache and the mask that a block needs; "moe" is none."""
        if block[0] == "*":
            windowed = self.sliding_window and (self.sliding_layers is None or self.sliding_layers[index])
            return "sliding_attention" if windowed else "full_attention"
        return "linear_attention" if block[0] == "G" else "moe"


# ---------------------------------------------------------------------------------------------------------------------
# The gate: Y * act(X W) or Y + act(X W), with X the block's normalised input

GATE: dict[str, tuple[Any, ...]] = {
    # Which tensor is gated: sdpa is each head's attention output; value, key or query the heads after their projection,
    # before QK-norm and rotary embedding; output the output projection's result.
    "position": ("none", "sdpa", "value", "key", "query", "output"),
    "granularity": ("elementwise", "headwise"),  # one score per channel, or one per head
    "sharing": ("head-specific", "head-shared"),  # in the latter every head is given the mean of the scores over heads
    "combine": ("multiply", "add"),
    "activation": ("sigmoid", "silu", "ns-sigmoid", "identity"),
    "input": ("hidden", "constant"),  # the logits are X W, or a parameter
    # Baselines without a gate, both on each head's attention output.
    "sdpa_output_norm": (False, True),  # RMSNorm of each head, with a weight for each head and channel
    "sdpa_output_activation": ("none", "silu"),
    # Of headwise gates in the trainer's layout of weights; without meaning here, and any number.
    "row_alignment": (16,),
}
"""The axes of a gate and their values, the default first."""

CHOICES = {
    "norm": ("RMSNorm", "LayerNorm"),
    "position_embedding": ("rope", "learned", "none"),
    "router_score_function": ("softmax", "sigmoid", "sqrtsoftplus"),
}
"""Values of other keys of the config."""

ACTIVATIONS: dict[str, Any] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "ns-sigmoid": lambda logits: 0.5 + 0.5 * torch.sigmoid(logits),
    "identity": lambda logits: logits,
}


def gate_scores(logits: Tensor, gate: dict[str, Any]) -> Tensor:
    """Return the scores of logits [..., heads, t], in fp32 or wider: of that shape, or [..., 1, t] where shared."""
    scores = ACTIVATIONS[gate["activation"]](wide(logits))
    return scores.mean(dim=-2, keepdim=True) if gate["sharing"] == "head-shared" else scores


def apply_gate(y: Tensor, scores: Tensor, gate: dict[str, Any]) -> Tensor:
    """Return y [..., heads, d] changed by the scores [..., heads or 1, t], in the dtype of y."""
    return (y * scores if gate["combine"] == "multiply" else y + scores).to(y.dtype)


class GatedAttention(nn.Module):
    """Grouped-query attention with a gate.

    Parameters of the gate, where it has any (heads: h for sdpa and query, g for key and value):
        gate_proj.weight: [heads*t, H], rows by head, then channel; [H, H] for the output gate.
        gate_constant: [h, t], the logits of the gate whose input is constant.
        sdpa_norm.weight: [h, d].
    """

    def __init__(self, config: MegagateConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.gate = config, layer_idx, config.gate
        hidden, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.head_dim = channels = config.head_dim
        self.num_key_value_groups = heads // groups  # these four are read by transformers' attention functions
        self.is_causal = True
        self.scaling = channels**-0.5
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        self.has_rope = config.rope_layers is None or bool(config.rope_layers[layer_idx])

        self.q_proj = nn.Linear(hidden, heads * channels, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, groups * channels, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, groups * channels, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * channels, hidden, bias=config.linear_bias)
        self.q_norm = make_norm(config, channels) if config.qk_norm else nn.Identity()
        self.k_norm = make_norm(config, channels) if config.qk_norm else nn.Identity()

        position, scores = self.gate["position"], channels if self.gate["granularity"] == "elementwise" else 1
        if self.gate["input"] == "constant":
            self.gate_constant = nn.Parameter(torch.zeros(heads, scores))
        elif position == "output":
            self.gate_proj = nn.Linear(hidden, hidden, bias=False)
        elif position != "none":
            gated_heads = heads if position in ("sdpa", "query") else groups
            self.gate_proj = nn.Linear(hidden, gated_heads * scores, bias=config.qkv_bias)
        if self.gate["sdpa_output_norm"]:
            self.sdpa_norm = RMSNorm(config, heads, channels, zero_centered=config.zero_centered_norms)

    def gated(self, position: str, y: Tensor, hidden: Tensor) -> Tensor:
        """Return y [b, s, heads, d], at the output [b, s, H], gated if the gate is at this position, else as it is.

        `hidden` is X [b, s, H], the normalised input that queries, keys and values are made from.
        """
        if self.gate["position"] != position:
            return y
        logits = self.gate_constant if self.gate["input"] == "constant" else self.gate_proj(hidden)
        if position != "output" and self.gate["input"] == "hidden":
            logits = logits.unflatten(-1, (y.shape[-2], -1))
        return apply_gate(y, gate_scores(logits, self.gate), self.gate)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        mask: Any,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden: X, [b, s, H].
            rotary: from `rotary_tables`, or None.
            mask: what the attention function needs, from transformers.
            cache: keys and values of earlier tokens.
            kwargs: for the attention function.

        Returns:
            [b, s, H], and the attention probabilities [b, h, s, all tokens] where the attention function has them.
        """
        query = self.gated("query", self.heads(self.q_proj(hidden)), hidden)  # [b, s, h, d]
        key = self.gated("key", self.heads(self.k_proj(hidden)), hidden)  # [b, s, g, d]
        value = self.gated("value", self.heads(self.v_proj(hidden)), hidden)  # [b, s, g, d]
        query, key = self.q_norm(query), self.k_norm(key)

        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if rotary is not None and self.has_rope:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        window = {"sliding_window": self.sliding_window}
        y, probabilities = attend(
            self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **window, **kwargs
        )  # [b, s, h, d]

        y = self.gated("sdpa", y, hidden)
        if self.gate["sdpa_output_norm"]:
            y = self.sdpa_norm(y)
        if self.gate["sdpa_output_activation"] == "silu":
            y = F.silu(y)
        return self.gated("output", self.o_proj(y.flatten(-2)), hidden), probabilities

    def heads(self, x: Tensor) -> Tensor:
        """View [b, s, heads*d] as [b, s, heads, d]."""
        return x.unflatten(-1, (-1, self.head_dim))


# ---------------------------------------------------------------------------------------------------------------------
# Attention without gates


def eager_attention(
    module: GatedAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attend with the matrix in full, to which `mask` is added.

    Returns, of query [b, h, s, d] and of key and value [b, g, all tokens, d], [b, s, h, d] and the probabilities
    [b, h, s, all tokens].
    """
    key, value = (tensor.repeat_interleave(module.num_key_value_groups, dim=1) for tensor in (key, value))
    logits = query @ key.transpose(-1, -2) * scaling
    if mask is not None:
        logits = logits + mask
    probabilities = F.softmax(wide(logits), dim=-1).to(query.dtype)
    probabilities = F.dropout(probabilities, p=dropout, training=module.training)
    return (probabilities @ value).transpose(1, 2), probabilities


def rotary_tables(positions: Tensor, config: MegagateConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin [b, 1, s, c] of the angles for positions [b, s]; c channels of a head turn.

    Channel i and channel i + c/2 are a pair, which turns by position * theta^(-2i/c) (arXiv 2104.09864), or by what
    `rope_type` makes of it, such as "yarn".
    """
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        channels = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=positions.device) / channels
        frequencies, scale = rope["rope_theta"] ** -exponents, 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, positions.device)
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first channels of x [b, heads, s, d] by the tables [b, 1, s, c]; the other d - c pass."""
    turned, passed = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)
    return torch.cat((turned, passed), dim=-1)


# ---------------------------------------------------------------------------------------------------------------------
# Norms


def wide(x: Tensor) -> Tensor:
    """Return x in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w over the last dimension (arXiv 1910.07467); w of `shape`, stored minus 1 or not."""

    def __init__(self, config: MegagateConfig, *shape: int, zero_centered: bool) -> None:
        super().__init__()
        self.eps, self.offset = config.norm_eps, float(zero_centered)
        self.weight = nn.Parameter(torch.full(shape, 1 - self.offset))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., *shape]."""
        scaled = wide(x) * torch.rsqrt(wide(x).square().mean(dim=-1, keepdim=True) + self.eps)
        return (scaled * (wide(self.weight) + self.offset)).to(x.dtype)  # bf16 has no digits for 1 + a small weight


class LayerNorm(nn.LayerNorm):
    """torch's, whose weight may be stored minus 1."""

    def __init__(self, config: MegagateConfig, size: int, zero_centered: bool) -> None:
        super().__init__(size, eps=config.norm_eps)
        self.offset = float(zero_centered)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size]."""
        weight, bias = wide(self.weight) + self.offset, wide(self.bias)
        return F.layer_norm(wide(x), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def make_norm(config: MegagateConfig, size: int, zero_centered: bool | None = None) -> nn.Module:
    """Return the kind of norm that the config names, with weights as the config says where `zero_centered` is None."""
    kind = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}[config.norm]
    return kind(config, size, zero_centered=config.zero_centered_norms if zero_centered is None else zero_centered)


# ---------------------------------------------------------------------------------------------------------------------
# Feed-forward layers


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate projection (arXiv 2002.05202)."""

    def __init__(self, config: MegagateConfig, size: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, size, bias=bias) if config.gated_mlp else None
        self.up_proj = nn.Linear(config.hidden_size, size, bias=bias)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., H] to [..., H]."""
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Choose top-k experts of each token and weigh them.

    softmax: over the chosen logits, or over all of them before the choice (`router_softmax_before_topk`).
    sigmoid, sqrtsoftplus: of each logit on its own, divided by the sum over the chosen ones; `expert_bias` is added for
    the choice only.
    """

    expert_bias: Tensor | None

    def __init__(self, config: MegagateConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.num_experts)) if config.linear_bias else None
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.router_expert_bias else None
        self.register_buffer("expert_bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and indices, [n, k] each, of the experts of x [n, H]."""
        config = self.config
        dtype = x.dtype if config.router_dtype is None else getattr(torch, config.router_dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):  # the choice of experts keeps its precision
            logits = F.linear(x.to(dtype), self.weight.to(dtype), bias)  # [n, experts]
        scores = wide(logits)
        if config.router_score_function == "softmax":
            if config.router_softmax_before_topk:
                scores = scores.softmax(dim=-1)
            weights, chosen = scores.topk(config.num_experts_per_tok)
            if not config.router_softmax_before_topk:
                weights = weights.softmax(dim=-1)
        else:
            scores = scores.sigmoid() if config.router_score_function == "sigmoid" else F.softplus(scores).sqrt()
            biased = scores if self.expert_bias is None else scores + self.expert_bias
            chosen = biased.topk(config.num_experts_per_tok).indices
            weights = scores.gather(-1, chosen)
            if config.num_experts_per_tok > 1:
                weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * (config.router_scaling_factor or 1.0), chosen


class MixtureOfExperts(nn.Module):
    """The weighted sum of each token's experts, and of a shared expert where there is one."""

    def __init__(self, config: MegagateConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = nn.ModuleList(
            MLP(config, config.moe_intermediate_size, config.linear_bias) for _ in range(config.num_experts)
        )
        self.shared_expert = self.shared_expert_gate = None
        if config.shared_expert_intermediate_size:
            self.shared_expert = MLP(config, config.shared_expert_intermediate_size, bias=False)
            if config.shared_expert_gate:
                self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, H] to [b, s, H]."""
        tokens = x.flatten(0, 1)  # [n, H]
        weights, chosen = self.router(tokens)
        output = torch.zeros_like(tokens)
        for index in chosen.unique().tolist():
            rows, slots = (chosen == index).nonzero(as_tuple=True)
            weighted = self.experts[index](tokens[rows]) * weights[rows, slots, None]
            output.index_add_(0, rows, weighted.to(output.dtype))
        if self.shared_expert is not None:
            shared = self.shared_expert(tokens)
            if self.shared_expert_gate is not None:
                shared = shared * self.shared_expert_gate(tokens).sigmoid()
            output = output + shared
        return output.view_as(x)


# ---------------------------------------------------------------------------------------------------------------------
# Linear attention


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule (arXiv 2412.06464), as in Qwen3-Next.

    S_t = S_{t-1} a_t (I - b_t k_t k_t^T) + b_t v_t k_t^T and o_t = S_t q_t, with a_t the decay and b_t the write
    strength of a head. Queries, keys and values pass a short causal convolution and silu first. The output is
    normalised for each head and multiplied by silu of z.
    """

    def __init__(self, config: MegagateConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        hidden, value_heads = config.hidden_size, config.linear_num_value_heads
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = value_heads * config.linear_value_head_dim
        self.sizes = [keys, keys, values]
        self.q_proj = nn.Linear(hidden, keys, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, values, bias=False)
        self.z_proj = nn.Linear(hidden, values, bias=False)
        self.b_proj = nn.Linear(hidden, value_heads, bias=False)
        self.a_proj = nn.Linear(hidden, value_heads, bias=False)
        self.q_conv, self.k_conv, self.v_conv = (
            nn.Conv1d(size, size, config.linear_conv_kernel_dim, groups=size, bias=False) for size in self.sizes
        )
        self.A_log = nn.Parameter(torch.zeros(value_heads))
        self.dt_bias = nn.Parameter(torch.ones(value_heads))
        self.norm = make_norm(config, config.linear_value_head_dim, zero_centered=False)
        self.o_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, hidden: Tensor, mask: Tensor | None, cache: Any = None) -> Tensor:
        """Map [b, s, H] to [b, s, H]; mask [b, s] is 0 at padding, cache holds the state and the last tokens."""
        if mask is not None:
            hidden = hidden * mask[..., None].to(hidden.dtype)
        length, width = hidden.shape[1], self.config.linear_conv_kernel_dim
        mixed = torch.cat((self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)), dim=-1).transpose(1, 2)
        state = None
        if cache is not None:
            state = cache.get_recurrent_state(self.layer_idx)
            mixed = cache.update_conv_state(mixed, self.layer_idx, conv_kernel_size=width)  # earlier tokens in front
        taps = torch.cat((self.q_conv.weight, self.k_conv.weight, self.v_conv.weight))  # [channels, 1, width]
        mixed = F.conv1d(F.pad(mixed, (width - 1, 0)), taps, groups=sum(self.sizes))[..., -length:]
        query, key, value = F.silu(mixed).transpose(1, 2).split(self.sizes, dim=-1)

        rule = torch_chunk_gated_delta_rule if state is None or length > 1 else torch_recurrent_gated_delta_rule
        output, state = rule(
            query.unflatten(-1, (-1, self.config.linear_key_head_dim)),
            key.unflatten(-1, (-1, self.config.linear_key_head_dim)),
            value.unflatten(-1, (-1, self.config.linear_value_head_dim)),
            g=-self.A_log.float().exp() * F.softplus(self.a_proj(hidden).float() + self.dt_bias),
            beta=self.b_proj(hidden).sigmoid(),
            initial_state=state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
        )  # [b, s, value heads, channels]
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)
        z = self.z_proj(hidden).view_as(output)
        return self.o_proj((wide(self.norm(output)) * F.silu(wide(z))).to(hidden.dtype).flatten(-2))


# ---------------------------------------------------------------------------------------------------------------------
# The model


class MegagateBlock(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); a block may lack either."""

    def __init__(self, config: MegagateConfig, layer_idx: int) -> None:
        super().__init__()
        layers = config.blocks[layer_idx]
        self.self_attn = GatedAttention(config, layer_idx) if layers[0] == "*" else None
        self.linear_attn = GatedDeltaNet(config, layer_idx) if layers[0] == "G" else None
        self.mlp: nn.Module | None = None
        if layers[0] in "*G":
            self.input_layernorm = make_norm(config, config.hidden_size)
        if layers[-1] == "-":
            self.mlp = MLP(config, config.intermediate_size, config.linear_bias)
        elif layers[-1] == "E":
            self.mlp = MixtureOfExperts(config)
        if self.mlp is not None:
            self.post_attention_layernorm = make_norm(config, config.hidden_size)

    def forward(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: Any, cache: Any = None, **kwargs: Any
    ) -> Tensor:
        """Map the residual stream [b, s, H] to the next block's."""
        if self.self_attn is not None:
            hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, mask, cache, **kwargs)[0]
        if self.linear_attn is not None:
            hidden = hidden + self.linear_attn(self.input_layernorm(hidden), mask, cache)
        if self.mlp is not None:
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden


class MegagatePreTrainedModel(PreTrainedModel):
    """What transformers asks of a model: names, abilities and initial weights."""

    config: MegagateConfig
    config_class = MegagateConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["MegagateBlock"]
    _keep_in_fp32_modules_strict: ClassVar = ["expert_bias"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs: ClassVar = {"hidden_states": MegagateBlock, "attentions": GatedAttention}

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RMSNorm | LayerNorm):
            init.constant_(module.weight, 1 - module.offset)
        elif isinstance(module, Router):
            init.normal_(module.weight, std=self.config.initializer_range)
            for bias in (module.bias, module.expert_bias):
                if bias is not None:
                    init.zeros_(bias)
        elif isinstance(module, GatedAttention) and self.config.gate["input"] == "constant":
            init.zeros_(module.gate_constant)
        elif isinstance(module, GatedDeltaNet):
            init.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(1, 16).log())
            init.ones_(module.dt_bias)


class MegagateModel(MegagatePreTrainedModel):
    """The decoder without its output layer."""

    def __init__(self, config: MegagateConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = None
        if config.position_embedding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(MegagateBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = make_norm(config, config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the blocks.

        Args:
            input_ids: [b, s], the new tokens; or `inputs_embeds` [b, s, H].
            attention_mask: [b, earlier and new tokens], 0 at padding; or what attention functions need, by layer type.
            position_ids: [b, s]; those after the cached tokens if None.
            cache: transformers' Cache of earlier tokens.
            use_cache: whether to return a cache.

        Returns:
            The last hidden state [b, s, H] after the final norm, and the cache.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            start = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(start, start + hidden.shape[1], device=hidden.device)[None]

        if isinstance(attention_mask, dict):
            masks = attention_mask
        else:
            masks = self.masks(
                inputs_embeds=hidden, attention_mask=attention_mask, cache=cache, position_ids=position_ids
            )
        rotary = rotary_tables(position_ids, self.config) if self.config.position_embedding == "rope" else None
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(position_ids)
        for kind, block in zip(self.config.layer_types, self.layers, strict=True):
            hidden = block(hidden, rotary, masks.get(kind), cache=cache, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), cache=cache)

    def masks(self, **arguments: Any) -> dict[str, Any]:
        """Return what the attention function needs to know about who sees whom, by layer type."""
        makers = {
            "full_attention": create_causal_mask,
            "sliding_attention": create_sliding_window_causal_mask,
            "linear_attention": create_recurrent_attention_mask,
        }
        kinds = set(self.config.layer_types) & makers.keys()
        return {kind: makers[kind](config=self.config, **arguments) for kind in kinds}


class MegagateForCausalLM(MegagatePreTrainedModel, GenerationMixin):
    """The decoder and a linear map to the vocabulary."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MegagateConfig) -> None:
        super().__init__(config)
        self.model = MegagateModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [b, s, vocabulary], of the last `logits_to_keep` tokens only if that is not 0.

        With `labels` [b, s] (-100 where there is none), also the mean cross entropy of predicting each next token.
        Other arguments are those of `MegagateModel`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
