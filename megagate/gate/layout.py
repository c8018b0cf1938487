"""Where queries, gate, keys and values lie among the rows of linear_qkv.

Megatron shards linear_qkv by whole KV groups, so everything that belongs to a group lies inside that group's block:

    block of one KV group = [ query: r*d | gate: gate_rows, zero padding | key: d | value: d ]

Rows appended after the last block instead would be mixed up, without an error, when a checkpoint is resharded to
another tensor-parallel size. For the gate sdpa-elementwise the block is exactly Megatron's own
``[q x r | gate x r | k | v]``. Headwise gates have few rows, so they are padded to a width that the config fixes;
elementwise gates are never padded. Under Switch-Head a group has one row for the score of each expert in place of the
gate's, and as many times d rows of values, or of keys and values, as there are experts, one expert after the other.

Letters in shapes: q query heads, g KV groups, r = q/g query heads per group, d = kv_channels, H hidden size,
t = d for elementwise gates, 1 for headwise ones and the number of experts under Switch-Head, e_k and e_v = projections
of each key and value head, 1 but under Switch-Head. Head index = group * r + position inside the group.
A tensor-parallel rank holds g' <= g groups; the functions here read g' from the tensor.
"""

import argparse
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megagate.errors import UserError
from megagate.gate.config import GateConfig, GateGranularity, gate_config_from_args


class QKVActivations(NamedTuple):
    """The parts of one linear_qkv output, heads separated, padding dropped."""

    query: Tensor  # [..., g', r, d]
    gate: Tensor | None  # [..., g', r, t] for sdpa and query gates, [..., g', t] for value and key gates
    key: Tensor  # [..., g', e_k*d]
    value: Tensor  # [..., g', e_v*d]


class QKVWeights(NamedTuple):
    """The parts of one linear_qkv weight (trailing dimension H) or bias (none), padding dropped."""

    query: Tensor  # [g'*r*d, H]
    gate: Tensor | None  # [g'*gate_rows, H]
    key: Tensor  # [g'*e_k*d, H]
    value: Tensor  # [g'*e_v*d, H]


