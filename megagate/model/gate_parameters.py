"""Which numbers of a model are the gate's, and with which values they start.

Most gates are rows of linear_qkv, so a parameter of Megatron's is the gate's only in part. Everything that treats gate
parameters on their own (initial values here, `megagate.pretrain.gate_optimizer`) asks this module for them.
"""

from collections.abc import Iterable, Iterator

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megagate.model.attention import GatedSelfAttention

GateElements = tuple[nn.Parameter, list[slice]]
"""A parameter, and the slices of it, seen as flat, that are the gate's."""


def gate_elements(chunks: Iterable[nn.Module]) -> Iterator[GateElements]:
    """Yield the gate's parameters on this rank; padding rows are not the gate's.

    Args:
        chunks: the model's chunks, wrapped or not.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, GatedSelfAttention):
                yield from _elements_of(module)


def _elements_of(attention: GatedSelfAttention) -> Iterator[GateElements]:
    if attention.layout.gate_rows:
        runs = list(_runs(attention.local_rows(attention.layout.gate_row_mask())))
        for parameter in attention.qkv_parameters():
            width = parameter[0].numel()
            yield parameter, [slice(first * width, last * width) for first, last in runs]
    for name, parameter in attention.named_parameters():
        if name in ("gate_constant", "linear_gate.weight"):
            yield parameter, [slice(0, parameter.numel())]


def _runs(mask: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of each run of true values of a bool vector."""
    padded = torch.nn.functional.pad(mask.int(), (1, 1))
    edges = padded.diff().nonzero().flatten().tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


@torch.no_grad()
def initialize_gates(model: list[MegatronModule], std: float | None, bias: float | None) -> list[MegatronModule]:
    """Give the gate initial values of its own; a hook for the model before any wrapping.

    Args:
        model: the chunks of this rank, with weights freshly drawn from N(0, init_method_std); scaling them keeps the
            draw, and with it the independence of the layout.
        std: of the gate's weights, in place of `init_method_std`; None leaves them.
        bias: what its biases, or the logits of the input-independent gate, start at; None leaves them at zero.

    Returns:
        `model`, changed in place.
    """
    for parameter, parts in gate_elements(model):
        for part in parts:
            values = parameter.view(-1)[part]
            if parameter.dim() == 1 and bias is not None:
                values.fill_(bias)
            if parameter.dim() > 1 and std is not None:
                values.mul_(std / model[0].config.init_method_std)
    return model
