"""Muon treats queries, gate, keys and values of a gated linear_qkv as matrices of their own."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from torch import Tensor

from megagate.gate import QKVLayout
from megagate.gate import preset as preset_of
from tests.distributed import run_distributed
from tests.model.training import Case, Piece, RankResult, assemble, join, train

LR, DECAY = 1e-2, 0.1  # those of tests.model.training
FLAGS = (
    "--num-layers 2 --num-query-groups 4 --add-qkv-bias --disable-bias-linear --ffn-hidden-size 48 "
    "--micro-batch-size 1 --optimizer muon --muon-tp-mode duplicated --muon-fp32-matmul-prec high"
)
LAYOUTS = {"one": (1, ""), "TP2+SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel")}


def initial_weights(case: Case) -> list[Piece]:
    from tests.model.training import build, copies

    return copies(build(case)[0])


def splits(case: Case) -> list[list[int]]:
    """Return the split of each parameter that an optimizer of this rank treats as a linear_qkv."""
    from megagate.pretrain import gate_optimizer
    from tests.model.training import build

    gate_optimizer.apply()
    optimizer = build(case)[1]
    groups = [group for part in optimizer.chained_optimizers for group in part.optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group["params"]]
    return [parameter.qkv_split_shapes for parameter in parameters if getattr(parameter, "is_qkv", False)]


def orthogonalized(gradient: Tensor) -> Tensor:
    """Return Muon's step of one matrix, at its default scale (arXiv 2502.16982)."""
    return newton_schulz(gradient, steps=5, coefficient_type="quintic") * max(gradient.shape) ** 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "preset",
    [
        "sdpa-elementwise",
        "sdpa-headwise",
        "value-elementwise",
        "output-elementwise",
        "sdpa-constant",
        "switch-head-v-4-top-4",
    ],
)
def test_each_block_by_itself(preset: str, layout: str) -> None:
    ranks, layout_flags = LAYOUTS[layout]
    case = Case(flags=f"{FLAGS} --gate-preset {preset} {layout_flags}")
    results: list[RankResult] = run_distributed(train, ranks, case, timeout=100)
    weights = join([piece for rank in run_distributed(initial_weights, ranks, case, timeout=100) for piece in rank])
    result = assemble(results)
    rows = QKVLayout(8, 4, 8, preset_of(preset))

    def matrices(whole: Tensor) -> list[Tensor | None]:
        query, gate, key, value = rows.split_weight(whole)
        experts = value.unflatten(0, (4, rows.gate.value_experts, 8)).transpose(0, 1).flatten(1, 2)
        return [query, gate, key, *experts]

    kinds = set()
    for key, update in result.updates.items():
        if "linear_qkv.weight" in key:
            parts, gradients, before = (matrices(each) for each in (update, result.gradients[key], weights[key]))
            padding = rows.padding_row_mask()
            assert torch.count_nonzero(update[padding]) == 0
        elif "linear_gate" in key:
            parts, gradients, before = [update], [result.gradients[key]], [weights[key]]
        else:
            continue
        for part, gradient, weight in zip(parts, gradients, before, strict=True):
            if part is not None:
                expected = -LR * (orthogonalized(gradient) + DECAY * weight)
                assert float((part - expected).abs().max()) < 1e-3 * float(expected.abs().max()), key
        kinds.add(key.split(".")[-2])
    assert kinds == ({"linear_qkv", "linear_gate"} if preset == "output-elementwise" else {"linear_qkv"})
    assert all(update.isfinite().all() for update in result.updates.values())


def test_vectors_of_the_gate_are_adams() -> None:
    """The first step of Adam has the size of the learning rate where the gradient is not small beside epsilon."""
    case = Case(flags=f"{FLAGS} --gate-preset sdpa-constant --adam-eps 1e-12")
    result = assemble(run_distributed(train, 1, case, timeout=100))
    constants = [value for key, value in result.updates.items() if "gate_constant" in key]
    assert len(constants) == 2
    assert all(torch.allclose(value.abs(), torch.full_like(value, LR), rtol=1e-3) for value in constants)


def test_padding_stays_zero_without_the_split() -> None:
    """A zero block, and zero rows of a block, are orthogonalised to zeros, not to NaN."""
    case = Case(flags=f"{FLAGS} --gate-preset sdpa-headwise --muon-no-split-qkv", steps=2)
    padding = QKVLayout(8, 4, 8, preset_of("sdpa-headwise")).padding_row_mask()
    for key, update in assemble(run_distributed(train, 1, case, timeout=100)).updates.items():
        assert update.isfinite().all(), key
        assert "linear_qkv.weight" not in key or torch.count_nonzero(update[padding]) == 0


def test_distributed_is_the_same() -> None:
    """Where whole matrices are spread over data-parallel ranks, which needs bf16, each fp32 copy has the split."""
    case = Case(flags=f"{FLAGS} --gate-preset value-headwise --bf16", steps=2)
    spread = Case(flags=f"{case.flags} --use-distributed-optimizer", steps=2)
    for each in (case, spread):
        found = [shapes for rank in run_distributed(splits, 2, each, timeout=100) for shapes in rank]
        assert found == [[2 * 8, 1, 15, 8, 8]] * (4 if each is case else 2)
    expected, actual = (assemble(run_distributed(train, 2, each, timeout=100)).updates for each in (case, spread))
    for key, value in expected.items():
        assert float((actual[key] - value).abs().max()) <= 0.02 * float(value.abs().max()), key
