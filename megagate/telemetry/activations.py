"""Massive activations (Sun et al. 2024; "M-Act" of arXiv 2505.06708, table 4) in the residual stream.

- activation/max/layer-NN: the largest absolute value in the output of a block, over all tokens and channels;
  activation/max: the mean over the blocks.
- activation/max-to-median/layer-NN: that over the median absolute value of the block's output, the latter over the rows
  of `megagate.telemetry.rows`; activation/max-to-median: the mean over the blocks. The median is read from a histogram
  with 16 bins to the factor 2, and so is right to 2.2 %.
"""

import contextlib
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_pg_rank
from torch import Tensor

from megagate.telemetry.observer import NOTHING, Findings, Layer, observing
from megagate.telemetry.rows import Sample
from megagate.telemetry.totals import Totals

BINS_PER_OCTAVE = 16
SMALLEST, LARGEST = -32, 32  # exponents of 2; what lies beyond counts in the first or last bin
BINS = (LARGEST - SMALLEST) * BINS_PER_OCTAVE


def median_bins(values: Tensor, weight: Tensor) -> Tensor:
    """Return the histogram of ln |values|: fp64 [BINS].

    Args:
        values: [n, ...].
        weight: [n], what each row counts.
    """
    place = (values.float().abs().log2() - SMALLEST) * BINS_PER_OCTAVE
    bins = place.nan_to_num(nan=BINS).clamp(0, BINS - 1).long()
    whole = weight.double().view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    return values.new_zeros(BINS, dtype=torch.float64).index_add_(0, bins.flatten(), whole.flatten())


def median_of(bins: Tensor) -> Tensor:
    """Return the median that a histogram [..., BINS] tells of; it is off by half a bin at most."""
    cumulative = bins.cumsum(dim=-1)
    middle = (cumulative < cumulative[..., -1:] / 2).sum(dim=-1)
    return torch.exp2((middle + 0.5) / BINS_PER_OCTAVE + SMALLEST)


class ActivationObserver:
    """Observes the output of every block.

    Args:
        sample: the rows that the median is taken over.
        totals: where the results go.
        replicated: whether all tensor-parallel ranks hold the same hidden states.
        tensor_parallel: their group.
    """

    def __init__(self, sample: Sample, totals: Totals, replicated: bool, tensor_parallel: Any) -> None:
        self.sample, self.totals = sample, totals
        self.counts = not replicated or get_pg_rank(tensor_parallel) == 0
        totals.declare_maximum("activation")
        totals.declare_sum("activation bins", BINS)

    def attach(self, layers: list[Layer], on_exit: contextlib.ExitStack) -> None:
        """Observe the last layer of each block."""
        for layer in layers:
            if layer.ends_block:
                handle = layer.module.register_forward_hook(partial(self._observe, layer.block))
                on_exit.callback(handle.remove)

    def _observe(self, block: int, _module: Any, _inputs: Any, output: Any) -> None:
        """Look at hidden states [s', b, H], which a layer returns alone or first of several."""
        with observing() as wanted:
            if not wanted:
                return
            hidden = output[0] if isinstance(output, tuple) else output
            self.totals.raise_to("activation", block, torch.stack(hidden.aminmax()).abs().amax())
            rows = self.sample.in_stream(len(hidden))
            if self.counts and len(rows.index):
                self.totals.add("activation bins", block, median_bins(hidden[rows.index], rows.weight))

    def findings(self, totals: dict[str, Tensor]) -> Findings:
        """Return the largest activations, alone and over the median."""
        found, largest = Findings(), totals["activation"]
        found.add_by_block("activation/max", largest)
        to_median = largest / median_of(totals["activation bins"])
        found.add_by_block("activation/max-to-median", torch.where(largest == NOTHING, NOTHING, to_median))
        return found
