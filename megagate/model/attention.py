"""Gated self-attention for Megatron: one class for every gate whose rows are fused into linear_qkv.

The gate's projection is a part of linear_qkv (see `megagate.gate.layout`), so it shares the GEMM, the all-gather and
the layer norm of queries, keys and values, and a checkpoint reshards to any tensor-parallel size. Megatron carries the
gate from `get_query_key_value_tensors` to `_apply_output_gate` when its own `attention_output_gate` is set; the two
methods below replace Megatron's, and nothing of its forward is copied.

Letters in shapes: s sequence, b batch, h local query heads, g local KV groups, r query heads per group, d channels per
head, t channels of a score (d elementwise, 1 headwise), H hidden size.
"""

import dataclasses
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank
from torch import Tensor

from megagate.errors import UserError
from megagate.gate.config import GateConfig, describe, preset_name
from megagate.gate.functional import apply_gate, gate_scores
from megagate.gate.layout import QKVLayout

TRAINABLE = ("baseline", "sdpa-elementwise", "sdpa-headwise")
"""The presets that have a Megatron attention; `baseline` is Megatron's own."""


def check_trainable(gate: GateConfig) -> None:
    """Raise UserError for a gate that is not one of `TRAINABLE`."""
    if preset_name(gate) not in TRAINABLE:
        raise UserError(
            f"the gate {describe(gate)} cannot be trained yet: use --gate-preset "
            f"{', '.join(TRAINABLE[:-1])} or {TRAINABLE[-1]}"
        )


class GatedSelfAttention(SelfAttention):
    """Megatron's self-attention with Y' = gate(Y, X W) on the attention output (arXiv 2505.06708, section 2.2).

    Args:
        config: Megatron's, with `attention_output_gate` set.
        submodules: as for Megatron's self-attention; `linear_qkv` is built with the rows of the layout.
        gate: which gate; see `check_trainable`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *args: Any,
        gate: GateConfig,
        **kwargs: Any,
    ) -> None:
        check_trainable(gate)
        layout = QKVLayout(config.num_attention_heads, config.num_query_groups, config.kv_channels, gate)

        def linear_qkv(input_size: int, output_size: int, **linear_arguments: Any) -> Any:
            return submodules.linear_qkv(input_size, layout.total_rows, **linear_arguments)

        super().__init__(config, dataclasses.replace(submodules, linear_qkv=linear_qkv), *args, **kwargs)
        self.gate = gate
        self.layout = layout
        self.reset_padding()

    @torch.no_grad()
    def reset_padding(self) -> None:
        """Set the padding rows of linear_qkv to zero; they then stay zero, since their gradient is zero."""
        rows = self.linear_qkv.weight.shape[0]
        start = get_pg_rank(self.pg_collection.tp) * rows
        padding = self.layout.padding_row_mask()[start : start + rows].to(self.linear_qkv.weight.device)
        for parameter in (self.linear_qkv.weight, self.linear_qkv.bias):
            if parameter is not None:
                parameter[padding] = 0

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project X and separate the heads.

        Args:
            hidden_states: [s', b, H], s' = s or a sequence-parallel shard of it.
            key_value_states: not used by self-attention.
            output_gate: always true here, since the config says so.
            split_qkv: always true here, since Megatron refuses its fused rotary embedding with a gate.

        Returns:
            query [s, b, h, d], key and value [s, b, g, d], gate logits [s, b, h, t].
        """
        mixed, _ = self.linear_qkv(hidden_states)
        groups, tensor_parallel_size = self.config.num_query_groups, self.world_size
        ranks_per_group = max(1, tensor_parallel_size // groups)
        if ranks_per_group > 1:
            # Several ranks share a group: gather all rows, keep the group's block, then this rank's heads of it.
            rank = get_pg_rank(self.pg_collection.tp)
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.pg_collection.tp)
            mixed = mixed.narrow(-1, rank // ranks_per_group * self.layout.rows_per_group, self.layout.rows_per_group)
        query, gate, key, value = self.layout.split(mixed)
        assert gate is not None  # check_trainable admits only gates with rows in linear_qkv
        if ranks_per_group > 1:
            heads = self.layout.heads_per_group // ranks_per_group
            first = rank % ranks_per_group * heads
            query, gate = query.narrow(2, first, heads), gate.narrow(2, first, heads)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value, gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Gate the attention output x [s, b, h*d] with the logits gate [s, b, h, t]; keeps the dtype of x."""
        heads = x.unflatten(-1, (gate.shape[2], -1))  # [s, b, h, d]
        return apply_gate(heads, gate_scores(gate, self.gate), self.gate).flatten(2)
