"""Switch-Head (arXiv 2312.07987) as a gate with several experts: its math against scalar loops, and its parameters."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from megagate.gate import PRESETS, SWITCH_HEAD_PRESETS, GateConfig, QKVLayout
from megagate.gate.functional import AttentionWeights, activate, apply_gate, reference_attention, rotary_tables

SEQUENCE, BATCH, HIDDEN, HEADS, GROUPS, CHANNELS = 5, 2, 6, 4, 2, 4


def random_tensor(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_weights(gate: GateConfig) -> AttentionWeights:
    layout = QKVLayout(HEADS, GROUPS, CHANNELS, gate)
    rows = layout.split_weight(random_tensor(layout.total_rows, HIDDEN, seed=1))
    return AttentionWeights(*rows, output=random_tensor(HIDDEN, HEADS * CHANNELS, seed=2))


def reference(hidden: Tensor, weights: AttentionWeights, gate: GateConfig) -> Tensor:
    rotary = rotary_tables(torch.arange(len(hidden), dtype=hidden.dtype), CHANNELS)
    return reference_attention(hidden, weights, gate, num_attention_heads=HEADS, num_query_groups=GROUPS, rotary=rotary)


def mixed_weight(x: list[float], experts: Tensor, router: Tensor, top_k: int) -> list[list[float]]:
    """Return W(x) x of each head, W(x) being the scored sum of the matrices of the chosen experts of that head.

    Args:
        x: one token, [H].
        experts: [g*e*d, H].
        router: [g*e, H].
        top_k: how many experts are chosen.
    """
    matrices = experts.view(GROUPS, -1, CHANNELS, HIDDEN).tolist()
    rows = router.view(GROUPS, -1, HIDDEN).tolist()
    heads = []
    for group in range(GROUPS):
        scores = [1 / (1 + math.exp(-sum(a * b for a, b in zip(row, x, strict=True)))) for row in rows[group]]
        chosen = sorted(range(len(scores)), key=lambda expert: -scores[expert])[:top_k]
        head = []
        for channel in range(CHANNELS):
            weights = [
                sum(scores[expert] * matrices[group][expert][channel][column] for expert in chosen)
                for column in range(HIDDEN)
            ]
            head.append(sum(a * b for a, b in zip(weights, x, strict=True)))
        heads.append(head)
    return heads


@pytest.mark.parametrize("name", SWITCH_HEAD_PRESETS)
def test_against_scalar_loops(name: str) -> None:
    """The block is that of an ungated model whose value, or key and value, matrices are mixed for each token."""
    gate, hidden = SWITCH_HEAD_PRESETS[name], random_tensor(SEQUENCE, BATCH, HIDDEN, seed=3)
    weights = random_weights(gate)

    def mixed(experts: Tensor) -> Tensor:  # [s, b, g, d]
        top_k = gate.switch_head_top_k
        heads = [[mixed_weight(x, experts, weights.gate, top_k) for x in row] for row in hidden.tolist()]
        return torch.tensor(heads, dtype=torch.float64)

    keys = mixed(weights.key) if "-kv-" in name else (hidden @ weights.key.T).unflatten(-1, (GROUPS, CHANNELS))
    actual = reference(hidden, weights, gate)

    # An ungated block in which a token's keys and values are given: as one-hot inputs of as many channels as tokens.
    given = torch.eye(SEQUENCE * BATCH, dtype=torch.float64).view(SEQUENCE, BATCH, -1)
    plain = AttentionWeights(
        query=(hidden @ weights.query.T).flatten(0, 1).T,
        gate=None,
        key=keys.flatten(0, 1).flatten(1).T,
        value=mixed(weights.value).flatten(0, 1).flatten(1).T,
        output=weights.output,
    )
    torch.testing.assert_close(actual, reference(given, plain, PRESETS["baseline"]), rtol=1e-10, atol=1e-12)


def test_one_expert_is_the_headwise_value_gate() -> None:
    gate = GateConfig(position="value", granularity="headwise", switch_head_experts=1, switch_head_top_k=1)
    assert gate == PRESETS["value-headwise"]
    hidden, weights = random_tensor(SEQUENCE, BATCH, HIDDEN, seed=3), random_weights(gate)
    for row, output in zip(hidden, (hidden @ weights.value.T).unflatten(-1, (GROUPS, CHANNELS)), strict=True):
        gated = apply_gate(output, activate(row @ weights.gate.T, gate)[..., None], gate)
        loops = [mixed_weight(x, weights.value, weights.gate, 1) for x in row.tolist()]
        torch.testing.assert_close(gated, torch.tensor(loops, dtype=torch.float64))


@pytest.mark.parametrize("name", SWITCH_HEAD_PRESETS)
def test_gradients_equal_finite_differences(name: str) -> None:
    gate = SWITCH_HEAD_PRESETS[name]
    weights, hidden = random_weights(gate), random_tensor(3, 1, HIDDEN, seed=4).requires_grad_()
    names = ("query", "gate", "key", "value", "output")
    tensors = [getattr(weights, field).clone().requires_grad_() for field in names]

    def block(hidden: Tensor, *tensors: Tensor) -> Tensor:
        return reference(hidden, dataclasses.replace(weights, **dict(zip(names, tensors, strict=True))), gate)

    assert torch.autograd.gradcheck(block, (hidden, *tensors), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_exactly_the_largest_scores_remain(dtype: torch.dtype) -> None:
    """Also where several are alike, as in bf16."""
    gate = SWITCH_HEAD_PRESETS["switch-head-v-8-top-2"]
    logits = random_tensor(50, GROUPS, 8, seed=5).to(dtype)
    logits[0] = 0
    scores = activate(logits, gate)
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert ((scores > 0).sum(dim=-1) == 2).all()
    every = activate(logits, dataclasses.replace(gate, switch_head_top_k=8))
    torch.testing.assert_close(scores.sort(dim=-1).values[..., -2:], every.sort(dim=-1).values[..., -2:])
    assert torch.equal(every, torch.sigmoid(logits.to(scores.dtype)))


def test_added_parameters() -> None:
    """On the paper's 15A2B: a projection [d, H] for each expert but one of each head, and a score of each expert."""
    projection, score = 24 * 4 * 128 * 2048, 24 * 4 * 2048
    added = {name: 24 * gate.added_parameters(2048, 32, 4, 128) for name, gate in SWITCH_HEAD_PRESETS.items()}
    assert added == {
        "switch-head-kv-8-top-8": 2 * 7 * projection + 8 * score,
        "switch-head-kv-4-top-4": 2 * 3 * projection + 4 * score,
        "switch-head-v-4-top-4": 3 * projection + 4 * score,
        "switch-head-v-8-top-2": 7 * projection + 8 * score,
    }
