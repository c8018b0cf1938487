"""Gated DeltaNet between gated attention layers: its math, and the same training step on every parallel layout.

The math is compared with the recurrence of the paper in float64, and with Qwen3-Next's layer in transformers.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megagate.gate import PRESETS
from tests.distributed import run_distributed
from tests.model.test_initialization import initial_parameters
from tests.model.test_layouts import TOLERANCE, UPDATE_TOLERANCE, Layout
from tests.model.training import SEQUENCE, Case, Result, assemble, build, train_all, worst_error

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH = 4, 8, 8, 4, 4
HIDDEN, EPSILON = 32, 1e-2
DELTA_NET = (
    "--experimental-attention-variant gated_delta_net "
    f"--linear-num-key-heads {KEY_HEADS} --linear-num-value-heads {VALUE_HEADS} "
    f"--linear-key-head-dim {KEY_DIM} --linear-value-head-dim {VALUE_DIM} --linear-conv-kernel-dim {WIDTH} "
    f"--norm-epsilon {EPSILON}"
)
MODELS = {
    # GEGEGE*E
    "experts": f"{DELTA_NET} --linear-attention-freq 4 --num-layers 4 --ffn-hidden-size 24 --num-query-groups 2 "
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --disable-bias-linear "
    "--moe-router-load-balancing-type seq_aux_loss --apply-layernorm-1p",
    # G-*-G-*-
    "dense": f"{DELTA_NET} --linear-attention-freq 2 --num-layers 4 --ffn-hidden-size 48 --num-query-groups 4 "
    "--normalization LayerNorm --untie-embeddings-and-output-weights",
}
PRESET = {"experts": "sdpa-headwise", "dense": "sdpa-elementwise"}

# Weights that differ by one rounding (6e-8 of each) give gradients that differ by 1.8e-5. With a smaller epsilon it is
# more: the norms of the heads amplify what is small.
GRADIENT_TOLERANCE = 2e-5


def train_cases(cases: list[Case], ranks: int = 1, timeout: int = 120) -> list[Result]:
    results = run_distributed(train_all, ranks, cases, timeout=timeout)
    return [assemble([rank[index] for rank in results]) for index in range(len(cases))]


def case(model: str, layout: Layout | None = None, extra: str = "", preset: str | None = None, **settings: Any) -> Case:
    flags = f"{MODELS[model]} --gate-preset {preset or PRESET[model]} --micro-batch-size 2"
    return Case(flags=f"{flags} {layout.flags if layout else ''} {extra}", **settings)


@functools.cache
def one_process(model: str, **settings: Any) -> Result:
    return train_cases([case(model, **settings)])[0]


def assert_same(actual: Result, expected: Result) -> None:
    """Losses, grad norm and every gradient agree."""
    assert expected.losses["lm loss"] > 1
    assert actual.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=TOLERANCE)
    error, name = worst_error(actual.gradients, expected.gradients)
    assert error <= GRADIENT_TOLERANCE, f"the gradient of {name} differs by {error:.1e}"


# ---------------------------------------------------------------------------------------------------------------------
# The math of one layer


def layer_and_output(flags: str, hidden: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Tensor]]:
    """Return the weights of the first layer, its output on `hidden`, and the gradients of a sum of squares."""
    layer = build(Case(flags=flags))[0][0].module.decoder.layers[0].self_attention
    hidden = hidden.requires_grad_()
    output, _ = layer(hidden, attention_mask=None)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    # What the optimizer sees, main_grad, is for a step of the whole model.
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter)
    gradients = torch.autograd.grad(output.square().sum(), [hidden, *parameters])
    weights = {name: value.detach() for name, value in layer.state_dict().items() if isinstance(value, Tensor)}
    return weights, output.detach(), gradients[0], dict(zip(names, gradients[1:], strict=True))


@functools.cache
def layer_case(extra: str = "") -> tuple[Tensor, tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Tensor]]]:
    """Return an input [s, b, H] of more than two chunks of 64, and what the layer makes of it."""
    hidden = torch.randn(150, 2, HIDDEN, generator=torch.Generator().manual_seed(5))
    flags = f"{MODELS['experts']} --micro-batch-size 2 {extra}"
    return hidden, run_distributed(layer_and_output, 1, flags, hidden, timeout=100)[0]


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
    """S_t = S_{t-1} a_t (I - b_t k_t k_t^T) + b_t v_t k_t^T, o_t = S_t q_t (arXiv 2412.06464, eq. 10).

    Args:
        query: [b, s, h, dk].
        key: [b, s, h, dk].
        value: [b, s, h, dv].
        decay: a, [b, s, h].
        strength: b, [b, s, h].

    Returns:
        [b, s, h, dv].
    """
    state = value.new_zeros(value.shape[0], value.shape[2], value.shape[3], key.shape[3])
    identity = torch.eye(key.shape[3], dtype=value.dtype)
    outputs = []
    for q, k, v, a, b in zip(*(tensor.unbind(1) for tensor in (query, key, value, decay, strength)), strict=True):
        a, b = a[..., None, None], b[..., None, None]
        state = state @ (a * (identity - b * k[..., :, None] * k[..., None, :])) + b * v[..., :, None] * k[..., None, :]
        outputs.append((state @ q[..., None]).squeeze(-1))
    return torch.stack(outputs, dim=1)


def reference(weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """Return the output of the layer on hidden [s, b, H], in the dtype of both."""
    query_size, value_size = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
    projected = hidden.transpose(0, 1) @ weights["in_proj.weight"].T
    mixed, gate, strength, decay = projected.split(
        [2 * query_size + value_size, value_size, VALUE_HEADS, VALUE_HEADS], dim=-1
    )
    padded = functional.pad(mixed, (0, 0, WIDTH - 1, 0))
    taps = weights["conv1d.weight"][:, 0]  # [channels, width]
    mixed = sum(padded[:, tap : tap + mixed.shape[1]] * taps[:, tap] for tap in range(WIDTH))
    query, key, value = functional.silu(mixed).split([query_size, query_size, value_size], dim=-1)
    query, key = (tensor.unflatten(-1, (KEY_HEADS, KEY_DIM)) for tensor in (query, key))
    query, key = (
        (tensor / (tensor.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
            VALUE_HEADS // KEY_HEADS, dim=2
        )
        for tensor in (query, key)
    )
    step = functional.softplus(decay + weights["dt_bias"])
    values = gated_delta_rule(
        query / KEY_DIM**0.5,
        key,
        value.unflatten(-1, (VALUE_HEADS, VALUE_DIM)),
        (-weights["A_log"].exp() * step).exp(),
        strength.sigmoid(),
    )
    normed = values / (values.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weights["out_norm.weight"]
    gated = normed * functional.silu(gate.unflatten(-1, (VALUE_HEADS, VALUE_DIM)))
    return (gated.flatten(2) @ weights["out_proj.weight"].T).transpose(0, 1)


@pytest.mark.parametrize("extra", ["", "--deterministic-mode"])
def test_the_layer_is_the_papers_recurrence(extra: str) -> None:
    """The CPU's kernels, and Megatron's own in its deterministic mode, in fp32 against float64; gradients too."""
    hidden, (weights, output, hidden_gradient, gradients) = layer_case(extra)
    wide = {name: value.double().requires_grad_() for name, value in weights.items()}
    wide_hidden = hidden.double().requires_grad_()
    expected = reference(wide, wide_hidden)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5 * float(expected.detach().abs().max()))
    expected.square().sum().backward()
    assert gradients.keys() == wide.keys()
    actual = {"hidden": hidden_gradient.double()} | {name: value.double() for name, value in gradients.items()}
    error, name = worst_error(actual, {"hidden": wide_hidden.grad} | {key: value.grad for key, value in wide.items()})
    assert error < 1e-4, f"the gradient of {name} differs by {error:.1e}"


def test_the_layer_is_qwen3_nexts() -> None:
    """With its weights in the order of transformers: by key head, and an output norm that is not zero-centred."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    hidden, (weights, output, _, _) = layer_case()
    config = modeling.Qwen3NextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY_DIM,
        linear_value_head_dim=VALUE_DIM,
        linear_conv_kernel_dim=WIDTH,
        rms_norm_eps=EPSILON,
    )
    sizes = [KEY_HEADS * KEY_DIM] * 2 + [VALUE_HEADS * VALUE_DIM] * 2 + [VALUE_HEADS] * 2
    parts = [part.unflatten(0, (KEY_HEADS, -1)) for part in weights["in_proj.weight"].split(sizes)]
    theirs = modeling.Qwen3NextGatedDeltaNet(config, layer_idx=0)
    theirs.load_state_dict(
        {
            "in_proj_qkvz.weight": torch.cat(parts[:4], dim=1).flatten(0, 1),
            "in_proj_ba.weight": torch.cat(parts[4:], dim=1).flatten(0, 1),
            "conv1d.weight": weights["conv1d.weight"],
            "dt_bias": weights["dt_bias"],
            "A_log": weights["A_log"],
            "norm.weight": weights["out_norm.weight"],
            "out_proj.weight": weights["out_proj.weight"],
        }
    )
    with torch.no_grad():
        expected = theirs(hidden.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5 * float(expected.detach().abs().max()))


