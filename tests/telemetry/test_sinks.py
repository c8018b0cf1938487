"""Rows of attention against probabilities written out in float64, with masks, windows and a sink made by hand."""

import pytest
import torch

from megagate.telemetry.sinks import forbidden_keys, row_statistics

LENGTH, BATCH, HEADS, GROUPS, CHANNELS = 24, 3, 6, 2, 8
SCALE = 0.3


def probabilities(query: torch.Tensor, key: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """Return float64 [b, h, s, t]."""
    key = key.double().repeat_interleave(HEADS // GROUPS, dim=2)
    logits = torch.einsum("sbhd,tbhd->bhst", query.double(), key) * SCALE
    return logits.masked_fill(forbidden[:, None], -torch.inf).softmax(dim=-1)


def draw() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(LENGTH, BATCH, HEADS, CHANNELS), torch.randn(LENGTH, BATCH, GROUPS, CHANNELS)


@pytest.mark.parametrize("kind", ["causal", "window", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    query, key = (tensor.to(dtype) for tensor in draw())
    position = torch.tensor([0, 5, 6, 23])
    index = torch.arange(LENGTH)
    future = index > index[:, None]
    mask = None
    first = torch.zeros(1, LENGTH, dtype=torch.int64)
    if kind == "documents":
        document = torch.stack([(index >= start).long() for start in (6, 9, 30)])
        mask = ((document[:, :, None] != document[:, None, :]) | future)[:, None]
        first = torch.stack([torch.where(index >= start, start, 0) for start in (6, 9, 30)])
    window = 4 if kind == "window" else None
    forbidden = forbidden_keys(position, LENGTH, None if mask is None else mask[:, :, position], window)
    expected_mask = future[None] if mask is None else mask[:, 0]
    if window:
        expected_mask = expected_mask | (index < index[:, None] - window)
    assert torch.equal(forbidden, expected_mask[:, position])
    expected = probabilities(query, key, expected_mask)[:, :, position]
    share, entropy, logit = row_statistics(query[position], key, forbidden, first[:, position], SCALE)
    at_first = first[:, None, position, None].expand(BATCH, HEADS, -1, 1)
    torch.testing.assert_close(share.double(), expected.gather(-1, at_first).squeeze(-1), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(entropy.double(), torch.special.entr(expected).sum(-1), rtol=1e-5, atol=1e-6)
    if kind == "window":
        assert (share[:, :, -1] == 0).all()
    repeated = key.double().repeat_interleave(HEADS // GROUPS, dim=2)
    logits = torch.einsum("sbhd,tbhd->bhst", query[position].double(), repeated) * SCALE
    largest = logits.masked_fill(forbidden[:, None], -torch.inf).amax(-1)
    torch.testing.assert_close(logit.double(), largest, rtol=1e-5, atol=1e-6)


def test_a_sink_made_by_hand() -> None:
    """Queries that all point along one direction, along which the first key lies far out, attend to it."""
    torch.manual_seed(4)
    query, key = draw()
    direction = torch.randn(CHANNELS)
    query = query * 0.1 + direction
    position = torch.arange(LENGTH)
    forbidden = forbidden_keys(position, LENGTH, None, None)
    first = torch.zeros(1, LENGTH, dtype=torch.int64)
    without, *_ = row_statistics(query, key, forbidden, first, SCALE)
    key[0] = 20 * direction / direction.norm()
    share, entropy, _ = row_statistics(query, key, forbidden, first, SCALE)
    assert without[:, :, 8:].mean() < 0.3
    assert share[:, :, 8:].mean() > 0.9
    assert entropy[:, :, 8:].mean() < 0.5
    torch.testing.assert_close(share[:, :, 0], torch.ones(BATCH, HEADS))
