"""The order of samples under `--dataloader-type cyclic`, the same on every layout.

Megatron's own depends on the micro-batch size and on the data-parallel size, starts anew with each epoch in the middle
of a step, knows no seed but the epoch's number, and holds a Python integer for every sample.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from megatron.training import get_args
from megatron.training.datasets import data_samplers


class CyclicSampler:
    """Micro batches of a data-parallel rank: all samples in a random order, then in another one, without end.

    Takes the constructor arguments of Megatron's `MegatronPretrainingRandomSampler`.
    """

    def __init__(
        self,
        dataset: Any,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_sharding: bool,
    ) -> None:
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.seed = get_args().seed

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        first = self.data_parallel_rank * self.micro_batch_size
        samples = self._samples()
        while True:
            turn = list(itertools.islice(samples, self.micro_batch_size * self.data_parallel_size))
            yield turn[first : first + self.micro_batch_size]

    def _samples(self) -> Iterator[int]:
        """Yield the samples of the run that have not been consumed, without end."""
        epoch, start = divmod(self.consumed_samples, self.total_samples)
        for number in itertools.count(epoch):
            order = np.random.default_rng([self.seed, number]).permutation(self.total_samples)
            yield from map(int, order[start:])
            start = 0


def apply() -> None:
    """Have Megatron's data loaders use it."""
    data_samplers.MegatronPretrainingRandomSampler = CyclicSampler
