"""How attention is spread: the share of the first token, the entropy, and the largest logit.

For a query at position i, p(i, j) is its attention to the key at j <= i, softmax over j of scale * q_i . k_j. Flash
kernels return no probabilities, so those of some rows (`megagate.telemetry.rows`) are computed here from q and k, in
fp32 and exactly; each counts for the rows it stands for.

- attention/first-token-share ("F-Attn", arXiv 2505.06708, table 4): mean over heads and rows of p(i, 0), without the
  first rows, which have few keys to choose from (`first_rows`). The paper does not say whether it leaves them out.
- attention/first-token-share-all-rows: the same with them.
- attention/first-token-share-uniform: what attention that is spread evenly would give, the mean over the rows of the
  first of 1 / keys that the row sees, or of 0 where its window hides the first token.
- attention/entropy: mean over heads and the same rows of -sum_j p ln p, in nats.
- attention/max-logit: the largest scale * q_i . k_j over heads and rows.

Where documents are kept apart (--reset-attention-mask), the first token is that of the query's document, and so are the
first rows. With a sliding window a row that no longer sees the first token gives it nothing.
"""

import contextlib
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import get_pg_size
from torch import Tensor

from megagate.model.backends.attention import zigzag_to_sequence
from megagate.telemetry.observer import Findings, Layer, observing, ratio
from megagate.telemetry.rows import Sample, first_rows
from megagate.telemetry.totals import Totals

LARGEST_CHUNK = 2**25
"""Logits that are computed at a time."""

LOWEST = -1e30
"""The logit of a key that a query does not see: finite, so that 0 times it is 0."""


def forbidden_keys(position: Tensor, keys: int, mask: Tensor | None, window: int | None) -> Tensor:
    """Return where attention is forbidden: bool [b or 1, n, keys].

    Args:
        position: int64 [n] of the queries.
        keys: number of keys.
        mask: bool [b or 1, 1, n, keys], true where forbidden, in place of the causal mask.
        window: how many keys before its own a query sees, or None for all.
    """
    index = torch.arange(keys, device=position.device)
    forbidden = (index > position[:, None])[None] if mask is None else mask[:, 0]
    if window is not None:
        forbidden = forbidden | (index < position[:, None] - window)
    return forbidden


def first_keys(position: Tensor, mask: Tensor | None) -> Tensor:
    """Return the key that counts as the first token of each query: int64 [b or 1, n].

    Args:
        position: int64 [n] of the queries.
        mask: as for `forbidden_keys`; the first key that it lets a query see begins the query's document.
    """
    return torch.zeros_like(position)[None] if mask is None else (~mask[:, 0]).int().argmax(dim=-1)


def uniform_share(forbidden: Tensor, first: Tensor) -> Tensor:
    """Return what rows that spread their attention evenly would give to their first token: fp64 [b or 1, n].

    Args:
        forbidden: bool [b or 1, n, t].
        first: int64 [b or 1, n].
    """
    seen = ~forbidden
    return seen.gather(-1, first[..., None]).squeeze(-1).double() / seen.sum(dim=-1)


def window_of(attention: SelfAttention) -> int | None:
    """Return how many keys before its own a query of the layer sees; None for all."""
    config = attention.config
    windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, attention.layer_number)
    return config.window_size[0] if windowed and config.window_size[0] >= 0 else None


