"""The torch backend's core attention against a softmax written out in float64, on one rank and under context parallel.

Shapes as in Megatron: query [s, b, h, d], key and value [t, b, g, d], result [s, b, h*d].
"""

import re

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagate.errors import UserError
from megagate.model.backends.attention import TorchCoreAttention, zigzag_to_sequence
from tests.distributed import run_distributed

HEADS, GROUPS, CHANNELS, SEQUENCE, BATCH = 4, 2, 8, 16, 2


def core_attention(layer_number: int = 1, mask: AttnMaskType = AttnMaskType.causal, **settings) -> TorchCoreAttention:
    settings = {"attention_dropout": 0.0} | settings
    arguments = {name: settings.pop(name) for name in ("softmax_scale", "pg_collection") if name in settings}
    if "pg_collection" not in arguments:
        from megatron.core.process_groups_config import ProcessGroupCollection

        arguments["pg_collection"] = ProcessGroupCollection(tp=None, cp=None)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=CHANNELS,
        **settings,
    )
    return TorchCoreAttention(config, layer_number, mask, "self", **arguments)


def random_heads(length: int = SEQUENCE, keys: int | None = None, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return query, key and value, which require gradients."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(length, BATCH, HEADS, CHANNELS), *[(keys or length, BATCH, GROUPS, CHANNELS)] * 2]
    drawn = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    return [(2 * tensor).to(dtype).requires_grad_() for tensor in drawn]


def naive(query: Tensor, key: Tensor, value: Tensor, forbidden: Tensor, scale: float = CHANNELS**-0.5) -> Tensor:
    """Attend head by head; `forbidden` is broadcastable to [b, s, t]."""
    forbidden = forbidden.expand(query.shape[1], query.shape[0], key.shape[0])
    outputs = []
    for head in range(query.shape[2]):
        group = head // (query.shape[2] // key.shape[2])
        logits = torch.einsum("ibd,jbd->bij", query[:, :, head], key[:, :, group]) * scale
        weights = logits.masked_fill(forbidden, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("bij,jbd->ibd", weights, value[:, :, group]))
    return torch.cat(outputs, dim=-1)


def causal(length: int, keys: int | None = None, window: int | None = None) -> Tensor:
    """Return [s, t], true where attention is forbidden; the queries are the last of `keys` positions."""
    keys = keys or length
    query, key = torch.arange(keys - length, keys)[:, None], torch.arange(keys)
    forbidden = key > query
    return forbidden if window is None else forbidden | (key < query - window)


def assert_matches(module: TorchCoreAttention, heads: list[Tensor], expected: Tensor, *arguments, **keywords) -> None:
    """The output and the gradients of all three inputs are those of `expected`, which was computed from them."""
    outgoing = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(4))
    wanted = torch.autograd.grad(expected, heads, outgoing)
    result = module(*heads, *arguments, **keywords)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    for actual, gradient in zip(torch.autograd.grad(result, heads, outgoing), wanted, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-12, atol=1e-12)


def test_causal() -> None:
    heads = random_heads()
    assert_matches(core_attention(), heads, naive(*heads, causal(SEQUENCE)))


def test_a_window_lets_each_query_see_so_many_keys_before_it() -> None:
    heads = random_heads()
    expected = naive(*heads, causal(SEQUENCE, window=3))
    assert_matches(core_attention(window_size=(3, 0)), heads, expected)
    assert_matches(core_attention(window_size=(-1, 0)), heads, naive(*heads, causal(SEQUENCE)))  # unlimited


def test_some_layers_have_no_window() -> None:
    heads = random_heads()
    for layer, window in ((1, 3), (2, None)):
        module = core_attention(layer, window_size=(3, 0), window_attn_skip_freq=2)
        assert_matches(module, heads, naive(*heads, causal(SEQUENCE, window=window)))


@pytest.mark.parametrize("window", [None, 3])
def test_queries_that_are_the_last_of_the_keys(window: int | None) -> None:
    heads = random_heads(length=5, keys=12)
    module = core_attention(window_size=(window, 0) if window else None)
    assert_matches(module, heads, naive(*heads, causal(5, 12, window)))
    heads = random_heads(length=1, keys=12)
    assert_matches(module, heads, naive(*heads, causal(1, 12, window)))


def documents() -> Tensor:
    """Return a mask [b, 1, s, s] that is causal within documents of different lengths."""
    ends = torch.tensor([[5, 11], [2, 9]])
    document = (torch.arange(SEQUENCE)[None, :, None] >= ends[:, None, :]).sum(-1)  # [b, s]
    return (causal(SEQUENCE) | (document[:, :, None] != document[:, None, :]))[:, None]


@pytest.mark.parametrize("window", [None, 3])
def test_an_explicit_mask_replaces_the_causal_one_but_not_the_window(window: int | None) -> None:
    heads, forbidden = random_heads(), documents()
    expected = naive(*heads, forbidden[:, 0] | causal(SEQUENCE, window=window))
    assert_matches(core_attention(window_size=(window, 0) if window else None), heads, expected, forbidden)


def test_no_mask() -> None:
    heads = random_heads()
    nothing = torch.zeros(SEQUENCE, SEQUENCE, dtype=torch.bool)
    assert_matches(core_attention(mask=AttnMaskType.no_mask), heads, naive(*heads, nothing))
    assert_matches(core_attention(), heads, naive(*heads, nothing), attn_mask_type=AttnMaskType.no_mask)


