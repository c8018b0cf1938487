"""The logits of a vocabulary that is divided over tensor-parallel ranks and padded (--make-vocab-size-divisible-by)."""

import argparse
from typing import Any

import torch
from torch import Tensor, nn


def leave_out_padding(model: nn.Module, args: argparse.Namespace) -> None:
    """Have a model give no probability to the rows that pad its vocabulary, as its export, which lacks them.

    Their logits become the least finite number on the rank that holds them, of which the softmax is exactly 0; -inf
    would be NaN in the part of the softmax that a rank with nothing but such rows computes.

    Args:
        model: Megatron's; a pipeline stage without an output layer is left as it is.
        args: of the run on this layout.
    """
    from megatron.core import mpu
    from megatron.core.utils import unwrap_model

    head: nn.Module | None = getattr(unwrap_model(model), "output_layer", None)
    rows = args.padded_vocab_size // mpu.get_tensor_model_parallel_world_size()
    kept = max(0, args.tokenizer_vocab_size - mpu.get_tensor_model_parallel_rank() * rows)
    if head is None or kept >= rows:
        return

    def mask(_: nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> None:
        logits = output[0]  # [s, b, rows of this rank]
        logits[..., kept:] = torch.finfo(logits.dtype).min

    head.register_forward_hook(mask)


def whole_vocabulary(logits: Tensor) -> Tensor:
    """Return logits [..., v] of all rows, the same on all tensor-parallel ranks, of each rank's part of them."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    whole: Tensor = gather_from_tensor_model_parallel_region(logits)
    return whole
