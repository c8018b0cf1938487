"""Rows of attention against probabilities written out in float64, with masks, windows and a sink made by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megagate.telemetry import sinks
from megagate.telemetry.rows import LocalRows, first_rows
from megagate.telemetry.sinks import SinkObserver, forbidden_keys, row_statistics
from megagate.telemetry.totals import Totals

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


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_documents_and_windows(documents: bool, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the observer adds up, a few rows at a time; a window can hide a document's first token."""
    torch.manual_seed(5)
    length, starts = 48, ((0, 20, 21), (0, 7, 40))  # 3 first rows; documents of two sequences
    monkeypatch.setattr(sinks, "LARGEST_CHUNK", 2 * HEADS * length * 7)
    query, key = torch.randn(length, 2, HEADS, CHANNELS), torch.randn(length, 2, GROUPS, CHANNELS)
    index = torch.arange(length)
    begin = torch.zeros(2, length, dtype=torch.int64)
    if documents:
        begin = torch.stack([torch.tensor([max(s for s in each if s <= i) for i in range(length)]) for each in starts])
    seen = (index <= index[:, None]) & (index >= begin[..., None])  # [b, s, t]
    mask = ~seen[:, None] if documents else None
    if window is not None:
        seen = seen & (index >= index[:, None] - window)
    weight = torch.rand(length) + 1

    totals = Totals(1, torch.device("cpu"))
    sample: Any = SimpleNamespace(in_attention=lambda rows: LocalRows(index, index, weight))
    config = SimpleNamespace(window_size=None if window is None else (window, 0), window_attn_skip_freq=None)
    attention: Any = SimpleNamespace(pg_collection=SimpleNamespace(cp=None), config=config, layer_number=1)
    observer = SinkObserver(sample, totals)
    observer._observe(attention, 1, SimpleNamespace(softmax_scale=SCALE), (query, key, None, mask))
    found = observer.findings(totals.reduce()).scalars

    logits = torch.einsum("sbhd,tbhd->bhst", query, key.repeat_interleave(HEADS // GROUPS, dim=2)).double() * SCALE
    probability = logits.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)
    share = probability.gather(-1, begin[:, None, :, None].expand(2, HEADS, length, 1)).squeeze(-1)
    sees_first = seen.gather(-1, begin[..., None]).squeeze(-1)
    uniform = (sees_first / seen.sum(dim=-1))[:, None].expand_as(share)
    kept = (weight * (index - begin >= first_rows(length)))[:, None].expand_as(share)
    for tag, values, weights in (
        ("first-token-share", share, kept),
        ("first-token-share-all-rows", share, weight.expand_as(share)),
        ("first-token-share-uniform", uniform, kept),
        ("entropy", torch.special.entr(probability).sum(dim=-1), kept),
    ):
        expected = float((values * weights).sum() / weights.sum())
        assert found[f"attention/{tag}"] == pytest.approx(expected, rel=1e-5), tag
