"""The kernels of the fused gate in Triton's interpreter, against the reference in float64.

test_fused.py runs it, as `TRITON_INTERPRET=1 python -m pytest tests/gate/in_interpreter.py` does.
"""

import itertools
import math
from functools import partial

import hypothesis
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megagate.gate import GateConfig, QKVLayout, describe, fused
from megagate.gate.functional import activate, apply_gate
from megagate.gate.fused import apply_scores, fused_gate

assert triton.knobs.runtime.interpret

ACTIVATIONS = ("sigmoid", "silu", "ns-sigmoid", "identity")
COMBINES = ("multiply", "add")
GATES = [
    GateConfig(position="sdpa", granularity=granularity, sharing=sharing, combine=combine, activation=activation)
    for granularity, sharing, combine, activation in itertools.product(
        ("elementwise", "headwise"), ("head-specific", "head-shared"), COMBINES, ACTIVATIONS
    )
]
CONSTANTS = [
    GateConfig(position="sdpa", granularity=granularity, combine=combine, activation=activation, input="constant")
    for granularity, combine, activation in itertools.product(("elementwise", "headwise"), COMBINES, ACTIVATIONS)
]
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
"""Half the distance between neighbouring numbers at 1; the whole in bf16, which the interpreter does not round."""


def reference(y: Tensor, logits: Tensor, gate: GateConfig) -> Tensor:
    scores = activate(logits, gate)
    if gate.sharing == "head-shared" and y.dim() > 3:
        scores = scores.mean(dim=tuple(range(2, scores.dim() - 1)), keepdim=True)
    return apply_gate(y, scores, gate)