def row_statistics(query: Tensor, key: Tensor, forbidden: Tensor, first: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Return of each row and head: the share of its first token, the entropy in nats, and the largest logit.

    Args:
        query: [n, b, h, d].
        key: [t, b, g, d] with h a multiple of g.
        forbidden: bool [b or 1, n, t]; each row may attend to some key.
        first: int64 [b or 1, n], the key that counts as the first token.
        scale: of the logits.

    Returns:
        Three of fp32 [b, h, n].
    """
    rows, batch, heads, channels = query.shape
    groups = key.shape[2]
    per_group = heads // groups
    # [n, b, h, d] -> [b, g, r*n, d]
    query = (query.float() * scale).permute(1, 2, 0, 3).reshape(batch, groups, per_group * rows, channels)
    key = key.float().permute(1, 2, 3, 0)  # [b, g, d, t]
    logits = (query @ key).view(batch, heads, rows, -1)
    logits.masked_fill_(forbidden[:, None], LOWEST)
    largest = logits.amax(dim=-1)
    probability = logits.softmax(dim=-1)
    share = probability.gather(-1, first[:, None, :, None].expand(batch, heads, rows, 1)).squeeze(-1)
    # ln p = logit - ln z, in few passes over what is large: ln z follows from the largest logit and its probability.
    log_z = largest - probability.amax(dim=-1).log()
    entropy = log_z - torch.linalg.vecdot(probability, logits)
    return share, entropy, largest


class SinkObserver:
    """Observes the queries and keys that every softmax attention gets."""

    def __init__(self, sample: Sample, totals: Totals) -> None:
        self.sample, self.totals = sample, totals
        for name in ("share", "share of all", "uniform", "entropy", "rows", "all rows"):
            totals.declare_sum(f"attention {name}")
        totals.declare_maximum("attention logit")

    def attach(self, layers: list[Layer], on_exit: contextlib.ExitStack) -> None:
        """Observe what core attention is called with."""
        for layer in layers:
            attention = getattr(layer.module, "self_attention", None)
            if isinstance(attention, SelfAttention):
                handle = attention.core_attention.register_forward_pre_hook(
                    partial(self._observe, attention, layer.block)
                )
                on_exit.callback(handle.remove)

    def _observe(self, attention: SelfAttention, block: int, core: Any, inputs: tuple[Any, ...]) -> None:
        """Look at one call with query [s, b, h, d], key [t, b, g, d], value and attention mask."""
        with observing() as wanted:
            if wanted:
                query, key, _, mask = inputs[:4]
                self._add(attention, block, core, query, key, mask)

    def _add(
        self, attention: SelfAttention, block: int, core: Any, query: Tensor, key: Tensor, mask: Tensor | None
    ) -> None:
        size = get_pg_size(attention.pg_collection.cp)
        rows = self.sample.in_attention(len(query))
        if size > 1:
            gathered = gather_from_sequence_parallel_region(key, group=attention.pg_collection.cp)
            key = zigzag_to_sequence(gathered, size)
        if not len(rows.index):
            return
        key, window = key.float(), window_of(attention)
        step = max(1, LARGEST_CHUNK // (query.shape[1] * query.shape[2] * len(key)))
        for start in range(0, len(rows.index), step):
            index, position, weight = (
                tensor[start : start + step] for tensor in (rows.index, rows.position, rows.weight)
            )
            own_mask = None if mask is None else mask[:, :, index]
            forbidden = forbidden_keys(position, len(key), own_mask, window)
            first = first_keys(position, own_mask)
            statistics = row_statistics(query[index], key, forbidden, first, core.softmax_scale)
            trivial = position - first < first_rows(len(key))  # [b or 1, n]
            self._count(block, statistics, uniform_share(forbidden, first), weight, weight * ~trivial)

    def _count(
        self, block: int, statistics: tuple[Tensor, ...], uniform: Tensor, every: Tensor, weight: Tensor
    ) -> None:
        share, entropy, logit = (tensor.double() for tensor in statistics)  # [b, h, n]
        weight = weight[:, None].expand_as(share).double()
        every = every.expand_as(share).double()
        add = partial(self.totals.add, block=block)
        add("attention share", value=(weight * share).sum())
        add("attention share of all", value=(every * share).sum())
        add("attention uniform", value=(weight * uniform[:, None]).sum())
        add("attention entropy", value=(weight * entropy).sum())
        add("attention rows", value=weight.sum())
        add("attention all rows", value=every.sum())
        self.totals.raise_to("attention logit", block, logit.amax())

    def findings(self, totals: dict[str, Tensor]) -> Findings:
        """Return shares, entropies and logits."""
        found, rows = Findings(), totals["attention rows"]
        found.add_by_block("attention/first-token-share", ratio(totals["attention share"], rows))
        everything = ratio(totals["attention share of all"], totals["attention all rows"])
        found.add_by_block("attention/first-token-share-all-rows", everything)
        found.add_by_block("attention/first-token-share-uniform", ratio(totals["attention uniform"], rows))
        found.add_by_block("attention/entropy", ratio(totals["attention entropy"], rows))
        found.add_by_block("attention/max-logit", totals["attention logit"])
        if "attention/max-logit" in found.scalars:
            found.scalars["attention/max-logit"] = float(totals["attention logit"].max())
        return found
