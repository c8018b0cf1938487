"""`--recompute-modules gate`: gated tensors are not stored, and come back the same (tests of results are in
test_attention.py and test_layouts.py)."""

import re

import pytest
import torch
from torch import Tensor

from megagate.errors import UserError
from megagate.gate import PRESETS
from megagate.model.recompute import Rebuilt
from megagate.pretrain.arguments import read
from tests.distributed import run_distributed
from tests.test_docs import PAGE
from tests.training import TINY

SELECTIVE = ["--recompute-granularity", "selective"]


def held() -> dict[str, tuple[int, int]]:
    """Return for each preset the bytes that a layer keeps, with gated tensors stored and rebuilt."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from benchmarks.memory import held_for_backward

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    return {name: (held_for_backward(gate), held_for_backward(gate, True)) for name, gate in PRESETS.items()}


def test_only_the_logits_are_kept() -> None:
    from benchmarks.memory import CHANNELS, HEADS, SEQUENCE

    logits = 2 * SEQUENCE * HEADS * CHANNELS  # bytes of one per query head and channel in bf16
    bytes_held = run_distributed(held, 1, timeout=100)[0]
    for name, (stored, rebuilt) in bytes_held.items():
        numbers = [stored // SEQUENCE, *([] if name == "baseline" else [rebuilt // SEQUENCE])]
        line = next(line for line in PAGE.splitlines() if re.match(rf"    {name} ", line))
        assert [int(number) for number in re.findall(r" (\d+)\b", line)][: len(numbers)] == numbers, "docs/gates.md"
    baseline, same = bytes_held["baseline"]
    assert same == baseline
    for name, (stored, rebuilt) in bytes_held.items():
        assert name == "baseline" or rebuilt < stored, name
    for name in ("sdpa-elementwise", "sdpa-elementwise-silu", "sdpa-elementwise-additive-silu"):
        assert bytes_held[name][1] == baseline + logits, name
    # Without a gate the norm keeps a copy of the queries, in place of which the logits are kept.
    for name in ("sdpa-silu", "sdpa-rmsnorm", "sdpa-constant", "query-elementwise"):
        assert bytes_held[name][1] == baseline, name


def test_views_of_a_product_are_rebuilt_and_other_tensors_are_not() -> None:
    rebuilt, calls = Rebuilt(), []
    a, b, c = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        calls.append(1)
        return a * b

    with rebuilt.saving():
        product = rebuilt.apply(multiply, a, b)
        result = (product.T @ c).sum() + (product[1:] ** 2).sum() + (c**3).sum()
    actual = torch.autograd.grad(result, (a, b, c))
    assert len(calls) > 1
    expected = torch.autograd.grad((((a * b).T @ c).sum() + ((a * b)[1:] ** 2).sum() + (c**3).sum()), (a, b, c))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


def test_gate_is_taken_from_what_megatron_recomputes() -> None:
    args = read([*TINY, "--gate-preset", "sdpa-headwise", *SELECTIVE, "--recompute-modules", "gate", "core_attn"])
    assert args.recompute_gate
    assert args.recompute_modules == ["core_attn"]
    args = read([*TINY, "--gate-preset", "sdpa-headwise", *SELECTIVE, "--recompute-modules", "gate"])
    assert args.recompute_gate
    assert args.recompute_modules == []
    assert not read([*TINY, "--gate-preset", "sdpa-headwise", *SELECTIVE]).recompute_gate


@pytest.mark.parametrize("module", ["layernorm", "gdn_norm_out"])
def test_what_needs_transformer_engine_is_refused(module: str) -> None:
    mend = "leave it out, or add --transformer-impl transformer_engine"
    with pytest.raises(UserError, match=f"--recompute-modules {module} needs Transformer Engine: {mend}"):
        read([*TINY, *SELECTIVE, "--recompute-modules", module])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gate-preset", "sdpa-headwise"], "gate has no effect without --recompute-granularity selective: add it"),
        (
            ["--gate-preset", "sdpa-headwise", *"--recompute-granularity full --recompute-method uniform".split()],
            "full recomputes the gate too: leave out --recompute-modules gate",
        ),
        (SELECTIVE, "gate has no effect on a model without a gate: leave it out"),
    ],
)
def test_where_it_has_no_effect_it_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read([*TINY, *argv, "--recompute-modules", "gate"])