def test_the_names_are_megatrons() -> None:
    _, (weights, _, _, _) = layer_case()
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        "in_proj.weight": (2 * KEY_HEADS * KEY_DIM + 2 * VALUE_HEADS * VALUE_DIM + 2 * VALUE_HEADS, HIDDEN),
        "conv1d.weight": (2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM, 1, WIDTH),
        "dt_bias": (VALUE_HEADS,),
        "A_log": (VALUE_HEADS,),
        "out_norm.weight": (VALUE_DIM,),
        "out_proj.weight": (HIDDEN, VALUE_HEADS * VALUE_DIM),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Parallel layouts

LAYOUTS = [
    (Layout(ranks=2, tp=2), ["dense"]),
    (Layout(ranks=2, tp=2, sp=True), ["dense", "experts"]),
    (Layout(ranks=4, tp=4), ["dense"]),
    (Layout(ranks=2, cp=2), ["dense", "experts"]),
    (Layout(ranks=4, tp=2, cp=2), ["dense"]),
    (Layout(ranks=4, tp=2, sp=True, cp=2), ["experts"]),
    (Layout(ranks=2, pp=2), ["dense", "experts"]),
    (Layout(ranks=2, pp=2, vpp=2), ["experts"]),
    (Layout(ranks=2), ["dense"]),
    (Layout(ranks=2, ep=2), ["experts"]),
    (Layout(ranks=4, tp=2, sp=True, pp=2, ep=2), ["experts"]),
]


