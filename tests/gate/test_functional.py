"""The reference math, against scalar loops written from the paper, finite differences, and torch's own kernels."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from megagate.gate import PRESETS, GateConfig, QKVLayout
from megagate.gate.functional import (
    AttentionWeights,
    activate,
    apply_gate,
    apply_rotary,
    causal_attention,
    gate_scores,
    per_head_rms_norm,
    reference_attention,
    rotary_tables,
)

SEQUENCE, BATCH, HIDDEN, HEADS, GROUPS, CHANNELS, ROTARY = 4, 2, 6, 4, 2, 4, 2
EPSILON = 1e-3  # large, so that a misplaced epsilon shows


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_weights(config: GateConfig) -> AttentionWeights:
    layout = QKVLayout(HEADS, GROUPS, CHANNELS, config)
    return AttentionWeights(
        *layout.split_weight(random_tensor(layout.total_rows, HIDDEN, seed=1)),
        output=random_tensor(HIDDEN, HEADS * CHANNELS, seed=2),
        query_norm=random_tensor(CHANNELS, seed=3),
        key_norm=random_tensor(CHANNELS, seed=4),
        gate_constant=random_tensor(HEADS, layout.gate_channels, seed=5) if config.input == "constant" else None,
        gate_output=random_tensor(HIDDEN, HIDDEN, seed=6) if config.position == "output" else None,
        sdpa_norm=random_tensor(HEADS, CHANNELS, seed=7) if config.sdpa_output_norm else None,
    )


def run_reference(hidden: Tensor, weights: AttentionWeights, config: GateConfig, **options) -> Tensor:
    sizes = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "norm_epsilon": EPSILON}
    return reference_attention(hidden, weights, config, **sizes | options)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def silu(x: float) -> float:
    return x * sigmoid(x)


def project(x: list[float], weight: Tensor) -> list[float]:
    return [sum(a * b for a, b in zip(row, x, strict=True)) for row in weight.tolist()]


def heads_of(row: list[float], count: int) -> list[list[float]]:
    width = len(row) // count
    return [row[head * width : (head + 1) * width] for head in range(count)]


def normed(x: list[float], weight: list[float]) -> list[float]:
    root = math.sqrt(sum(a * a for a in x) / len(x) + EPSILON)
    return [a / root * w for a, w in zip(x, weight, strict=True)]


def rotated(x: list[float], position: int, base: float) -> list[float]:
    half, out = ROTARY // 2, list(x)
    for i in range(half):
        angle = position * base ** (-2 * i / ROTARY)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def gated(name: str, y: list[list[float]], logits: list[list[float]]) -> list[list[float]]:
    """Gate the heads `y` of one token by the `logits` of its heads, as the preset called `name` says."""
    function = sigmoid
    if name.endswith("silu"):
        function = silu
    if name.endswith("ns-sigmoid"):
        function = lambda x: 0.5 + 0.5 * sigmoid(x)  # noqa: E731
    if name.endswith("identity"):
        function = lambda x: x  # noqa: E731
    scores = [[function(x) for x in head] for head in logits]
    if name.endswith("shared"):
        mean = [sum(column) / len(scores) for column in zip(*scores, strict=True)]
        scores = [mean for _ in scores]
    if name.endswith("headwise"):
        scores = [head * CHANNELS for head in scores]  # one score, repeated for every channel
    if "additive" in name:
        return [[a + s for a, s in zip(*pair, strict=True)] for pair in zip(y, scores, strict=True)]
    return [[a * s for a, s in zip(*pair, strict=True)] for pair in zip(y, scores, strict=True)]


def naive_block(name: str, tokens: list[list[float]], weights: AttentionWeights, base: float) -> list[list[float]]:
    """One sequence, token by token and head by head, from the preset's name alone."""
    query_norm, key_norm = weights.query_norm.tolist(), weights.key_norm.tolist()
    queries, keys, values, outputs = [], [], [], []
    for position, x in enumerate(tokens):
        query = heads_of(project(x, weights.query), HEADS)
        key = heads_of(project(x, weights.key), GROUPS)
        value = heads_of(project(x, weights.value), GROUPS)
        if name.startswith("query"):
            query = gated(name, query, heads_of(project(x, weights.gate), HEADS))
        if name.startswith("key"):
            key = gated(name, key, heads_of(project(x, weights.gate), GROUPS))
        if name.startswith("value"):
            value = gated(name, value, heads_of(project(x, weights.gate), GROUPS))
        queries.append([rotated(normed(head, query_norm), position, base) for head in query])
        keys.append([rotated(normed(head, key_norm), position, base) for head in key])
        values.append(value)

        y = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            dots = [
                sum(a * b for a, b in zip(queries[position][head], keys[other][group], strict=True))
                for other in range(position + 1)
            ]
            powers = [math.exp(dot / math.sqrt(CHANNELS)) for dot in dots]
            y.append(
                [
                    sum(powers[other] * values[other][group][channel] for other in range(position + 1)) / sum(powers)
                    for channel in range(CHANNELS)
                ]
            )
        if name == "sdpa-constant":
            y = gated(name, y, weights.gate_constant.tolist())
        elif name == "sdpa-rmsnorm":
            y = [normed(head, weight) for head, weight in zip(y, weights.sdpa_norm.tolist(), strict=True)]
        elif name == "sdpa-silu":
            y = [[silu(a) for a in head] for head in y]
        elif name.startswith("sdpa"):
            y = gated(name, y, heads_of(project(x, weights.gate), HEADS))
        output = project([a for head in y for a in head], weights.output)
        if name.startswith("output"):
            output = [a * sigmoid(s) for a, s in zip(output, project(x, weights.gate_output), strict=True)]
        outputs.append(output)
    return outputs


