"""Attention layers that use the fused gate, in Triton's interpreter.

tests/gate/test_fused.py runs it, as `TRITON_INTERPRET=1 python -m pytest tests/model/in_interpreter.py` does.
"""

import gc
from argparse import Namespace
from collections.abc import Iterator

import pytest
import torch
import triton
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from benchmarks import memory
from benchmarks.memory import CHANNELS, GROUPS, HEADS, HIDDEN, Allocations, held_for_backward
from megagate.gate import PRESETS, GateConfig, describe, fused
from megagate.model.attention import GatedSelfAttention
from megagate.model.pattern import ATTENTION
from megagate.plan.activations import layer_activations
from megagate.plan.layout import Layout
from tests.model import test_attention
from tests.model.test_attention import COMBINATIONS, Layer, assembled, expected_results, layer_results, worst

assert triton.knobs.runtime.interpret

GATES = [gate for gate in (*PRESETS.values(), *COMBINATIONS) if gate.has_gate]
SHARED_CONSTANT = GateConfig(position="sdpa", input="constant", sharing="head-shared")


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Use the kernels as on a GPU; returns the list to which each use of one adds its gate's activation."""
    used: list[str] = []
    apply = fused.FusedGate.apply

    def counted(y: Tensor, logits: Tensor, activation: str, *options: object) -> Tensor:
        used.append(str(activation))
        return apply(y, logits, activation, *options)

    monkeypatch.setattr(fused, "is_available", lambda: True)
    monkeypatch.setattr(fused.FusedGate, "apply", counted)
    monkeypatch.setattr(test_attention, "SEQUENCE", 5)  # the interpreter takes its time
    return used


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("gate", "recompute_gate"),
    [(gate, False) for gate in GATES] + [(gate, True) for gate in GATES[::3]],
    ids=lambda value: describe(value) if isinstance(value, GateConfig) else ["stored", "rebuilt"][value],
)
def test_layer(gate: GateConfig, recompute_gate: bool, launches: list[str]) -> None:
    case = Layer(gate, 2)
    actual = assembled([layer_results(case, 1, torch.float32, recompute_gate)])
    if gate == SHARED_CONSTANT:
        assert not launches
    else:
        # Rebuilding what the next layer has saved is one more; the output gate's product is the layer's result.
        again = recompute_gate and gate.position != "output"
        assert set(launches) == {gate.activation}
        assert len(launches) >= 1 + again
    error, name = worst(actual, expected_results(case))
    assert error <= 1e-5, f"{name} differs by {error:.1e}"


@pytest.mark.parametrize("combine", ["multiply", "add"])
def test_mean_over_heads_of_several_ranks(combine: str, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that takes itself for one of several sums over its group, which has one rank, before the kernel."""
    case = Layer(GateConfig(position="sdpa", sharing="head-shared", combine=combine), 2)
    scores = GatedSelfAttention.scores
    seen = []

    def watched(self: GatedSelfAttention, logits: Tensor) -> Tensor:
        seen.append(logits.shape)
        return scores(self, logits)

    monkeypatch.setattr(GatedSelfAttention, "scores", watched)
    monkeypatch.setattr(GatedSelfAttention, "sums_scores_over_ranks", True)
    actual = assembled([layer_results(case, 1, torch.float32)])
    assert len(seen) == 1
    assert launches == ["identity"]
    error, name = worst(actual, expected_results(case))
    assert error <= 1e-5, f"{name} differs by {error:.1e}"


def planned(preset: str, recompute_gate: bool, ranks: int = 1) -> int:
    """Return the bytes that the plan counts in the layer of `held_for_backward`, on one of tensor-parallel ranks."""
    args = Namespace(
        gate_preset=preset,
        gate_fusion=True,
        gate_precision=None,
        recompute_gate=recompute_gate,
        recompute_granularity=None,
        params_dtype=torch.bfloat16,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS * ranks,
        group_query_attention=True,
        num_query_groups=GROUPS * ranks,
        kv_channels=CHANNELS,
        qk_layernorm=True,
        normalization="RMSNorm",
        position_embedding_type="rope",
        rotary_percent=1.0,
        hidden_dropout=0.0,
    )
    sizes = {
        "world": ranks,
        "tensor": ranks,
        "pipeline": 1,
        "virtual": 1,
        "context": 1,
        "expert": 1,
        "expert_tensor": 1,
    }
    batch = {"sequence": memory.SEQUENCE, "micro_batch": 1, "micro_batches": 1}
    layout = Layout(**sizes, **batch, sequence_parallel=False, instances=1)
    return sum(layer_activations(args, layout, ATTENTION).values())


def test_what_is_kept_is_what_the_plan_counts(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No scores: stored, a layer keeps the gated tensor and its gate logits; rebuilt, the logits alone."""
    held_bytes = Allocations.held_bytes

    def without_garbage(self: Allocations, *others: Tensor) -> int:
        gc.collect()  # the interpreter's closures hold what it was given
        return held_bytes(self, *others)

    monkeypatch.setattr(Allocations, "held_bytes", without_garbage)
    monkeypatch.setattr(memory, "SEQUENCE", 8)
    baseline, of_baseline = held_for_backward(PRESETS["baseline"]), planned("baseline", False)
    for name, gate in PRESETS.items():
        for recompute_gate in (False, True) if gate.has_gate else ():
            held = held_for_backward(gate, recompute_gate) - baseline
            assert held == planned(name, recompute_gate) - of_baseline, (name, recompute_gate)
    product = 2 * memory.SEQUENCE * HEADS * CHANNELS  # bytes of bf16
    gate = PRESETS["sdpa-elementwise"]
    assert held_for_backward(gate, recompute_gate=True) == baseline + product
    assert held_for_backward(gate) == baseline + 2 * product
    assert launches
    monkeypatch.setattr(GatedSelfAttention, "sums_scores_over_ranks", True)  # over its group, which has one rank
    name = "sdpa-elementwise-shared"
    for recompute_gate in (False, True):
        held = held_for_backward(PRESETS[name], recompute_gate) - baseline
        assert held == planned(name, recompute_gate, 2) - planned("baseline", False, 2), recompute_gate


def test_the_flag_turns_it_off(launches: list[str]) -> None:
    from megagate.model.specs import hybrid_stack_spec
    from tests.model.test_attention import layer_config

    case = Layer(PRESETS["sdpa-elementwise"], 2)
    config = layer_config(case, 1, torch.float32)
    for gate_fusion in (True, False):
        stack = hybrid_stack_spec(config, case.gate, gate_fusion=gate_fusion)
        layer = test_attention.build(stack, config)
        layer(torch.randn(3, 1, test_attention.HIDDEN), attention_mask=None)
        assert bool(launches) == gate_fusion
        launches.clear()