@pytest.mark.parametrize(("layout", "models"), LAYOUTS, ids=[str(layout) for layout, _ in LAYOUTS])
def test_layout(layout: Layout, models: list[str]) -> None:
    results = train_cases([case(model, layout) for model in models], layout.ranks)
    for model, result in zip(models, results, strict=True):
        assert_same(result, one_process(model))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (Layout(ranks=4, tp=4), "dense"),
        (Layout(ranks=4, tp=2, sp=True, pp=2, ep=2), "experts"),
        (Layout(ranks=4, tp=2, sp=True, cp=2), "experts"),
        (Layout(ranks=2, pp=2, vpp=2), "experts"),
    ],
    ids=str,
)
def test_every_gate(layout: Layout, model: str) -> None:
    results = train_cases([case(model, layout, preset=preset) for preset in PRESETS], layout.ranks, timeout=600)
    for preset, result in zip(PRESETS, results, strict=True):
        try:
            assert_same(result, one_process(model, preset=preset))
        except AssertionError as error:
            error.add_note(preset)
            raise


@pytest.mark.parametrize("model", MODELS)
def test_no_gradient_is_zero(model: str) -> None:
    """A comparison of zeros would show nothing."""
    gradients = {name: value for name, value in one_process(model).gradients.items() if ".self_attention." in name}
    parts = [f"in_proj.weight.{part}" for part in ("query", "key", "value", "z", "beta", "alpha")]
    parts += [f"conv1d.weight.{part}" for part in ("query", "key", "value")]
    for part in (*parts, "A_log", "dt_bias", "out_norm.weight", "out_proj.weight"):
        assert sum(name.endswith(part) for name in gradients) >= 1, part
    for name, gradient in gradients.items():
        if "linear_qkv" not in name:  # which has padding rows
            assert gradient.flatten(1).abs().amax(1).min() > 0 if gradient.dim() > 1 else gradient.abs().min() > 0, name


def test_distributed_optimizer() -> None:
    layout = Layout(ranks=4, tp=2, sp=True)
    expected = one_process("experts", steps=2)
    (result,) = train_cases([case("experts", layout, "--use-distributed-optimizer", steps=2)], layout.ranks)
    assert result.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=TOLERANCE)
    error, name = worst_error(result.updates, expected.updates)
    assert error <= UPDATE_TOLERANCE, f"the update of {name} differs by {error:.1e}"


