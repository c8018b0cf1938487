"""Sums and maxima by block of the model, which ranks put together to the value of one process.

Each rank adds what it alone has seen: its tokens, its heads, its layers. A sum over all ranks is then the sum of the
whole model, whichever way the model is cut, and two reductions are enough for everything that is observed in a step.
"""

import math

import torch
import torch.distributed
from torch import Tensor


class Totals:
    """Named tensors [blocks, *shape]; those of all ranks have the same names and shapes, declared in the same order.

    Args:
        blocks: of the whole model.
        device: where they are kept until `reduce`, so that observing does not wait for the device.
    """

    def __init__(self, blocks: int, device: torch.device) -> None:
        self.blocks, self._device = blocks, device
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def declare_sum(self, name: str, *shape: int) -> None:
        """Make room for sums, which begin at zero."""
        self._sums[name] = torch.zeros(self.blocks, *shape, dtype=torch.float64, device=self._device)

    def declare_maximum(self, name: str) -> None:
        """Make room for one maximum a block, minus infinity at first."""
        self._maxima[name] = torch.full((self.blocks,), -math.inf, dtype=torch.float64, device=self._device)

    def add(self, name: str, block: int, value: Tensor | float) -> None:
        """Add to the sum of a block (from 1)."""
        self._sums[name][block - 1] += value

    def raise_to(self, name: str, block: int, value: Tensor) -> None:
        """Raise the maximum of a block (from 1) to `value`, if it is less; NaN stays."""
        self._maxima[name][block - 1] = torch.maximum(self._maxima[name][block - 1], value.double())

    def reset(self) -> None:
        """Begin anew."""
        for total in self._sums.values():
            total.zero_()
        for total in self._maxima.values():
            total.fill_(-math.inf)

    def reduce(self) -> dict[str, Tensor]:
        """Return the totals over all ranks, on the CPU, on every rank."""
        largest = torch.cat([*self._maxima.values()]) if self._maxima else torch.zeros(0, device=self._device)
        # The maximum over ranks of NaN and a number is either, so ranks with NaN are counted.
        broken = largest.isnan()
        summed = torch.cat([*(total.flatten() for total in self._sums.values()), broken.double()])
        largest = largest.masked_fill(broken, -math.inf)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(summed)
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        *sums, broken = summed.cpu().split([*(total.numel() for total in self._sums.values()), len(largest)])
        maxima = largest.cpu().masked_fill(broken > 0, math.nan).split([self.blocks] * len(self._maxima))
        totals = self._sums | self._maxima
        return {
            name: part.view(total.shape) for (name, total), part in zip(totals.items(), (*sums, *maxima), strict=True)
        }
