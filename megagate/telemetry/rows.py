"""Which rows of a sequence the observers look at, and how many rows each of them stands for.

Looking at every row of every tensor would cost as much as some layers do. The first rows, where attention has few keys
to choose from, are all looked at; the rest of the sequence is cut into equal parts, of each of which the middle row
stands for all. The choice depends on the length of the sequence alone, so that every layout looks at the same rows.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor

FIRST_ROWS = 16
"""So many rows at the beginning of a sequence are trivial: row i shares its attention among i + 1 keys only."""


def first_rows(length: int) -> int:
    """Return how many rows of a sequence count as trivial: `FIRST_ROWS`, or a 16th of a short sequence, but one."""
    return max(1, min(FIRST_ROWS, length // 16))


def row_weights(length: int, rows: int) -> Tensor:
    """Return how many rows each row of a sequence stands for: fp32 [length], zero for those that are not looked at.

    Args:
        length: of the whole sequence.
        rows: how many to look at after the first ones; each is looked at if there are no more.
    """
    first = first_rows(length)
    rest = length - first
    weights = torch.zeros(length)
    weights[:first] = 1
    parts = min(rows, rest)
    if parts:
        edges = torch.arange(parts + 1) * rest // parts
        middles = first + (edges[:-1] + edges[1:]) // 2
        weights[middles] = (edges[1:] - edges[:-1]).float()
    return weights


@dataclass(frozen=True)
class LocalRows:
    """The rows of a rank's tensors that are looked at; n may differ from rank to rank, and be zero."""

    index: Tensor
    """int64 [n], in this rank's tensors."""
    position: Tensor
    """int64 [n], in the sequence."""
    weight: Tensor
    """fp32 [n], the number of rows of the sequence that each stands for."""


def zigzag_positions(length: int, size: int, rank: int) -> Tensor:
    """Return the positions in the sequence of what a context-parallel rank holds: its chunks rank and 2*size-1-rank."""
    position = torch.arange(length)
    if size == 1:
        return position
    chunks = position.chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


class Sample:
    """The rows to look at on this rank.

    Args:
        rows: as for `row_weights`.
        groups: the context- and tensor-parallel groups.
        sequence_parallel: whether tensor-parallel ranks hold different rows of the residual stream.
        device: of the tensors that are looked at.
    """

    def __init__(
        self, rows: int, groups: ProcessGroupCollection, sequence_parallel: bool, device: torch.device
    ) -> None:
        self._rows, self._groups, self._device = rows, groups, device
        self._parts = get_pg_size(groups.tp) if sequence_parallel else 1
        self._part = get_pg_rank(groups.tp) if sequence_parallel else 0
        cache: Callable = functools.lru_cache(maxsize=16)
        self.in_attention = cache(self._in_attention)
        self.in_stream = cache(self._in_stream)

    def _in_attention(self, local_length: int) -> LocalRows:
        """Return the rows of queries, keys, values and attention outputs, of which a rank holds `local_length`."""
        return self._choose(local_length, parts=1, part=0)

    def _in_stream(self, local_length: int) -> LocalRows:
        """Return the rows of hidden states between layers."""
        return self._choose(local_length, self._parts, self._part)

    def _choose(self, local_length: int, parts: int, part: int) -> LocalRows:
        size = get_pg_size(self._groups.cp)
        length = local_length * parts * size
        held = zigzag_positions(length, size, get_pg_rank(self._groups.cp)).chunk(parts)[part]
        weights = row_weights(length, self._rows)[held]
        index = weights.nonzero().flatten()
        return LocalRows(*(tensor.to(self._device) for tensor in (index, held[index], weights[index])))