def test_recomputed_activations() -> None:
    layout = Layout(ranks=2, tp=2)
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    (result,) = train_cases([case("dense", layout, recompute)], layout.ranks)
    assert_same(result, one_process("dense"))


def test_bf16() -> None:
    """The loss is that of fp32 to the precision of bf16, one process or not."""
    layout = Layout(ranks=2, tp=2, sp=True)
    (result,) = train_cases([case("experts", layout, "--bf16", steps=2)], layout.ranks)
    assert result.losses["lm loss"] == pytest.approx(one_process("experts", steps=2).losses["lm loss"], rel=2e-2)


def test_a_pattern_of_ones_own_is_the_same_model() -> None:
    flags = case("experts").flags.replace("--linear-attention-freq 4 --num-layers 4", "--hybrid-layer-pattern GEGEGE*E")
    (result,) = train_cases([Case(flags=f"{flags} --micro-batch-size 2")])
    assert_same(result, one_process("experts"))


def operations(flags: str) -> float:
    """Return the floating-point operations that Megatron's log counts for a batch of one sequence."""
    from megatron.training import get_args
    from megatron.training.training import num_floating_point_operations

    build(Case(flags=flags))
    return num_floating_point_operations(get_args(), batch_size=1)


def test_the_layer_is_in_megatrons_count_of_operations() -> None:
    """Two for each weight of a product and token, and four products of a state per head, which it takes for square."""
    _, (weights, _, _, _) = layer_case()
    flags = MODELS["dense"].replace("--linear-attention-freq 2 --num-layers 4", "--hybrid-layer-pattern {}")
    counts = [run_distributed(operations, 1, f"{flags.format(p)} --micro-batch-size 2")[0] for p in ("GG-", "G-")]
    numbers = sum(weights[f"{name}.weight"].numel() for name in ("in_proj", "conv1d", "out_proj"))
    assert counts[0] - counts[1] == 3 * 2 * SEQUENCE * (numbers + 4 * VALUE_HEADS * VALUE_DIM**2)


# ---------------------------------------------------------------------------------------------------------------------
# Initial weights

INITIAL = f"{MODELS['experts']} --micro-batch-size 1 --init-method-std 0.05"


@functools.cache
def initial() -> dict[str, Tensor]:
    return initial_parameters([INITIAL])[0]


@pytest.mark.parametrize(
    "layout", [Layout(ranks=4, tp=4, sp=True), Layout(ranks=2, pp=2, vpp=2), Layout(ranks=2, cp=2)], ids=str
)
def test_the_same_initial_weights_on_every_layout(layout: Layout) -> None:
    (actual,) = initial_parameters([f"{INITIAL} {layout.flags}"], layout.ranks)
    assert actual.keys() == initial().keys()
    for name, value in initial().items():
        assert torch.equal(actual[name], value), name


def test_initial_distributions() -> None:
    """Megatron's: A uniform in 1..16, dt_bias 1, the convolution as torch draws it, the rest normal."""
    collected: dict[str, list[Tensor]] = {}
    for name, value in initial().items():
        if ".self_attention." in name:
            collected.setdefault(name.split(".self_attention.")[1], []).append(value.flatten())
    whole = {name: torch.cat(values) for name, values in collected.items()}
    decay = whole["A_log"].exp()
    assert 1 <= decay.min() < 4
    assert 13 < decay.max() <= 16
    assert len(decay.unique()) == 3 * VALUE_HEADS
    assert (whole["dt_bias"] == 1).all()
    assert (whole["out_norm.weight"] == 1).all()
    for part in ("query", "key", "value"):
        taps = whole[f"conv1d.weight.{part}"]
        assert 0.45 < taps.abs().max() <= 0.5  # 1 / sqrt(width)
        assert float(taps.std()) == pytest.approx(0.5 / 3**0.5, rel=0.1)
        assert len(taps.unique()) > 0.99 * len(taps)
    for part in ("query", "key", "value", "z"):
        assert float(whole[f"in_proj.weight.{part}"].std()) == pytest.approx(0.05, rel=0.05)
    assert float(whole["out_proj.weight"].std()) == pytest.approx(0.05 / 8**0.5, rel=0.05)