@dataclass(frozen=True)
class QKVLayout:
    """The row layout of linear_qkv for one attention shape and gate.

    Raises:
        UserError: the head counts are not positive, or the query heads do not divide over the groups.
    """

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    gate: GateConfig = field(default_factory=GateConfig)

    def __post_init__(self) -> None:
        for name in ("num_attention_heads", "num_query_groups", "kv_channels"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be positive, not {getattr(self, name)}")
        if self.num_attention_heads % self.num_query_groups:
            raise UserError(
                f"{self.num_attention_heads} attention heads do not divide evenly over {self.num_query_groups} query "
                f"groups: make --num-attention-heads a multiple of --num-query-groups"
            )

    @property
    def heads_per_group(self) -> int:
        """r, the query heads that share one key and value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def gate_rows(self) -> int:
        """Gate rows in one group's block, padding not counted; 0 when the gate does not live in linear_qkv."""
        return self.gate.fused_rows_per_group(self.num_attention_heads, self.num_query_groups, self.kv_channels)

    @property
    def gate_channels(self) -> int:
        """t, the scores per head: d, 1, or the number of experts."""
        return self.kv_channels if self.gate.granularity == GateGranularity.ELEMENTWISE else self.gate.value_experts

    @property
    def gate_rows_padded(self) -> int:
        """Gate rows in one group's block with their padding."""
        if self.gate.granularity == GateGranularity.ELEMENTWISE:
            return self.gate_rows
        alignment = self.gate.row_alignment
        return (self.gate_rows + alignment - 1) // alignment * alignment

    @property
    def rows_per_group(self) -> int:
        """Rows of one group's block."""
        return sum(self.sections)

    @property
    def total_rows(self) -> int:
        """Rows of the whole linear_qkv, all groups."""
        return self.num_query_groups * self.rows_per_group

    @property
    def sections(self) -> list[int]:
        """Rows of a block's five parts: query, gate, padding, key, value."""
        padding, channels = self.gate_rows_padded - self.gate_rows, self.kv_channels
        key, value = self.gate.key_experts * channels, self.gate.value_experts * channels
        return [self.heads_per_group * channels, self.gate_rows, padding, key, value]

    def split(self, mixed: Tensor) -> QKVActivations:
        """Separate the output of linear_qkv into heads.

        Args:
            mixed: [..., g'*rows_per_group], any dtype; the blocks of whole groups, all of them or a rank's.

        Returns:
            Query [..., g', r, d], gate logits [..., heads, t] or None, key [..., g', e_k*d] and value [..., g', e_v*d],
            all of them views of `mixed`. The logits have the head dimensions of the tensor they gate, so they broadcast
            over it.

        Raises:
            ValueError: the last dimension is not a whole number of blocks.
        """
        blocks = self._blocks(mixed, -1)  # [..., g', rows_per_group]
        query, gate, _, key, value = torch.split(blocks, self.sections, dim=-1)
        query = query.unflatten(-1, (self.heads_per_group, self.kv_channels))
        if not self.gate_rows:
            return QKVActivations(query, None, key, value)
        if self.gate.is_on_query_heads:
            gate = gate.unflatten(-1, (-1, self.gate_channels))
        return QKVActivations(query, gate, key, value)

    def split_weight(self, weight: Tensor) -> QKVWeights:
        """Separate a linear_qkv weight [g'*rows_per_group, H], or bias [g'*rows_per_group], by rows.

        Rows of a part are ordered by group, then head, then channel. Parts are copies unless g' is 1. Padding rows are
        dropped. Raises ValueError when the rows are not a whole number of blocks.
        """
        blocks = self._blocks(weight, 0)  # [g', rows_per_group, ...]
        query, gate, _, key, value = (part.flatten(0, 1) for part in torch.split(blocks, self.sections, dim=1))
        return QKVWeights(query, gate if self.gate_rows else None, key, value)

    def merge_weight(self, query: Tensor, gate: Tensor | None, key: Tensor, value: Tensor) -> Tensor:
        """Build the linear_qkv weight [g'*rows_per_group, H] or bias from its parts; the inverse of split_weight.

        Shapes are those of :class:`QKVWeights`. Padding rows are zero. The result is a new tensor.
        Raises ValueError when a part is missing, superfluous, or has another number of rows than the layout says.
        """
        if (gate is None) != (self.gate_rows == 0):
            raise ValueError(f"this layout has {self.gate_rows} gate rows per group, but gate is {type(gate).__name__}")
        query_rows, gate_rows, padding_rows, key_rows, value_rows = self.sections
        groups = key.shape[0] // key_rows

        def block(name: str, part: Tensor, rows: int) -> Tensor:
            if part.shape[0] != groups * rows:
                raise ValueError(f"{name} has {part.shape[0]} rows, but {groups} groups of {rows} are {groups * rows}")
            return part.reshape(groups, rows, *part.shape[1:])

        blocks = [block("query", query, query_rows)]
        if gate is not None:
            blocks += [block("gate", gate, gate_rows), query.new_zeros(groups, padding_rows, *query.shape[1:])]
        blocks += [block("key", key, key_rows), block("value", value, value_rows)]
        return torch.cat(blocks, dim=1).flatten(0, 1)

    def gate_row_mask(self) -> Tensor:
        """Return a bool tensor [total_rows] on the CPU, true at gate rows (not at their padding)."""
        return self._row_mask(1)

    def padding_row_mask(self) -> Tensor:
        """Return a bool tensor [total_rows] on the CPU, true at padding rows, which initialisation must set to zero.

        They then stay zero: no output depends on them, so their gradient is zero.
        """
        return self._row_mask(2)

    def _row_mask(self, section: int) -> Tensor:
        parts = [torch.full((rows,), index == section) for index, rows in enumerate(self.sections)]
        return torch.cat(parts).repeat(self.num_query_groups)

    def _blocks(self, tensor: Tensor, dim: int) -> Tensor:
        """View dimension `dim` of `tensor` as [g', rows_per_group]."""
        rows = tensor.shape[dim]
        if rows == 0 or rows % self.rows_per_group:
            raise ValueError(f"{rows} rows are not a whole number of KV group blocks of {self.rows_per_group} rows")
        return tensor.unflatten(dim, (rows // self.rows_per_group, self.rows_per_group))


def query_groups(args: argparse.Namespace) -> int:
    """Return g of the model that Megatron's arguments describe."""
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def layout_from_args(args: argparse.Namespace) -> QKVLayout:
    """Return the layout of the model that Megatron's and the gate's arguments describe."""
    channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    return QKVLayout(args.num_attention_heads, query_groups(args), channels, gate_config_from_args(args))
