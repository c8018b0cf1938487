"""Functions that take the place of Megatron's give its results and gradients."""

from collections.abc import Callable

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.nn import functional

from megagate.model.backends import TorchBackend, functions
from tests.distributed import run_distributed

VOCABULARY = 24


def test_the_backend_puts_them_in_place() -> None:
    functions.restore()
    assert rope_utils._apply_rotary_pos_emb_bshd is functions.rotate_by_megatron
    TorchBackend()
    assert rope_utils._apply_rotary_pos_emb_bshd is functions.rotate
    assert tensor_parallel.vocab_parallel_cross_entropy is functions.cross_entropy
    assert token_dispatcher.sort_chunks_by_idxs is functions.sort_chunks


@pytest.mark.parametrize("rotary_channels", [8, 4], ids=["all channels", "half of them"])
@pytest.mark.parametrize("settings", [{}, {"mscale": 1.3}, {"rotary_interleaved": True}], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.bfloat16, 0.02)])
def test_rotary(dtype: torch.dtype, tolerance: float, settings: dict, rotary_channels: int) -> None:
    """Also of heads that are not contiguous, and where the halves turn by different angles."""
    heads = torch.randn(6, 2, 3, 10, dtype=torch.float64)[..., :8].to(dtype).requires_grad_()
    angles = torch.randn(6, 1, 1, rotary_channels, dtype=torch.float64)
    outgoing = torch.randn(heads.shape, dtype=torch.float64).to(dtype)
    ours = functions.rotate(heads, angles, **settings)
    megatrons = functions.rotate_by_megatron(heads, angles, **settings)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, megatrons, rtol=tolerance, atol=tolerance)
    gradient, expected = (torch.autograd.grad(result, heads, outgoing)[0] for result in (ours, megatrons))
    torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)


def losses(
    rank_logits: list[Tensor], target: Tensor, outgoing: Tensor, function: Callable[..., Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the losses [s, b] and the gradient of this rank's logits; by ours, or by a function of Megatron's."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size())
    group = parallel_state.get_tensor_model_parallel_group()
    logits = rank_logits[group.rank()].requires_grad_()
    loss = (function or functions.cross_entropy)(logits, target, tp_group=group)
    return loss.detach(), torch.autograd.grad(loss, logits, outgoing)[0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_cross_entropy(dtype: torch.dtype, tolerance: float, ranks: int) -> None:
    """With logits so large that the exponential of one would overflow."""
    generator = torch.Generator().manual_seed(1)
    logits = 60 * torch.randn(5, 3, VOCABULARY, generator=generator).to(dtype)
    target = torch.randint(VOCABULARY, (5, 3), generator=generator)
    outgoing = torch.randn(5, 3, generator=generator)
    parts = [part.contiguous() for part in logits.chunk(ranks, dim=-1)]
    results = run_distributed(losses, ranks, parts, target, outgoing, timeout=60)

    exact = logits.double().requires_grad_()
    expected = functional.cross_entropy(exact.flatten(0, 1), target.flatten(), reduction="none").view(5, 3)
    expected.backward(outgoing.double())
    for loss, _ in results:
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-4)
    gradient = torch.cat([part for _, part in results], dim=-1)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ranks", [1, 2])
def test_megatrons_fused_cross_entropy(ranks: int) -> None:
    """Which the recipes for GPUs ask for: for logits in bf16 it is its plain one bit for bit, in fp32 it is not."""
    logits, target, outgoing = 9 * torch.randn(5, 3, VOCABULARY), torch.randint(VOCABULARY, (5, 3)), torch.randn(5, 3)
    for dtype in (torch.bfloat16, torch.float32):
        parts = [part.contiguous() for part in logits.to(dtype).chunk(ranks, dim=-1)]
        fused, plain = (
            run_distributed(losses, ranks, parts, target, outgoing, function, timeout=60)
            for function in (fused_vocab_parallel_cross_entropy, functions.vocab_parallel_cross_entropy)
        )
        exact = logits.to(dtype).double().flatten(0, 1)
        expected = functional.cross_entropy(exact, target.flatten(), reduction="none").view(5, 3)
        for (loss, gradient), (plain_loss, plain_gradient) in zip(fused, plain, strict=True):
            assert torch.equal(loss, plain_loss)
            torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-5)
            assert gradient.dtype == dtype
            assert torch.equal(gradient, plain_gradient.bfloat16().to(dtype))
            assert torch.equal(gradient, plain_gradient) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 1, 3]], ids=str)
def test_sort_chunks(order: list[int]) -> None:
    rows, weights = torch.randn(10, 3), torch.randn(10)
    arguments = (rows, torch.tensor([2, 0, 5, 3]), torch.tensor(order))
    for probabilities in (weights, None):
        ours = functions.sort_chunks(*arguments, probs=probabilities)
        megatrons = functions.sort_chunks_by_idxs(*arguments, probs=probabilities)
        assert torch.equal(ours[0], megatrons[0])
        assert (ours[1] is None) if probabilities is None else torch.equal(ours[1], megatrons[1])