@pytest.mark.parametrize("name", PRESETS)
def test_the_reference_equals_scalar_loops(name: str) -> None:
    weights = random_weights(PRESETS[name])
    hidden = random_tensor(SEQUENCE, BATCH, HIDDEN, seed=8)
    rotary = rotary_tables(torch.arange(SEQUENCE, dtype=torch.float64), ROTARY, base=100.0)
    output = run_reference(hidden, weights, PRESETS[name], rotary=rotary)
    expected = [naive_block(name, hidden[:, b].tolist(), weights, base=100.0) for b in range(BATCH)]
    torch.testing.assert_close(output, torch.tensor(expected, dtype=torch.float64).transpose(0, 1), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", PRESETS)
def test_gradients_equal_finite_differences(name: str) -> None:
    """Of the input and of every weight; a weight that the preset needs also gets a gradient."""
    weights = random_weights(PRESETS[name])
    present = [field.name for field in dataclasses.fields(weights) if getattr(weights, field.name) is not None]
    tensors = [getattr(weights, field).clone().requires_grad_() for field in present]
    hidden = random_tensor(3, 1, HIDDEN, seed=9).requires_grad_()
    rotary = rotary_tables(torch.arange(3, dtype=torch.float64), ROTARY)

    def block(hidden: Tensor, *tensors: Tensor) -> Tensor:
        changed = dataclasses.replace(weights, **dict(zip(present, tensors, strict=True)))
        return run_reference(hidden, changed, PRESETS[name], rotary=rotary)

    assert torch.autograd.gradcheck(block, (hidden, *tensors), fast_mode=True)
    gradients = torch.autograd.grad(block(hidden, *tensors).square().sum(), (hidden, *tensors))
    assert all(gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("name", PRESETS)
def test_no_token_sees_the_future(name: str) -> None:
    weights, hidden = random_weights(PRESETS[name]), random_tensor(SEQUENCE, 1, HIDDEN, seed=10)
    changed = torch.cat((hidden[:2], random_tensor(SEQUENCE - 2, 1, HIDDEN, seed=11)))
    before, after = run_reference(hidden, weights, PRESETS[name]), run_reference(changed, weights, PRESETS[name])
    torch.testing.assert_close(before[:2], after[:2], rtol=1e-12, atol=0)
    assert not torch.allclose(before[2:], after[2:])


def test_no_two_presets_compute_the_same() -> None:
    """With every weight shared that two presets have in common, each still gives its own result."""
    hidden = random_tensor(SEQUENCE, BATCH, HIDDEN, seed=12)
    shared = random_weights(PRESETS["baseline"])
    outputs = {}
    for name, config in PRESETS.items():
        own = random_weights(config)
        common = {field: getattr(shared, field) for field in ("query", "key", "value")}
        outputs[name] = run_reference(hidden, dataclasses.replace(own, **common), config)
    names = list(outputs)
    for index, name in enumerate(names):
        for other in names[:index]:
            assert not torch.allclose(outputs[name], outputs[other]), (name, other)


@pytest.mark.parametrize(
    ("activation", "at_zero", "at_two"),
    [
        ("sigmoid", 0.5, 0.8807970779778823),
        ("silu", 0.0, 1.7615941559557646),
        ("ns-sigmoid", 0.75, 0.9403985389889412),
        ("identity", 0.0, 2.0),
    ],
)
def test_activations_at_known_points(activation: str, at_zero: float, at_two: float) -> None:
    scores = activate(torch.tensor([0.0, 2.0], dtype=torch.float64), GateConfig(position="sdpa", activation=activation))
    torch.testing.assert_close(scores, torch.tensor([at_zero, at_two], dtype=torch.float64))


def test_head_shared_scores_are_averaged_after_the_activation() -> None:
    config = GateConfig(position="sdpa", sharing="head-shared")
    logits = torch.tensor(
        [[[-6.0, 0.0], [6.0, 4.0], [1.0, 0.0]]], dtype=torch.float64
    )  # [1 token, 3 heads, 2 channels]
    expected = [(sigmoid(-6) + sigmoid(6) + sigmoid(1)) / 3, (0.5 + sigmoid(4) + 0.5) / 3]
    scores = gate_scores(logits, config)
    assert scores.shape == (1, 1, 2)
    torch.testing.assert_close(scores, torch.tensor([[expected]], dtype=torch.float64))
    assert abs(scores[0, 0, 0].item() - sigmoid(1 / 3)) > 0.005  # the mean before the activation is another number


def test_head_shared_headwise_is_one_score_for_all() -> None:
    config = GateConfig(position="sdpa", granularity="headwise", sharing="head-shared")
    y, logits = random_tensor(2, HEADS, CHANNELS, seed=13), random_tensor(2, HEADS, 1, seed=14)
    scores = gate_scores(logits, config)
    assert scores.shape == (2, 1, 1)
    for token in range(2):
        score = sum(sigmoid(x) for x in logits[token, :, 0].tolist()) / HEADS
        torch.testing.assert_close(apply_gate(y, scores, config)[token], y[token] * score)


def test_a_missing_gate_weight_is_named() -> None:
    weights = dataclasses.replace(random_weights(PRESETS["key-elementwise"]), gate=None)
    with pytest.raises(ValueError, match="this gate needs the weight 'gate', which is missing"):
        run_reference(random_tensor(2, 1, HIDDEN, seed=28), weights, PRESETS["key-elementwise"])


def test_a_fresh_constant_gate_halves_the_output() -> None:
    config = PRESETS["sdpa-constant"]
    weights = dataclasses.replace(random_weights(config), gate_constant=torch.zeros(HEADS, CHANNELS).double())
    hidden = random_tensor(SEQUENCE, BATCH, HIDDEN, seed=15)
    ungated = run_reference(hidden, weights, PRESETS["baseline"])
    torch.testing.assert_close(run_reference(hidden, weights, config), 0.5 * ungated)


def test_a_headwise_constant_gate_scales_each_head() -> None:
    config = GateConfig(position="sdpa", granularity="headwise", input="constant")
    weights, hidden = random_weights(config), random_tensor(SEQUENCE, BATCH, HIDDEN, seed=16)
    assert weights.gate_constant.shape == (HEADS, 1)
    scaled = weights.output.view(HIDDEN, HEADS, CHANNELS) * torch.sigmoid(weights.gate_constant)
    folded = dataclasses.replace(weights, output=scaled.flatten(1))
    expected = run_reference(hidden, folded, PRESETS["baseline"])
    torch.testing.assert_close(run_reference(hidden, weights, config), expected)


@pytest.mark.parametrize("position", ["query", "key"])
def test_a_headwise_positive_score_cancels_in_qk_norm(position: str) -> None:
    """Because the gate lies before the norm; without QK-norm, or elementwise, it does not cancel."""
    headwise, hidden = GateConfig(position=position, granularity="headwise"), random_tensor(3, 1, HIDDEN, seed=17)
    weights = random_weights(headwise)
    ungated = run_reference(hidden, weights, PRESETS["baseline"], norm_epsilon=0.0)
    torch.testing.assert_close(run_reference(hidden, weights, headwise, norm_epsilon=0.0), ungated)
    plain = dataclasses.replace(weights, query_norm=None, key_norm=None)
    assert not torch.allclose(run_reference(hidden, plain, headwise), run_reference(hidden, plain, PRESETS["baseline"]))
    elementwise = GateConfig(position=position)
    weights = random_weights(elementwise)
    ungated = run_reference(hidden, weights, PRESETS["baseline"], norm_epsilon=0.0)
    assert not torch.allclose(run_reference(hidden, weights, elementwise, norm_epsilon=0.0), ungated)


def test_causal_attention_equals_torchs_own() -> None:
    query = random_tensor(7, BATCH, HEADS, CHANNELS, seed=18)
    key, value = random_tensor(7, BATCH, GROUPS, CHANNELS, seed=19), random_tensor(7, BATCH, GROUPS, CHANNELS, seed=20)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (query, key, value)), is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(causal_attention(query, key, value, 0.3), expected.permute(2, 0, 1, 3))


def test_rotary_passes_position_zero_and_the_channels_beyond() -> None:
    x = random_tensor(5, BATCH, HEADS, CHANNELS, seed=21)
    y = apply_rotary(x, *rotary_tables(torch.arange(5, dtype=torch.float64), ROTARY))
    assert torch.equal(y[0], x[0])
    assert torch.equal(y[..., ROTARY:], x[..., ROTARY:])
    torch.testing.assert_close(y.square().sum(-1), x.square().sum(-1))
    assert not torch.allclose(y[1:, ..., :ROTARY], x[1:, ..., :ROTARY])


def test_rotary_scores_depend_on_distance_alone() -> None:
    query, key = random_tensor(CHANNELS, seed=22), random_tensor(CHANNELS, seed=23)
    tables = rotary_tables(torch.arange(9, dtype=torch.float64), CHANNELS)
    queries = apply_rotary(query.expand(9, 1, 1, CHANNELS), *tables).squeeze()
    keys = apply_rotary(key.expand(9, 1, 1, CHANNELS), *tables).squeeze()
    scores = queries @ keys.T
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    y, logits = (
        random_tensor(5, HEADS, CHANNELS, seed=24).to(dtype),
        random_tensor(5, HEADS, CHANNELS, seed=25).to(dtype),
    )
    for name in ("sdpa-elementwise", "sdpa-elementwise-shared", "sdpa-elementwise-additive-silu"):
        config = PRESETS[name]
        scores = gate_scores(logits, config)
        assert scores.dtype == torch.float32
        result = apply_gate(y, scores, config)
        assert result.dtype == dtype
        exact = apply_gate(y.float(), gate_scores(logits.float(), config), config)
        assert torch.equal(result, exact.to(dtype))
    weight = random_tensor(CHANNELS, seed=26).to(dtype)
    result = per_head_rms_norm(y, weight, EPSILON)
    assert torch.equal(result, per_head_rms_norm(y.float(), weight.float(), EPSILON).to(dtype))


@pytest.mark.parametrize("name", PRESETS)
def test_the_block_keeps_the_dtype_of_its_input(name: str) -> None:
    weights, hidden = random_weights(PRESETS[name]), random_tensor(SEQUENCE, BATCH, HIDDEN, seed=27)
    exact = run_reference(hidden, weights, PRESETS[name])
    assert exact.dtype == torch.float64
    tensors = {field.name: getattr(weights, field.name) for field in dataclasses.fields(weights)}
    half = AttentionWeights(**{key: None if t is None else t.bfloat16() for key, t in tensors.items()})
    rough = run_reference(hidden.bfloat16(), half, PRESETS[name])
    assert rough.dtype == torch.bfloat16
    assert (rough - exact).norm() < 0.1 * exact.norm()
