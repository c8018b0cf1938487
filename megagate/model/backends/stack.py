"""Megatron's stack of layers with GPT's dropout, on which each backend's stack is built."""

import contextlib
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.tensor_parallel import get_cuda_rng_tracker


class Stack(HybridStack):
    """A hybrid stack in which tensor-parallel ranks with different tokens drop different channels."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers.

        Under sequence parallelism tensor-parallel ranks hold different tokens, so their dropout must differ. Megatron's
        GPT stack sees to that, its hybrid stack does not.
        """
        separate_stream = self.config.sequence_parallel and self.training
        with get_cuda_rng_tracker().fork() if separate_stream else contextlib.nullcontext():
            return super().forward(*args, **kwargs)
