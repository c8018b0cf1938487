"""Gate scores and what they do to the tensor they gate (arXiv 2505.06708, section 4 and table 4).

- gate/mean-score: act(X W), for head-shared gates after their mean over heads, averaged over tokens, heads and channels
  of a block (`/layer-NN`), and over blocks.
- gate/share-below-0.1 and gate/share-below-0.01: the share of scores with an absolute value below that.
- gate/head-mean/layer-NN/head-MM: the mean of each query or KV head, whichever the gate is on, from 0.
- gate/magnitude-before and gate/magnitude-after: root mean square of the gated tensor, before and after.
- gate/scores/layer-NN: a histogram.

Under Switch-Head (--switch-head-experts) a KV head's scores are those of its experts, zero for those not among the top
k, and what is gated is the output of all experts; keys and values both count.

Tokens are the rows of `megagate.telemetry.rows`, each counted for the rows it stands for.
"""

import contextlib
from functools import partial

import torch
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor

from megagate.gate.config import GateActivation, GateConfig, GateInput, GatePosition, GateSharing
from megagate.model.attention import GatedSelfAttention
from megagate.telemetry.observer import Findings, Histogram, Layer, call_after, layer_name, ratio
from megagate.telemetry.rows import Sample
from megagate.telemetry.totals import Totals

THRESHOLDS = (0.1, 0.01)
BINS = 40


def score_range(gate: GateConfig) -> tuple[float, float]:
    """Return the range of the histogram; scores outside it count in its first or last bin."""
    bounded = gate.activation in (GateActivation.SIGMOID, GateActivation.NS_SIGMOID)
    return (0.0, 1.0) if bounded else (-4.0, 4.0)


class GateObserver:
    """Observes the gate of every attention layer.

    Args:
        gate: that the model has; with one that has no scores there is nothing to observe.
        heads: of the whole layer that have a score of their own, or 0 for gates without heads or shared by them.
        sample: the rows to look at.
        totals: where the sums go.
    """

    def __init__(self, gate: GateConfig, heads: int, sample: Sample, totals: Totals) -> None:
        self.gate, self.heads, self.sample, self.totals = gate, heads, sample, totals
        self.low, self.high = score_range(gate)
        for name in ("total", "count", *(f"below {threshold}" for threshold in THRESHOLDS)):
            totals.declare_sum(f"gate {name}")
        totals.declare_sum("gate bins", BINS)
        totals.declare_sum("gate heads", max(1, heads))
        totals.declare_sum("gate head count", max(1, heads))
        for name in ("before", "after", "gated"):
            totals.declare_sum(f"gate {name}")

    def attach(self, layers: list[Layer], on_exit: contextlib.ExitStack) -> None:
        """Observe what each attention layer gates."""
        for layer in layers:
            attention = getattr(layer.module, "self_attention", None)
            if isinstance(attention, GatedSelfAttention) and attention.gate.has_gate:
                call_after(attention, "gated", partial(self._observe, attention, layer.block), on_exit)

    def _observe(self, attention: GatedSelfAttention, block: int, gated: Tensor, y: Tensor, logits: Tensor) -> None:
        """Look at one call: `y` and `gated` [s, b, *heads, d], `logits` [s, b, *heads, t] or [1, 1, h, t]."""
        has_heads = self.gate.position != GatePosition.OUTPUT
        rows = self.sample.in_attention(len(y)) if has_heads else self.sample.in_stream(len(y))
        constant = self.gate.input == GateInput.CONSTANT
        scores = attention.scores(logits if constant else logits[rows.index])
        rank, size = get_pg_rank(attention.pg_collection.tp), get_pg_size(attention.pg_collection.tp)
        # Where several ranks hold the same tensor, the first of them speaks for it.
        copies = 1
        if not has_heads:
            copies = 1 if attention.config.sequence_parallel else size
        elif not self.gate.is_on_query_heads:
            copies = max(1, size // attention.config.num_query_groups)
        add = partial(self.totals.add, block=block)
        weight = rows.weight.double()
        if rank % copies == 0:
            for name, tensor in (("gate before", y), ("gate after", gated)):
                add(name, value=weight @ sum_of_rows(tensor[rows.index].float().square()) / tensor[0].numel())
            add("gate gated", value=weight.sum())
        shared = self.gate.sharing == GateSharing.HEAD_SHARED
        if rank % (size if shared else copies):
            return
        # [n, b, heads, t], with one entry in place of heads that share a score or are none
        scores = scores.float().reshape(*scores.shape[:2], -1, scores.shape[-1])
        if constant:  # stands for all tokens that it gates
            weight = weight.sum()[None] * y.shape[1]
        of_heads = weight @ scores.sum(dim=(1, 3), dtype=torch.float64)
        add("gate total", value=of_heads.sum())
        add("gate count", value=weight.sum() * scores[0].numel())
        for threshold in THRESHOLDS:
            add(f"gate below {threshold}", value=weight @ sum_of_rows(scores.abs() < threshold))
        bins = ((scores - self.low) / (self.high - self.low) * BINS).clamp(0, BINS - 1).nan_to_num().long()
        whole = weight.view(-1, 1, 1, 1).expand_as(bins)
        add("gate bins", value=weight.new_zeros(BINS).index_add_(0, bins.flatten(), whole.flatten()))
        if self.heads:
            local = scores.shape[2]
            first = rank // copies * local
            for name, values in (
                ("gate heads", of_heads),
                ("gate head count", weight.sum() * scores[0, :, 0].numel()),
            ):
                span = weight.new_zeros(self.heads)
                span[first : first + local] = values
                add(name, value=span)

    def findings(self, totals: dict[str, Tensor]) -> Findings:
        """Return means, shares, magnitudes and histograms."""
        found, count = Findings(), totals["gate count"]
        found.add_by_block("gate/mean-score", ratio(totals["gate total"], count))
        for threshold in THRESHOLDS:
            found.add_by_block(f"gate/share-below-{threshold}", ratio(totals[f"gate below {threshold}"], count))
        for when in ("before", "after"):
            mean_square = ratio(totals[f"gate {when}"], totals["gate gated"])
            found.add_by_block(f"gate/magnitude-{when}", torch.where(mean_square < 0, mean_square, mean_square.sqrt()))
        blocks = len(count)
        for block in count.nonzero().flatten().tolist():
            name = layer_name(block + 1, blocks)
            found.histograms[f"gate/scores/{name}"] = Histogram.of_bins(self.low, self.high, totals["gate bins"][block])
            if self.heads:
                means = totals["gate heads"][block] / totals["gate head count"][block]
                for head, mean in enumerate(means.tolist()):
                    found.scalars[f"gate/head-mean/{name}/head-{head:02d}"] = mean
        return found


def sum_of_rows(values: Tensor) -> Tensor:
    """Return the sum of each row of [n, ...]: fp64 [n]."""
    return values.flatten(1).sum(dim=1, dtype=torch.float64)


def heads_with_scores(gate: GateConfig, attention_heads: int, query_groups: int) -> int:
    """Return how many heads of a layer have a score of their own; 0 for the output gate and for shared scores."""
    if not gate.has_gate or gate.position == GatePosition.OUTPUT or gate.sharing == GateSharing.HEAD_SHARED:
        return 0
    return attention_heads if gate.is_on_query_heads else query_groups
