"""Gated self-attention for Megatron: one class for every gate.

A gate that reads the hidden state has its projection in linear_qkv (see `megagate.gate.layout`), so it shares the GEMM,
the all-gather and the layer norm of queries, keys and values, and a checkpoint reshards to any tensor-parallel size.
Only what cannot live there has parameters of its own: the output gate, whose scores must lie on the ranks as the
block's output does, the input-independent gate, and the norm of the baseline without a gate.

Megatron calls `get_query_key_value_tensors`, and, where the config's `attention_output_gate` is set, carries its fourth
result to `_apply_output_gate`. The two methods below replace Megatron's, and nothing of its forward is copied.

Switch-Head (arXiv 2312.07987) is such a gate too: its experts are further rows of linear_qkv, all of them computed in
the same GEMM, and summed up by their scores before anything else sees keys and values.

Letters in shapes: s sequence, b batch, h local query heads, g local KV groups, r query heads per group, d channels per
head, t channels of a score (d elementwise, 1 headwise, e experts under Switch-Head), H hidden size.
"""

import contextlib
import dataclasses
from functools import partial
from typing import Any

import torch
from megatron.core.jit import jit_fuser
from megatron.core.tensor_parallel.layers import (
    linear_with_grad_accumulation_and_async_allreduce,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_rank
from torch import Tensor, nn

from megagate.gate import fused
from megagate.gate.config import (
    GateConfig,
    GateInput,
    GatePosition,
    GatePrecision,
    GateSharing,
    SdpaOutputActivation,
)
from megagate.gate.functional import activate, apply_gate, at_least_fp32, per_head_rms_norm
from megagate.gate.layout import QKVLayout
from megagate.model.recompute import Rebuilt

SHARDED_PARAMETERS = ("gate_constant", "sdpa_norm_weight")
"""Parameters of the attention itself, one entry per local head and channel, cut over tensor-parallel ranks.

They are vectors, like biases and norms, so that Megatron's rule exempts them from weight decay and matrix optimizers.
"""


def projects_apart(config: TransformerConfig, gate: GateConfig, precision: GatePrecision | None) -> bool:
    """Whether the gate's rows of linear_qkv are multiplied by X on their own, to keep the logits out of FP8."""
    return bool(config.fp8) and gate.is_fused and precision in (GatePrecision.BF16, GatePrecision.FP32)


class GatedSelfAttention(SelfAttention):
    """Megatron's self-attention with a gate (arXiv 2505.06708, section 2.2), or a baseline's norm or activation.

    Args:
        config: Megatron's, with `attention_output_gate` equal to `gate.acts_on_sdpa_output`.
        submodules: as for Megatron's self-attention; `linear_qkv` is built with the rows of the layout.
        gate: any but the baseline, for which Megatron's own class is the same.
        recompute_gate: rebuild gated tensors in the backward pass instead of storing them.
        precision: of the gate's projection, activation and product; if None, the projection is computed as linear_qkv
            is, and the others in fp32.
        gate_fusion: compute the gate in one kernel where `megagate.gate.fused` can; otherwise torch.compile fuses it.

    Parameters besides Megatron's, where the gate needs them:
        gate_constant: [h*t], logits of the input-independent gate; zero at first.
        sdpa_norm_weight: [h*d], weight of the norm of each head's attention output.
        linear_gate.weight: [H, H], projection of the output gate, on each tensor-parallel rank whole.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *args: Any,
        gate: GateConfig,
        recompute_gate: bool = False,
        precision: GatePrecision | None = None,
        gate_fusion: bool = True,
        **kwargs: Any,
    ) -> None:
        layout = QKVLayout(config.num_attention_heads, config.num_query_groups, config.kv_channels, gate)

        def linear_qkv(input_size: int, output_size: int, **linear_arguments: Any) -> Any:
            return submodules.linear_qkv(input_size, layout.total_rows, **linear_arguments)

        super().__init__(config, dataclasses.replace(submodules, linear_qkv=linear_qkv), *args, **kwargs)
        self.gate = gate
        self.layout = layout
        self.rebuilt = Rebuilt() if recompute_gate else None
        self.in_own_dtype = precision == GatePrecision.BF16
        self.projects_apart = projects_apart(config, gate, precision)
        if self.projects_apart:
            # Its weight gets gradients from two products, which a kernel that adds to main_grad would not know.
            self.linear_qkv.fuse_wgrad_accumulation = False
            with torch.device("cpu"):  # which need not be the device that the model is built on
                rows = self.local_rows(layout.gate_row_mask()).nonzero().flatten()
            self.register_buffer("gate_rows", rows, persistent=False)
        # The kernel computes in fp32.
        self.gate_fusion = gate_fusion and fused.is_available() and not self.in_own_dtype
        heads = config.num_attention_heads // self.world_size
        if gate.input == GateInput.CONSTANT:
            self.gate_constant = _head_parameter(config, heads * layout.gate_channels, 0.0)
        if gate.sdpa_output_norm:
            initial = 0.0 if config.layernorm_zero_centered_gamma else 1.0
            self.sdpa_norm_weight = _head_parameter(config, heads * config.kv_channels, initial)
        if gate.position == GatePosition.OUTPUT:
            self.linear_gate = _replicated_linear(config)
        self.reset_padding()

    @torch.no_grad()
    def reset_padding(self) -> None:
        """Set the padding rows of linear_qkv to zero; they then stay zero, since their gradient is zero."""
        if self.layout.gate_rows_padded == self.layout.gate_rows:
            return
        padding = self.local_rows(self.layout.padding_row_mask()).to(self.linear_qkv.weight.device)
        for parameter in self.qkv_parameters():
            parameter[padding] = 0

    def qkv_parameters(self) -> list[nn.Parameter]:
        """Return the weight of linear_qkv and its bias, if it has one; Transformer Engine has an empty one instead."""
        weight, bias = self.linear_qkv.weight, self.linear_qkv.bias
        return [weight] if bias is None or not bias.numel() else [weight, bias]

    def local_rows(self, mask: Tensor) -> Tensor:
        """Return the part of a mask [total rows of linear_qkv] that is about this rank's rows."""
        rows = self.linear_qkv.weight.shape[0]
        return mask.narrow(0, get_pg_rank(self.pg_collection.tp) * rows, rows)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe this rank's parameters for a checkpoint; Megatron takes those of a module itself for replicated."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        sharded = {name: getattr(self, name) for name in SHARDED_PARAMETERS if hasattr(self, name)}
        if sharded:
            state |= make_sharded_tensors_for_checkpoint(
                sharded,
                prefix,
                dict.fromkeys(sharded, 0),
                sharded_offsets,
                tp_group=self.pg_collection.tp,
                dp_cp_group=(metadata or {}).get("dp_cp_group"),
            )
        return state

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Attend, and gate the result where the gate is the output gate.

        Args:
            hidden_states: [s', b, H], s' = s or a sequence-parallel shard of it.
            args: as for Megatron's self-attention.
            kwargs: likewise.

        Returns:
            [s', b, H], and a bias [H] that is yet to be added, or None.
        """
        with self.rebuilt.saving() if self.rebuilt else contextlib.nullcontext():
            output, bias = super().forward(hidden_states, *args, **kwargs)
            if self.gate.position != GatePosition.OUTPUT:
                return output, bias
            if bias is not None:
                output = output + bias
            return self.gated(output, self.linear_gate(hidden_states)), None

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, ...]:
        """Project X, separate the heads, and gate queries, keys or values; QK-norm comes after.

        Args:
            hidden_states: [s', b, H], s' = s or a sequence-parallel shard of it.
            key_value_states: not used by self-attention.
            output_gate: whether to return what `_apply_output_gate` needs, which the config says.
            split_qkv: always true here; unsplit rows are for Megatron's fused rotary embedding.

        Returns:
            query [s, b, h, d], key and value [s, b, g, d], and, with `output_gate`, gate logits [s, b, g, r, t] or what
            stands for them.
        """
        mixed, _ = self.linear_qkv(hidden_states)
        if self.projects_apart:
            mixed = self._with_logits_apart(mixed, hidden_states)
        groups, tensor_parallel_size = self.config.num_query_groups, self.world_size
        ranks_per_group = max(1, tensor_parallel_size // groups)
        if ranks_per_group > 1:
            # Several ranks share a group: gather all rows, keep the group's block, then this rank's heads of it.
            rank = get_pg_rank(self.pg_collection.tp)
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.pg_collection.tp)
            mixed = mixed.narrow(-1, rank // ranks_per_group * self.layout.rows_per_group, self.layout.rows_per_group)
        query, logits, key, value = self.layout.split(mixed)
        if ranks_per_group > 1:
            heads = self.layout.heads_per_group // ranks_per_group
            first = rank % ranks_per_group * heads
            query = query.narrow(3, first, heads)
            if logits is not None and self.gate.is_on_query_heads:
                logits = logits.narrow(3, first, heads)
        match self.gate.position, logits:
            case GatePosition.QUERY, Tensor():
                query = self.gated(query, logits)
            case GatePosition.KEY, Tensor():
                key = self.gated(key, logits)
            case GatePosition.VALUE, Tensor():
                value = self.gated(value, logits)
            case GatePosition.KEY_VALUE, Tensor():
                key, value = self.gated(key, logits), self.gated(value, logits)
        query = query.flatten(2, 3)  # [s, b, g, r, d] -> [s, b, h, d]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        if not output_gate:
            return query, key, value
        if self.gate.input == GateInput.CONSTANT:
            logits = self.gate_constant.view(1, 1, -1, self.layout.gate_channels)
        # Megatron calls _apply_output_gate only if there is something to hand to it.
        return query, key, value, query.new_empty(0) if logits is None else logits

    def _with_logits_apart(self, mixed: Tensor, hidden_states: Tensor) -> Tensor:
        """Return linear_qkv's output [s, b, local rows] with the gate's columns computed anew from X [s', b, H].

        The weights are the same rows of linear_qkv, so checkpoints do not differ. The columns that are replaced pass no
        gradient back.
        """
        rows: Any = self.gate_rows
        weight, *bias = self.qkv_parameters()
        logits = linear_with_grad_accumulation_and_async_allreduce(
            hidden_states,
            weight[rows],
            bias[0][rows] if bias else None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=self.config.tensor_model_parallel_size > 1 and not self.config.sequence_parallel,
            sequence_parallel=self.config.sequence_parallel,
            tp_group=self.pg_collection.tp,
        )
        return mixed.index_copy(-1, rows, logits)

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Change the attention output x [s, b, h*d] as the config says; keeps its dtype.

        `gate` holds the logits [s, b, g, r, t], of the input-independent gate [1, 1, h, t]; the baselines do not read
        it.
        """
        channels = self.config.kv_channels
        if self.gate.has_gate:
            return self.gated(x.unflatten(-1, (*gate.shape[2:-1], channels)), gate).flatten(2)
        if self.gate.sdpa_output_norm:
            weight = self.sdpa_norm_weight.view(-1, channels)
            return self._rebuildable(self._normed, x.unflatten(-1, (-1, channels)), weight).flatten(2)
        assert self.gate.sdpa_output_activation == SdpaOutputActivation.SILU
        return self._rebuildable(nn.functional.silu, x)

    def _normed(self, heads: Tensor, weight: Tensor) -> Tensor:
        if self.config.layernorm_zero_centered_gamma:
            weight = at_least_fp32(weight) + 1
        return per_head_rms_norm(heads, weight, self.config.layernorm_epsilon)

    def gated(self, y: Tensor, logits: Tensor) -> Tensor:
        """Gate y [s, b, *heads, d], with experts [s, b, g, e*d], with the logits [s, b, *heads, t].

        Returns [s, b, *heads, d]; the output gate has no heads.

        Whatever is gated passes through here, and so can be observed here.
        """
        if self.gate_fusion and fused.supports(y, logits, self.gate):
            if self.sums_scores_over_ranks:
                return self._rebuildable(
                    partial(fused.apply_scores, combine=self.gate.combine), y, self.scores(logits), saves_products=False
                )
            return self._rebuildable(partial(fused.fused_gate, config=self.gate), y, logits, saves_products=False)
        if self.gate.sharing == GateSharing.HEAD_SHARED:
            return self._rebuildable(partial(_combine, gate=self.gate), y, self.scores(logits))
        own = self.in_own_dtype
        return self._rebuildable(partial(_activate_and_combine, gate=self.gate, in_own_dtype=own), y, logits)

    @property
    def sums_scores_over_ranks(self) -> bool:
        """Whether a score is a mean over the heads of several ranks."""
        return self.gate.sharing == GateSharing.HEAD_SHARED and self.world_size > 1

    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores of the logits [s, b, *heads, t]; for head-shared gates their mean over all heads.

        The mean has one entry in place of the heads. Each rank has the same number of heads (where ranks share a KV
        group, each of its heads counts once per rank), so the mean over ranks of their means is the mean. Every rank
        uses it, hence a sum over ranks in the backward pass too.
        """
        scores = activate(logits, self.gate, self.in_own_dtype)
        if self.gate.sharing != GateSharing.HEAD_SHARED:
            return scores
        group = self.pg_collection.tp
        mean = scores.mean(dim=tuple(range(2, scores.dim() - 1)), keepdim=True)
        return copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(mean, group=group) / self.world_size, group=group
        )

    def _rebuildable(self, function: Any, *inputs: Tensor, saves_products: bool = True) -> Tensor:
        if self.rebuilt and torch.is_grad_enabled():
            return self.rebuilt.apply(function, *inputs, saves_products=saves_products)
        return function(*inputs)


@jit_fuser
def _activate_and_combine(y: Tensor, logits: Tensor, gate: GateConfig, in_own_dtype: bool) -> Tensor:
    # Rows of linear_qkv lie apart from group to group, which costs an unfused activation more than the copy does.
    return apply_gate(y, activate(logits.contiguous(), gate, in_own_dtype), gate)


@jit_fuser
def _combine(y: Tensor, scores: Tensor, gate: GateConfig) -> Tensor:
    return apply_gate(y, scores, gate)


def _device(config: TransformerConfig) -> Any:
    return torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()


def _head_parameter(config: TransformerConfig, size: int, initial: float) -> nn.Parameter:
    """Return a vector of this rank's heads, marked as cut over tensor-parallel ranks."""
    parameter = nn.Parameter(torch.full((size,), initial, dtype=config.params_dtype, device=_device(config)))
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter


def _replicated_linear(config: TransformerConfig) -> nn.Linear:
    """Return a linear map [..., H] -> [..., H] without bias that each tensor-parallel rank holds whole.

    Under sequence parallelism a rank applies it to its own tokens, so Megatron must sum its gradient; else every rank
    applies it to the same tokens, and it must not.
    """
    size = config.hidden_size
    linear = nn.Linear(size, size, bias=False, dtype=config.params_dtype, device=_device(config))
    if config.perform_initialization:
        config.init_method(linear.weight)
    linear.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return linear
