"""What observers have in common: the layers they look at, what they may do there, and the form of their results.

An observer hangs itself on modules for one step and off them afterwards, so that a step without observers runs the
model as it is. It reads what the layers have computed, without a gradient and without a random number, and changes
nothing. Layers that are computed again in the backward pass are seen once.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from megagate.model.pattern import BOUNDARY, block_of_each_layer


@dataclass(frozen=True)
class Layer:
    """A layer of the model on this rank."""

    module: nn.Module
    block: int
    """Which transformer block it belongs to, from 1."""
    ends_block: bool


def layers_of(chunks: Iterable[nn.Module], pattern: str) -> list[Layer]:
    """Return this rank's layers, of all chunks.

    Args:
        chunks: of the model, wrapped or not.
        pattern: the hybrid layer pattern of the whole model.
    """
    blocks = block_of_each_layer(pattern.replace(BOUNDARY, ""))
    kinds = (HybridStack, TransformerBlock)
    stacks = [module for chunk in chunks for module in chunk.modules() if isinstance(module, kinds)]
    found = []
    for stack in stacks:
        for module in stack.layers:
            number = module.layer_number  # from 1
            if isinstance(stack, TransformerBlock):  # of a GPTModel, whose layers are blocks
                found.append(Layer(module, number, True))
                continue
            ends = number == len(blocks) or blocks[number] != blocks[number - 1]
            found.append(Layer(module, blocks[number - 1], ends))
    return found


@dataclass
class Histogram:
    """How often which values occur, in n bins."""

    lowest: float
    """Where the first bin begins."""
    limits: list[float]
    """Where each bin ends, ascending; the first and the last also hold what lies beyond."""
    counts: list[float]
    centers: list[float]
    """What a bin's values are taken for in sums."""

    @classmethod
    def of_bins(cls, low: float, high: float, counts: Tensor) -> "Histogram":
        """Return a histogram with bins of equal width from `low` to `high`."""
        edges = torch.linspace(low, high, len(counts) + 1, dtype=torch.float64)
        centers = (edges[:-1] + edges[1:]) / 2
        return cls(low, edges[1:].tolist(), counts.tolist(), centers.tolist())

    @classmethod
    def of_values(cls, values: Tensor) -> "Histogram":
        """Return a histogram in which every value that occurs is a bin of its own.

        Whoever draws it spreads a bin back to the limit before; an empty bin in between keeps it at its value.
        """
        distinct, counts = values.double().unique(return_counts=True)
        below = distinct.nextafter(torch.full_like(distinct, -math.inf))
        limits = torch.stack([below, distinct], dim=1).flatten()[1:].tolist()
        both = torch.stack([torch.zeros_like(counts), counts], dim=1).flatten()[1:].double().tolist()
        return cls(float(distinct[0]), limits, both, limits)


@dataclass
class Findings:
    """What was observed in a step, by TensorBoard tag."""

    scalars: dict[str, float] = field(default_factory=dict)
    by_block: dict[str, dict[int, float]] = field(default_factory=dict)
    """The scalars of blocks again: tag without the block -> block from 1 -> value."""
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def update(self, other: "Findings") -> None:
        """Take over what another has found."""
        self.scalars.update(other.scalars)
        self.by_block.update(other.by_block)
        self.histograms.update(other.histograms)

    def add_by_block(self, tag: str, values: Tensor) -> None:
        """Add a scalar for each block that has one, and under `tag` itself the mean over them.

        Args:
            tag: for example `gate/mean-score`.
            values: [blocks]; a block with nothing to observe (0 of 0, or no maximum) has none.
        """
        known = {block: value for block, value in enumerate(values.tolist(), 1) if seen(value)}
        if not known:
            return
        self.by_block[tag] = known
        self.scalars[tag] = sum(known.values()) / len(known)
        self.scalars |= {f"{tag}/{layer_name(block, len(values))}": value for block, value in known.items()}


NOTHING = -math.inf


def seen(value: float) -> bool:
    """Return whether something was observed; NaN is an observation too."""
    return value != NOTHING


def ratio(total: Tensor, count: Tensor) -> Tensor:
    """Return total / count, and `NOTHING` where nothing was counted."""
    return torch.where(count == 0, NOTHING, total / count)


def layer_name(block: int, blocks: int) -> str:
    """Return the last part of a block's tags, `layer-07`; all have the same length, so that they sort."""
    return f"layer-{block:0{max(2, len(str(blocks)))}d}"


class Observer(Protocol):
    """One kind of observation."""

    def attach(self, layers: list[Layer], on_exit: contextlib.ExitStack) -> None:
        """Begin to observe; `on_exit` ends it."""

    def findings(self, totals: dict[str, Tensor]) -> Findings:
        """Return the results from the totals of all ranks."""


def is_recomputing() -> bool:
    """Return whether a forward pass runs inside a backward pass, which has been observed before."""
    return torch._C._current_graph_task_id() != -1  # as torch's own checkpointing asks


@contextlib.contextmanager
def observing() -> Iterator[bool]:
    """A context for an observation, without gradients; its value says whether to observe at all."""
    with torch.no_grad():
        yield not is_recomputing()


def call_after(module: nn.Module, method: str, observe: Callable[..., None], on_exit: contextlib.ExitStack) -> None:
    """Call `observe(result, *args)` after each call of a module's method, until `on_exit`."""
    original = getattr(module, method)

    def observed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        with observing() as wanted:
            if wanted:
                observe(result, *args)
        return result

    # An instance attribute hides the class's method until it is deleted.
    setattr(module, method, observed)
    on_exit.callback(delattr, module, method)