def test_scale() -> None:
    heads = random_heads()
    expected = naive(*heads, causal(SEQUENCE), scale=0.3)
    assert_matches(core_attention(softmax_scale=0.3), heads, expected)
    heads = random_heads()
    expected = naive(*heads, causal(SEQUENCE), scale=0.3)
    assert_matches(core_attention(2, softmax_scale=0.3, apply_query_key_layer_scaling=True), heads, expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_precision(dtype: torch.dtype, tolerance: float) -> None:
    heads = random_heads(dtype=dtype)
    result = core_attention()(*heads)
    assert result.dtype == dtype
    expected = naive(*(head.detach().double() for head in heads), causal(SEQUENCE))
    assert (result.double() - expected).abs().max() <= tolerance * expected.abs().max()


def test_what_is_not_computed_is_refused() -> None:
    refusals = {
        "--softmax-type learnable is not available in the torch backend": {"softmax_type": "learnable"},
        "--qk-clip is not available in the torch backend": {"qk_clip": True},
    }
    for sentence, settings in refusals.items():
        with pytest.raises(UserError, match=re.escape(sentence)):
            core_attention(**settings)
    for name in ("attention_bias", "packed_seq_params"):
        with pytest.raises(UserError, match=re.escape("no attention bias and no packed sequences (cu_seqlens)")):
            core_attention()(*random_heads(), **{name: torch.zeros(1)})


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_zigzag_to_sequence(size: int) -> None:
    sequence = torch.arange(4 * size)
    chunks = sequence.chunk(2 * size)
    gathered = torch.cat([torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(size)])
    assert torch.equal(zigzag_to_sequence(gathered, size), sequence)


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks


def groups(tensor_parallel: int = 1, context_parallel: int = 1):
    """Make the model-parallel groups of a rank and return its collection of them."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(tensor_parallel, context_parallel_size=context_parallel)
    return ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])


def attend_on_part(size: int, window: int | None, with_documents: bool) -> tuple[Tensor, ...]:
    """Return output and input gradients of this rank's zig-zag part of the sequence."""
    collection = groups(context_parallel=size)
    rank = torch.distributed.get_rank()

    def part(whole: Tensor, dim: int = 0) -> Tensor:
        chunks = whole.detach().chunk(2 * size, dim=dim)
        return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=dim)

    heads = [part(whole).requires_grad_() for whole in random_heads()]
    settings = {"context_parallel_size": size, "pg_collection": collection}
    module = core_attention(window_size=(window, 0) if window else None, **settings)
    mask = part(documents(), dim=2) if with_documents else None
    result = module(*heads, mask)
    outgoing = torch.randn(
        SEQUENCE, BATCH, HEADS * CHANNELS, dtype=result.dtype, generator=torch.Generator().manual_seed(4)
    )
    return result.detach(), *torch.autograd.grad(result, heads, part(outgoing))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("window", "with_documents"), [(None, False), (3, False), (None, True), (3, True)])
def test_context_parallel(size: int, window: int | None, with_documents: bool) -> None:
    heads = random_heads()
    forbidden = causal(SEQUENCE, window=window) | (documents()[:, 0] if with_documents else False)
    expected = naive(*heads, forbidden)
    outgoing = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(4))
    wanted = (expected.detach(), *torch.autograd.grad(expected, heads, outgoing))
    ranks = run_distributed(attend_on_part, size, size, window, with_documents, timeout=60)
    for index, whole in enumerate(wanted):
        chunks = whole.chunk(2 * size)
        for rank, results in enumerate(ranks):
            part = torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))
            torch.testing.assert_close(results[index], part, rtol=1e-12, atol=1e-12)


def drop_out(sequence_parallel: bool) -> list[Tensor]:
    """Return outputs on two tensor-parallel ranks: training, again from the same seed, again without, evaluation."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    collection = groups(tensor_parallel=2)
    settings = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel, "attention_dropout": 0.5}
    module = core_attention(pg_collection=collection, **settings)
    shape = (SEQUENCE, BATCH, HEADS, CHANNELS)
    heads = [torch.zeros(shape), torch.zeros(shape), torch.ones(shape)]  # equal on all heads and ranks

    def seeded() -> None:
        # As Megatron's initialize does: under sequence parallel its layers run in a stream that differs by rank.
        torch.manual_seed(5)
        model_parallel_cuda_manual_seed(5)

    outputs = []
    for reset in (True, True, False):
        if reset:
            seeded()
        outputs.append(module(*heads))
    return [*outputs, module.eval()(*heads)]


def test_dropout() -> None:
    ranks = run_distributed(drop_out, 2, sequence_parallel=False, timeout=60)
    for first, again, later, evaluated in ranks:
        assert torch.equal(first, again)
        assert not torch.equal(first, later)
        torch.testing.assert_close(evaluated, torch.ones_like(evaluated))
        assert first[0].unique().tolist() == [0, 2]  # the first query has one key: dropped, or scaled by 1 / (1 - 0.5)
        assert abs(first.mean() - 1) < 0.2
        heads = first.view(SEQUENCE, BATCH, HEADS, CHANNELS)
        assert not any(torch.equal(heads[:, :, 0], heads[:, :, head]) for head in range(1, HEADS))
    assert not torch.equal(ranks[0][0], ranks[1][0]), "tensor-parallel ranks have other heads, so other dropout"
