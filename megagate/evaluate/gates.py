"""Gate scores of a model while it runs, observed from outside: the forward pass of the package is as it is.

The mean gate score of a layer is act(X W) averaged over tokens, heads and channels (one channel for headwise gates; the
one shared score for head-shared gates); the model's is the mean over its layers. Source: arXiv 2505.06708, table 4.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megagate.model.attention import GatedSelfAttention


@dataclass
class LayerScores:
    """Running sum of one attention layer's scores."""

    layer_number: int
    """1-based, as Megatron counts the layers of the hybrid pattern (attention and feed-forward ones)."""
    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        """The mean score; NaN before anything was observed."""
        return self.total / self.count if self.count else float("nan")


@contextlib.contextmanager
def observe_gate_scores(model: torch.nn.Module) -> Iterator[list[LayerScores]]:
    """Sum the gate scores of every forward pass inside the context.

    Args:
        model: on one process, so that its layers hold all heads.

    Returns:
        One entry per gated attention layer, in the model's order; empty for a model without gates.
    """
    layers = (module for module in model.modules() if isinstance(module, GatedSelfAttention))
    gated = [layer for layer in layers if layer.gate.has_gate]
    observed = [(attention, LayerScores(attention.layer_number)) for attention in gated]
    for attention, sums in observed:
        # An instance attribute hides the class's method until it is deleted.
        attention.gated = partial(_observe, attention, attention.gated, sums)  # type: ignore[method-assign]
    try:
        yield [sums for _, sums in observed]
    finally:
        for attention, _ in observed:
            del attention.gated


def _observe(
    attention: GatedSelfAttention,
    gated: Callable[[Tensor, Tensor], Tensor],
    sums: LayerScores,
    y: Tensor,
    logits: Tensor,
) -> Tensor:
    """Add up the scores of `logits`, and gate `y` as the layer does."""
    scores = attention.scores(logits)
    sums.total += scores.sum(dtype=torch.float64).item()
    sums.count += scores.numel()
    return gated(y, logits)
