"""Which numbers are the gate's, and the initial values that flags give them, on every layout."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megagate.gate import PRESETS, QKVLayout
from tests.distributed import run_distributed
from tests.model.training import Case, Piece, build, copies, join

HEADS, GROUPS, CHANNELS, HIDDEN, LAYERS = 8, 2, 8, 32, 2
FLAGS = f"--num-layers {LAYERS} --num-query-groups {GROUPS} --add-qkv-bias --disable-bias-linear --micro-batch-size 1"
LAYOUTS = {
    "one": (1, ""),
    "TP2+SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "TP4": (4, "--tensor-model-parallel-size 4"),  # two ranks share a group
    "PP2": (2, "--pipeline-model-parallel-size 2"),
}
GATED = [name for name, gate in PRESETS.items() if gate.has_gate]


def marks(flags: list[str]) -> list[list[Piece]]:
    """Return for several models 1 where a parameter is the gate's, and 0 elsewhere."""
    from megagate.model.gate_parameters import gate_elements

    results = []
    for each in flags:
        model = build(Case(flags=each))[0]
        for chunk in model:
            for parameter in chunk.parameters():
                parameter.data.zero_()
        for parameter, parts in gate_elements(model):
            for part in parts:
                parameter.data.view(-1)[part] += 1
        results.append(copies(model))
    return results


def initial(flags: list[str], on_device: bool = False) -> list[list[Piece]]:
    """Return several models as the trainer starts them; `on_device` as Megatron draws them where there is a GPU."""
    from unittest import mock

    from megagate.model import builder

    by_name = builder.initialize_by_name if not on_device else lambda model, seed: model
    with mock.patch.object(builder, "initialize_by_name", by_name):
        return [copies(build(Case(flags=each, initial=True))[0]) for each in flags]


def joined(function: Any, layout: str, flags: list[str], **options: Any) -> list[dict[str, Tensor]]:
    ranks, layout_flags = LAYOUTS[layout]
    each = [f"{FLAGS} {layout_flags} {flag}" for flag in flags]
    results = run_distributed(function, ranks, each, timeout=100, **options)
    return [join([piece for rank in results for piece in rank[index]]) for index in range(len(flags))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gates_numbers(layout: str) -> None:
    for name, marked in zip(GATED, joined(marks, layout, [f"--gate-preset {name}" for name in GATED]), strict=True):
        gate = PRESETS[name]
        rows = QKVLayout(HEADS, GROUPS, CHANNELS, gate).gate_row_mask().float()
        total = sum(int(value.sum()) for key, value in marked.items() if not key.endswith("bias"))
        assert total == LAYERS * gate.added_parameters(HIDDEN, HEADS, GROUPS, CHANNELS), name
        for key, value in marked.items():
            if "linear_qkv" in key:
                expected = rows if value.dim() == 1 else rows[:, None].expand_as(value)
            else:
                expected = torch.full_like(value, float("gate" in key))
            assert torch.equal(value, expected), (name, key)


STD, BIAS = 0.004, -1.5
INITIAL = [
    "--gate-preset sdpa-headwise",
    f"--gate-preset sdpa-headwise --gate-init-std {STD} --gate-init-bias {BIAS}",
    "--gate-preset sdpa-headwise --gate-init-std 0",
    f"--gate-preset value-elementwise --gate-init-std {STD}",
    f"--gate-preset output-elementwise --gate-init-std {STD}",
    f"--gate-preset sdpa-constant --gate-init-bias {BIAS}",
]


@functools.cache
def one_process() -> list[dict[str, Tensor]]:
    return joined(initial, "one", INITIAL)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_initial_values_do_not_depend_on_the_layout(layout: str) -> None:
    for actual, expected in zip(joined(initial, layout, INITIAL), one_process(), strict=True):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(actual[key], value), key


@pytest.mark.parametrize("on_device", [False, True])
def test_initial_values_of_gate_rows(on_device: bool) -> None:
    """The gate's weights have the deviation that was asked for, its biases the value, and nothing else is touched."""
    layout = QKVLayout(HEADS, GROUPS, CHANNELS, PRESETS["sdpa-headwise"])
    gate, padding = layout.gate_row_mask(), layout.padding_row_mask()
    plain, scaled, zero = joined(initial, "one", INITIAL[:3], on_device=on_device)
    drawn = torch.cat([value[gate].flatten() for key, value in scaled.items() if "linear_qkv.weight" in key])
    assert float(drawn.std()) == pytest.approx(STD, rel=4 / (2 * drawn.numel()) ** 0.5)
    for key, value in plain.items():
        if "linear_qkv" not in key:
            assert torch.equal(scaled[key], value), key
            continue
        rest = ~gate
        assert torch.equal(scaled[key][rest], value[rest]) and torch.equal(zero[key][rest], value[rest])
        assert torch.count_nonzero(scaled[key][padding]) == 0
        assert torch.count_nonzero(zero[key][gate]) == 0
        if value.dim() == 1:
            assert (scaled[key][gate] == BIAS).all() and torch.count_nonzero(value) == 0


def test_initial_values_of_other_gates() -> None:
    _, _, _, value, output, constant = one_process()
    mask = QKVLayout(HEADS, GROUPS, CHANNELS, PRESETS["value-elementwise"]).gate_row_mask()
    for key, weight in value.items():
        if "linear_qkv.weight" in key:
            assert float(weight[mask].std()) == pytest.approx(STD, rel=0.1)
            assert float(weight[~mask].std()) == pytest.approx(0.02, rel=0.1)
    gates = [weight for key, weight in output.items() if "linear_gate" in key]
    constants = [vector for key, vector in constant.items() if "gate_constant" in key]
    assert len(gates) == len(constants) == LAYERS
    assert all(float(weight.std()) == pytest.approx(STD, rel=0.1) for weight in gates)
    assert all((vector == BIAS).all() for vector in constants)
