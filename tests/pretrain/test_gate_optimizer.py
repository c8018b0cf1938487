"""Learning rate and weight decay of the gate's own: AdamW as if gate rows were parameters, on every layout."""

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megagate.gate import PRESETS, GateInput, QKVLayout
from tests.distributed import run_distributed
from tests.model.training import Case, Result, assemble, build, train, worst_error

MODEL = (
    "--num-layers 2 --num-query-groups 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 "
    "--moe-router-load-balancing-type none --disable-bias-linear --add-qkv-bias --micro-batch-size 1 "
)
LR, DECAY, EPSILON, STEPS = 1e-2, 0.1, 1e-2, 3  # those of tests.model.training
LR_MULT, WD_MULT = 3.0, 0.25
MULTIPLIERS = f"--gate-lr-mult {LR_MULT} --gate-wd-mult {WD_MULT}"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = {
    "TP2+SP": (2, TENSOR),
    "TP4+SP": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),  # two ranks share a group
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "EP2": (2, "--expert-model-parallel-size 2"),
    "DP2 distributed": (2, "--use-distributed-optimizer"),
    "TP2+SP+EP2+DP2 distributed": (4, f"{TENSOR} --expert-model-parallel-size 2 --use-distributed-optimizer"),
}


def gate_mask(preset: str, key: str, value: Tensor) -> Tensor:
    """Return which numbers of the whole parameter called `key` are the gate's, worked out from the layout of rows."""
    if "linear_qkv" not in key:
        return torch.full_like(value, "gate" in key, dtype=torch.bool)
    rows = QKVLayout(8, 2, 8, PRESETS[preset]).gate_row_mask()
    return rows if value.dim() == 1 else rows[:, None].expand_as(value)


# ---------------------------------------------------------------------------------------------------------------------
# In the ranks


@dataclass
class Steps:
    """What one process saw of the fp32 parameters that its optimizer updates."""

    initial: dict[str, Tensor]
    gradients: list[dict[str, Tensor]]
    final: dict[str, Tensor]


def train_and_watch(case: Case) -> Steps:
    from unittest import mock

    from megatron.training import training

    named: dict[str, torch.nn.Parameter] = {}
    gradients: list[dict[str, Tensor]] = []
    seen: list[dict[str, Tensor]] = []

    def updated() -> dict[str, Tensor]:
        mains = {name: getattr(parameter, "main_param", None) for name, parameter in named.items()}
        return {
            name: (named[name] if main is None else main).detach().clone().view(named[name].shape)
            for name, main in mains.items()
        }

    def watch(*arguments, **options):
        if not seen:
            named.update((name, parameter) for chunk in arguments[2] for name, parameter in chunk.named_parameters())
            seen.append(updated())
        outcome = original(*arguments, **options)
        gradients.append({name: parameter.main_grad.detach().float().clone() for name, parameter in named.items()})
        seen.append(updated())
        return outcome

    original = training.train_step
    with mock.patch.object(training, "train_step", watch):
        train(case)
    return Steps(seen[0], gradients, seen[-1])