def results(function, y: Tensor, logits: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the result and both gradients."""
    y, logits = y.detach().requires_grad_(), logits.detach().requires_grad_()
    result = function(y, logits)
    return [result, *torch.autograd.grad(result, (y, logits), grad)]


def compare(function, expected_function, y: Tensor, logits: Tensor, grad: Tensor) -> None:
    """Hold results to one rounding of the exact ones, which sums may miss by rounding of their terms in fp32."""
    actual = results(function, y, logits, grad)
    expected = results(expected_function, y.double(), logits.double(), grad.double())
    for name, mine, exact, like in zip(("result", "y", "logits"), actual, expected, (y, y, logits), strict=True):
        assert mine.dtype == like.dtype
        assert mine.shape == exact.shape
        exact = exact.detach()
        largest = float(exact.abs().max()) if exact.numel() else 0.0
        smallest_step = 6e-8 if mine.dtype == torch.float16 else 0.0
        bound = 1.01 * ROUNDING[mine.dtype] * exact.abs() + 4e-6 * largest + smallest_step
        assert ((mine.double() - exact).abs() <= bound).all(), name
    assert actual[0].is_contiguous()


def strided(shape: tuple[int, ...], order: list[int], extra: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Return a random tensor whose dimensions lie in memory in `order`, with `extra` unused entries in each."""
    sizes = [shape[index] + extra[index] for index in order]
    whole = torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).mul(2).to(dtype)
    back = [order.index(index) for index in range(len(shape))]
    return whole.permute(back)[tuple(slice(extra[index] // 2, extra[index] // 2 + n) for index, n in enumerate(shape))]


@st.composite
def tensors(draw):
    """A gate, and y, logits and the result's gradient of any shape, layout and dtype."""
    gate = draw(st.sampled_from([*GATES, *CONSTANTS]))
    is_constant = gate.input == "constant"
    heads = draw(st.lists(st.integers(1, 5), min_size=int(gate.sharing == "head-shared" or is_constant), max_size=2))
    tokens, channels = draw(st.lists(st.integers(1, 9), min_size=2, max_size=2)), draw(st.integers(1, 40))
    y_shape = (*tokens, *heads, channels)
    logits_shape = (*((1, 1) if is_constant else tokens), *heads, channels if gate.granularity == "elementwise" else 1)
    seed = draw(st.integers(0, 2**20))
    made = []
    for index, shape in enumerate((y_shape, logits_shape, y_shape)):
        order = draw(st.permutations(range(len(shape))))
        extra = draw(st.lists(st.integers(0, 3), min_size=len(shape), max_size=len(shape)))
        dtype = draw(st.sampled_from(list(ROUNDING))) if index < 2 else made[0].dtype
        made.append(strided(shape, list(order), extra, dtype, seed + index))
    return gate, *made


@hypothesis.settings(max_examples=40)
@given(tensors())
def test_any_shape_and_layout(drawn) -> None:
    gate, y, logits, grad = drawn
    compare(partial(fused_gate, config=gate), partial(reference, gate=gate), y, logits, grad)


@pytest.mark.parametrize("gate", GATES[:: len(COMBINES) * len(ACTIVATIONS)], ids=describe)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_among_the_rows_of_linear_qkv(gate: GateConfig, dtype: torch.dtype) -> None:
    """They are not copied, and head sizes and token counts are no powers of two."""
    layout = QKVLayout(6, 2, 48, gate)
    mixed = torch.randn(5, 3, layout.total_rows).to(dtype)
    query, logits, *_ = layout.split(mixed)
    assert not logits.is_contiguous()
    y = torch.randn(5, 3, 6, 48).to(dtype).unflatten(2, (2, 3))
    grad = torch.randn(y.shape).to(dtype)
    compare(partial(fused_gate, config=gate), partial(reference, gate=gate), y, logits, grad)
    # Queries are such a view too, and a sum has a gradient without memory of its own.
    ones = torch.ones(()).expand(y.shape)
    compare(partial(fused_gate, config=gate), partial(reference, gate=gate), query, logits, ones)


@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
def test_the_sum_over_tokens_in_parts(granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of unequal size, of which the last have nothing: 37 tokens in parts of 3 are 13 of the 16."""
    monkeypatch.setattr(fused, "PROGRAMS", 16)
    fused.plan.cache_clear()
    gate = GateConfig(position="sdpa", input="constant", granularity=granularity)
    y, logits = torch.randn(37, 1, 4, 20), torch.randn(1, 1, 4, 20 if granularity == "elementwise" else 1)
    how = fused.plan(tuple(y.shape), tuple(logits.shape), False, (y.stride(), logits.stride()))
    assert (how.parts, how.part) == (16, 3)
    compare(partial(fused_gate, config=gate), partial(reference, gate=gate), y, logits, torch.randn(y.shape))
    fused.plan.cache_clear()


@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("channels", [12, 1])
def test_scores_that_heads_share(combine: str, channels: int) -> None:
    """As where the mean over heads comes from several ranks: bf16 heads, fp32 scores."""
    gate = GateConfig(position="sdpa", combine=combine, activation="identity")
    y, scores = torch.randn(5, 2, 3, 4, 12).bfloat16(), torch.randn(5, 2, 1, 1, channels)
    grad = torch.randn(y.shape).bfloat16()
    compare(partial(apply_scores, combine=gate.combine), partial(reference, gate=gate), y, scores, grad)


SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.5, 90.0, -90.0, 200.0, -200.0, 3e38, -3e38, 1e-40)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy speaks of overflow
@pytest.mark.parametrize("gate", [gate for gate in GATES if gate.sharing == "head-specific"], ids=describe)
def test_nan_and_infinity_spread_as_in_the_reference(gate: GateConfig) -> None:
    numbers = torch.tensor(SPECIAL)
    y, logits, grad = (part.reshape(-1, 2, 1, 1) for part in torch.cartesian_prod(numbers, numbers, numbers).unbind(1))
    if gate.granularity == "headwise":  # one special number in a sum, so that its order does not matter
        others = torch.rand(2, *y.shape[:-1], 6) + 1
        y, grad = torch.cat((others[0], y), dim=-1), torch.cat((others[1], grad), dim=-1)
    actual = results(partial(fused_gate, config=gate), y, logits, grad)
    expected = results(partial(reference, gate=gate), y, logits, grad)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("position", ["y", "logits", "grad"])
def test_nan_in_one_head_reaches_only_what_depends_on_it(position: str) -> None:
    gate = GateConfig(position="sdpa", sharing="head-shared")
    inputs = {name: torch.randn(4, 1, 3, 8) for name in ("y", "logits", "grad")}
    inputs[position][2, 0, 1, 5] = math.nan
    actual = results(partial(fused_gate, config=gate), *inputs.values())
    expected = results(partial(reference, gate=gate), *inputs.values())
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.isnan().any() == theirs.isnan().any()
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_offsets_beyond_32_bits() -> None:
    """Memory that is never touched costs nothing: the third token lies 2^31 elements after the first.

    The stride itself has 32 bits, so that the kernel must widen it.
    """
    gate, far = GateConfig(position="sdpa"), 2**30 + 24
    parts = []
    for _ in range(3):
        part = torch.empty(2 * far + 16, dtype=torch.bfloat16).as_strided((3, 1, 2, 8), (far, far, 8, 1))
        parts.append(part.copy_(torch.randn(part.shape)))
    y, logits, grad = parts
    actual = results(partial(fused_gate, config=gate), y, logits, grad)
    expected = results(partial(fused_gate, config=gate), *(part.contiguous() for part in parts))
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_row_numbers_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 2^31 rows are planned so; here few are."""
    gate, make = GateConfig(position="sdpa"), fused.plan
    assert make((2**26, 1, 32, 1), (2**26, 1, 32, 1), False, ((32, 32, 1, 1),) * 2).wide
    y, logits, grad = torch.randn(3, 9, 2, 3, 5).unbind()
    expected = results(partial(fused_gate, config=gate), y, logits, grad)
    monkeypatch.setattr(fused, "plan", lambda *args: make(*args)._replace(wide=True))
    for mine, theirs in zip(results(partial(fused_gate, config=gate), y, logits, grad), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("gate", [GATES[0], GATES[-1], CONSTANTS[0]], ids=describe)
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (3, 0, 3, 4)])
def test_no_tokens(gate: GateConfig, shape: tuple[int, ...]) -> None:
    tokens = (1, 1) if gate.input == "constant" else shape[:2]
    logits = torch.randn(*tokens, 3, 4 if gate.granularity == "elementwise" else 1)
    actual = results(partial(fused_gate, config=gate), torch.randn(shape), logits, torch.randn(shape))
    expected = results(partial(reference, gate=gate), torch.randn(shape), logits, torch.randn(shape))
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_checkpointing_and_accumulation() -> None:
    gate = GateConfig(position="sdpa", granularity="headwise")
    y, logits = torch.randn(5, 2, 3, 8, requires_grad=True), torch.randn(5, 2, 3, 1, requires_grad=True)
    once = torch.autograd.grad(fused_gate(y, logits, gate).square().sum(), (y, logits))
    for _ in range(2):
        checkpoint(fused_gate, y, logits, gate, use_reentrant=False).square().sum().backward()
    for tensor, gradient in zip((y, logits), once, strict=True):
        assert torch.equal(tensor.grad, 2 * gradient)


def test_only_its_inputs_are_saved() -> None:
    saved = []
    for gate in (GATES[0], GateConfig(position="sdpa", combine="add")):
        y, logits = torch.randn(5, 2, 3, 8, requires_grad=True), torch.randn(5, 2, 3, 8, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.data_ptr()), lambda _: None):
            fused_gate(y, logits, gate)
        assert saved == ([y.data_ptr()] if gate.combine == "multiply" else []) + [logits.data_ptr()]
        saved.clear()


def test_a_second_derivative_is_refused() -> None:
    y, logits = torch.randn(2, 1, 2, 4, requires_grad=True), torch.randn(2, 1, 2, 4, requires_grad=True)
    gradient = torch.autograd.grad(fused_gate(y, logits, GATES[0]).square().sum(), y, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
