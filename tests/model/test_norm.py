"""The torch backend's norms against their formulas in float64."""

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagate.model.backends.norm import LayerNorm, RMSNorm, build_norm

SIZE = 24


def config(**settings) -> TransformerConfig:
    settings = {"normalization": "RMSNorm", "use_cpu_initialization": True} | settings
    return TransformerConfig(num_layers=1, hidden_size=SIZE, num_attention_heads=2, **settings)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_formula_and_gradients(kind: str, zero_centered: bool, dtype: torch.dtype, tolerance: float) -> None:
    eps = 0.1  # large enough to matter
    norm = build_norm(
        config(normalization=kind, layernorm_zero_centered_gamma=zero_centered, params_dtype=dtype), SIZE, eps=eps
    )
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(3, 2, SIZE, dtype=dtype, requires_grad=True)
    outgoing = torch.randn(3, 2, SIZE, dtype=dtype)
    result = norm(hidden)
    assert result.dtype == dtype
    result.backward(outgoing)

    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, *norm.parameters())]
    x, weight, *bias = exact
    scale = weight + 1 if zero_centered else weight
    expected = rms_norm(x, scale, eps) if kind == "RMSNorm" else layer_norm(x, scale, *bias, eps)
    expected.backward(outgoing.double())
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance * 5)
    for actual, wanted in zip((hidden, *norm.parameters()), exact, strict=True):
        error = (actual.grad.double() - wanted.grad).abs().max() / wanted.grad.abs().max()
        assert error <= tolerance * 5


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_fresh_norm_has_scale_one(kind: str, zero_centered: bool) -> None:
    settings = {"normalization": kind, "layernorm_zero_centered_gamma": zero_centered, "params_dtype": torch.bfloat16}
    norm = build_norm(config(**settings), SIZE)
    assert isinstance(norm, RMSNorm if kind == "RMSNorm" else LayerNorm)
    assert torch.equal(norm.weight, torch.full((SIZE,), 0 if zero_centered else 1, dtype=torch.bfloat16))
    assert all(parameter.dtype == torch.bfloat16 for parameter in norm.parameters())
    assert norm.eps == 1e-5


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_say_whether_their_gradients_are_summed(kind: str, sequence_parallel: bool) -> None:
    """Megatron sums a gradient over tensor-parallel ranks only if its parameter is tagged."""
    settings = {"sequence_parallel": True, "tensor_model_parallel_size": 2} if sequence_parallel else {}
    parameters = list(build_norm(config(normalization=kind, **settings), SIZE).parameters())
    assert len(parameters) == {"RMSNorm": 1, "LayerNorm": 2}[kind]
    assert all(parameter.sequence_parallel is sequence_parallel for parameter in parameters)
