"""The torch backend's experts against Megatron's, whose module and parameters they share."""

from functools import partial

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from megagate.model.backends import TorchBackend
from megagate.model.backends.experts import TorchExperts
from tests.distributed import run_distributed

HIDDEN, WIDTH = 12, 20


def experts(number: int, dtype: torch.dtype, **settings) -> TorchExperts:
    settings = {"gated_linear_unit": True, "activation_func": functional.silu, "add_bias_linear": False} | settings
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=number,
        moe_ffn_hidden_size=WIDTH,
        params_dtype=dtype,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        **settings,
    )
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return TorchBackend().grouped_mlp_modules(False)(number, config, pg_collection=groups)


def results(module: TorchExperts, forward, counts: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Return the output and the gradients of the tokens, of their probabilities and of every parameter."""
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randn, generator=generator)
    hidden = draw(sum(counts), HIDDEN).to(dtype).requires_grad_()
    probabilities = draw(sum(counts)).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    output, bias = forward(hidden, torch.tensor(counts), probabilities)
    assert bias is None
    assert output.dtype == dtype
    inputs = [hidden, probabilities, *module.parameters()]
    gradients = torch.autograd.grad(output, inputs, draw(output.shape).to(dtype), allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]
    return [output.detach(), *zeros]


def differences(dtype: torch.dtype, counts: list[int]) -> list[float]:
    """Return the largest difference of each result of ours to Megatron's, relative to the largest value."""
    module = experts(len(counts), dtype)
    assert module.is_plain
    ours = results(module, module, counts, dtype)
    megatrons = results(module, partial(SequentialMLP.forward, module), counts, dtype)
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in zip(ours, megatrons, strict=True)]


@pytest.mark.parametrize("counts", [[3, 7, 1, 5], [0, 4, 0, 9], [6]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_same_as_megatrons(dtype: torch.dtype, tolerance: float, counts: list[int]) -> None:
    """Also where an expert has no token."""
    compared = run_distributed(differences, 1, dtype, counts, timeout=60)[0]
    assert len(compared) == 3 + 2 * len(counts)
    assert max(compared) <= tolerance


def plain() -> list[bool]:
    variants = [
        {},
        {"activation_func": functional.gelu},
        {"gated_linear_unit": False},
        {"activation_func_clamp_value": 1.0},
        {"glu_linear_offset": 1.0},
        {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    ]
    return [experts(2, torch.float32, **settings).is_plain for settings in variants]


def test_others_are_left_to_megatron() -> None:
    assert run_distributed(plain, 1, timeout=60)[0] == [True, False, False, False, False, False]
