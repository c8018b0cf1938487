"""Norms in plain torch that support sequence parallelism and zero-centred gamma."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megagate.gate.functional import at_least_fp32
from megagate.platform import apex


class RootMeanSquare(torch.autograd.Function):
    """RMSNorm in as few passes as eager operators allow.

    torch has a fused kernel for GPUs only; elsewhere its forward and backward are a dozen operators, each with a result
    of its own, and take twice as long.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return hidden [..., n] over its root mean square, times weight [n], in the dtype of `hidden`."""
        wide = at_least_fp32(hidden)
        scale = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        return (wide * scale).mul_(weight).to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return s * (g*w - x*s * mean(g*w*x*s)) with s = 1/rms(x), the sum of g*x*s over tokens, and None."""
        hidden, weight, scale = ctx.saved_tensors
        normed = hidden * scale
        product = (grad * normed).flatten(0, -2)  # [tokens, n]
        wide_weight = weight.to(product.dtype)
        mean = (product @ wide_weight).div_(hidden.shape[-1]).view_as(scale)
        grad_hidden = (grad * wide_weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_hidden.to(hidden.dtype), product.sum(dim=0).to(weight.dtype), None


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467).

    With `zero_centered_gamma` the stored weight is w - 1, as Transformer Engine and Qwen3-Next keep it.

    Args:
        config: gives `sequence_parallel`, `layernorm_zero_centered_gamma` and `params_dtype`.
        hidden_size: size of the last dimension.
        eps: added to the mean of squares.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        initial = torch.zeros if self.zero_centered_gamma else torch.ones
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(initial(hidden_size, dtype=config.params_dtype, device=device))
        _tag_sequence_parallel(self, config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [..., hidden_size]; statistics in fp32 or better, result in the input's dtype."""
        if not hidden.is_cuda:
            return RootMeanSquare.apply(hidden, _gamma(self), self.eps)
        fused = apex.fused_rms_norm()
        if fused and hidden.dtype == self.weight.dtype and not self.zero_centered_gamma:
            return fused(hidden, self.weight, self.weight.shape, self.eps)
        if self.zero_centered_gamma:
            wide = at_least_fp32(hidden)
            return functional.rms_norm(wide, self.weight.shape, _gamma(self), self.eps).to(hidden.dtype)
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm with Megatron's constructor and zero-centred gamma (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        if self.zero_centered_gamma:
            nn.init.zeros_(self.weight)
        _tag_sequence_parallel(self, config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [..., hidden_size]; result in the input's dtype."""
        if not self.zero_centered_gamma:
            return super().forward(hidden)
        weight = _gamma(self)
        wide, bias = hidden.to(weight.dtype), self.bias.to(weight.dtype)
        return functional.layer_norm(wide, self.normalized_shape, weight, bias, self.eps).to(hidden.dtype)


def _gamma(norm: "RMSNorm | LayerNorm") -> Tensor:
    """Return the factor of each channel; 1 is added in fp32, since bf16 would lose the digits of a small weight."""
    if not norm.zero_centered_gamma:
        return norm.weight
    return at_least_fp32(norm.weight) + 1


def _tag_sequence_parallel(module: nn.Module, config: TransformerConfig) -> None:
    """Mark parameters whose gradients Megatron sums over tensor-parallel ranks under sequence parallelism."""
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def norm_class(config: TransformerConfig) -> type[RMSNorm | LayerNorm]:
    """Return the norm that `config.normalization` names ("RMSNorm" or "LayerNorm")."""
    return RMSNorm if config.normalization == "RMSNorm" else LayerNorm


def build_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> RMSNorm | LayerNorm:
    """Build the norm that `config.normalization` names."""
    return norm_class(config)(config, hidden_size, eps)