def optimizer_facts(flags: str) -> dict[str, object]:
    """Return which gate parameters decay by Megatron's rule, and how many hooks the inner optimizers have."""
    model, optimizer, _ = build(Case(flags=flags))
    names = {id(parameter): name for chunk in model for name, parameter in chunk.named_parameters()}
    parts = optimizer.chained_optimizers
    groups = [group for part in parts for group in part.optimizer.param_groups]
    return {
        "decays": {
            names[id(p)].split("self_attention.")[-1]: group["wd_mult"] for group in groups for p in group["params"]
        },
        "hooks": sum(len(part.optimizer._optimizer_step_pre_hooks) for part in parts),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Tests


PRECISIONS = {"fp32": "", "bf16": "--bf16", "distributed fp32": "--use-distributed-optimizer"}
PRECISIONS["distributed bf16"] = "--bf16 --use-distributed-optimizer"


@pytest.mark.parametrize(
    ("preset", "precision"),
    [
        *(("sdpa-headwise", precision) for precision in PRECISIONS),
        ("value-elementwise", "fp32"),
        ("output-elementwise", "bf16"),
        ("sdpa-constant", "fp32"),
    ],
)
def test_as_adamw_with_groups_split_by_hand(preset: str, precision: str) -> None:
    """The same gradients, and torch's AdamW in float64 on gate and rest as separate parameters."""
    constant = PRESETS[preset].input == GateInput.CONSTANT
    wd_mult = 1.0 if constant else WD_MULT
    flags = f"{MODEL} {PRECISIONS[precision]} --gate-preset {preset} --gate-lr-mult {LR_MULT} --gate-wd-mult {wd_mult}"
    steps = run_distributed(train_and_watch, 1, Case(flags=flags, steps=STEPS), timeout=100)[0]
    assert len(steps.gradients) == STEPS
    gates = 0
    for name, initial in steps.initial.items():
        mask = gate_mask(preset, name, initial)
        decay = DECAY if initial.dim() > 1 else 0.0
        parts = {False: initial[~mask].double().requires_grad_(), True: initial[mask].double().requires_grad_()}
        optimizer = torch.optim.AdamW(
            [
                {"params": [parts[False]], "lr": LR, "weight_decay": decay},
                {"params": [parts[True]], "lr": LR * LR_MULT, "weight_decay": decay * wd_mult},
            ],
            betas=(0.9, 0.999),
            eps=EPSILON,
        )
        for gradient in steps.gradients:
            parts[False].grad, parts[True].grad = gradient[name][~mask].double(), gradient[name][mask].double()
            optimizer.step()
        for is_gate, expected in parts.items():
            where = mask if is_gate else ~mask
            change = expected.detach() - initial[where].double()
            error = steps.final[name][where].double() - expected.detach()
            if change.numel():
                # what is rounded away is of the size of the parameter, in each step
                tolerance = 1e-4 * float(change.abs().max()) + 4 * STEPS * 6e-8 * float(initial.abs().max())
                assert float(error.abs().max()) < tolerance, (name, is_gate)
                gates += is_gate
    assert gates


CASE = Case(flags=f"{MODEL} --gate-preset sdpa-headwise", steps=STEPS)


def updates(case: Case, ranks: int, flags: str) -> Result:
    case = replace(case, flags=f"{case.flags} {flags}")
    return assemble(run_distributed(train, ranks, case, timeout=100))


@functools.cache
def one_process() -> Result:
    return updates(CASE, 1, MULTIPLIERS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_updates_on_every_layout(layout: str) -> None:
    ranks, flags = LAYOUTS[layout]
    error, key = worst_error(updates(CASE, ranks, f"{MULTIPLIERS} {flags}").updates, one_process().updates)
    assert error < 1e-4, key


def test_a_multiplier_makes_a_difference() -> None:
    """Else the comparison of layouts would compare nothing."""
    plain = updates(CASE, 1, "")
    for key, value in one_process().updates.items():
        if "linear_qkv.weight" in key:
            mask = gate_mask("sdpa-headwise", key, value)
            assert float(value[mask].abs().mean()) > 2 * float(plain.updates[key][mask].abs().mean())


def test_the_rest_and_the_grad_norm_are_untouched() -> None:
    """Also where gradients are clipped: bit for bit the step without multipliers."""
    first = Case(flags=f"{MODEL} --gate-preset sdpa-headwise --clip-grad 0.01")
    plain, scaled = updates(first, 1, ""), updates(first, 1, MULTIPLIERS)
    assert scaled.grad_norm == plain.grad_norm > 0.02
    for key, value in plain.updates.items():
        mask = gate_mask("sdpa-headwise", key, value)
        assert torch.equal(scaled.updates[key][~mask], value[~mask]), key
        assert not mask.any() or not torch.equal(scaled.updates[key][mask], value[mask]), key


def test_the_learning_rate_with_sgd() -> None:
    """Momentum and decay of SGD do not stand in the way of a learning rate of its own."""
    flags = f"{MODEL} --gate-preset sdpa-headwise --optimizer sgd --gate-lr-mult {LR_MULT}"
    steps = run_distributed(train_and_watch, 1, Case(flags=flags, steps=STEPS), timeout=100)[0]
    for name, initial in steps.initial.items():
        mask = gate_mask("sdpa-headwise", name, initial)
        for where, rate in ((mask, LR * LR_MULT), (~mask, LR)):
            expected = initial[where].double().requires_grad_()
            decay = DECAY if initial.dim() > 1 else 0.0
            optimizer = torch.optim.SGD([expected], lr=rate, momentum=0.9, weight_decay=decay)
            for gradient in steps.gradients:
                expected.grad = gradient[name][where].double()
                optimizer.step()
            assert torch.allclose(steps.final[name][where].double(), expected.detach(), rtol=0, atol=1e-6), name


@pytest.mark.parametrize("preset", ["sdpa-headwise", "value-elementwise", "output-elementwise", "sdpa-constant"])
@pytest.mark.parametrize("layout", ["TP2+SP", "TP2+SP+EP2+DP2 distributed"])
def test_a_frozen_gate_in_bf16(preset: str, layout: str) -> None:
    """With the factor 0 every number of the gate keeps its bits, and the others change: none is taken for another."""
    ranks, flags = LAYOUTS[layout]
    case = Case(flags=f"{MODEL} --gate-preset {preset} --bf16", steps=2)
    result = updates(case, ranks, f"--gate-lr-mult 0 {flags}")
    frozen = 0
    for key, value in result.updates.items():
        mask = gate_mask(preset, key, value)
        assert torch.count_nonzero(value[mask]) == 0, key
        frozen += int(mask.sum())
        padding = QKVLayout(8, 2, 8, PRESETS[preset]).padding_row_mask()
        rest = (
            value[~mask & ~(padding if value.dim() == 1 else padding[:, None])] if "linear_qkv" in key else value[~mask]
        )
        if value.dim() > 1 and rest.numel():
            assert (rest != 0).float().mean() > 0.5, key
    assert frozen


@pytest.mark.parametrize("preset", ["sdpa-headwise", "output-elementwise", "sdpa-constant", "sdpa-rmsnorm"])
def test_which_gate_parameters_decay(preset: str) -> None:
    """Matrices do; vectors (constant gate, norm of the baseline, biases) do not, by Megatron's rule. No hooks without
    multipliers."""
    facts = run_distributed(optimizer_facts, 1, f"{MODEL} --gate-preset {preset}", timeout=100)[0]
    decays = facts["decays"]
    assert decays["linear_qkv.weight"] == 1 and decays["linear_qkv.bias"] == 0
    own = {name: decays[name] for name in decays if "gate" in name or "sdpa_norm" in name}
    expected = {"output-elementwise": {"linear_gate.weight": 1.0}, "sdpa-constant": {"gate_constant": 0.0}}
    assert own == expected.get(preset, {"sdpa_norm_weight": 0.0} if preset == "sdpa-rmsnorm" else {})
    assert facts["hooks"] == 0


def test_hooks_where_there_are_gates() -> None:
    """The experts' optimizer has none."""
    facts = run_distributed(optimizer_facts, 1, f"{MODEL} --gate-preset sdpa-headwise {MULTIPLIERS}", timeout=100)[0]
    assert facts["hooks"] == 1
