"""The gated attention layer against the reference of `megagate.gate.functional`, whole and sharded over ranks.

Everything is random, norms and biases of the projection too. The layer is the one that the model's spec builds.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from megagate.errors import UserError
from megagate.gate import (
    PRESETS,
    SWITCH_HEAD_PRESETS,
    GateActivation,
    GateCombine,
    GateConfig,
    GateGranularity,
    GateInput,
    GatePosition,
    GatePrecision,
    GateSharing,
    QKVLayout,
    describe,
)
from megagate.gate.functional import AttentionWeights, reference_attention, rotary_tables
from megagate.model.attention import SHARDED_PARAMETERS, _activate_and_combine
from tests.distributed import run_distributed

HIDDEN, SEQUENCE, BATCH = 24, 12, 2
EPSILON = 1e-3  # large enough to matter
ROTARY_BASE = 100.0
OWN_PARAMETERS = {"gate_constant": "gate_constant", "linear_gate": "gate_output", "sdpa_norm_weight": "sdpa_norm"}
"""Parameters that only some gates have -> their field of the reference's weights."""


@dataclass(frozen=True)
class Layer:
    """A gate, and the shape of the attention that has it."""

    gate: GateConfig
    groups: int
    heads: int = 8
    channels: int = 8

    @property
    def layout(self) -> QKVLayout:
        return QKVLayout(self.heads, self.groups, self.channels, self.gate)

    def __str__(self) -> str:
        return f"{describe(self.gate)}, {self.heads} heads of {self.channels} in {self.groups} groups"


def draw(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_weights(case: Layer) -> AttentionWeights:
    """Return weights that require gradients, in float64."""
    gate, heads, channels = case.gate, case.heads, case.channels
    groups, gate_rows = case.groups, case.groups * case.layout.gate_rows
    weights = AttentionWeights(
        query=draw((heads * channels, HIDDEN), 1, 0.3),
        gate=draw((gate_rows, HIDDEN), 2, 0.3) if gate_rows else None,
        key=draw((groups * gate.key_experts * channels, HIDDEN), 3, 0.3),
        value=draw((groups * gate.value_experts * channels, HIDDEN), 4, 0.3),
        output=draw((HIDDEN, heads * channels), 5, 0.3),
        query_norm=1 + draw((channels,), 6, 0.3),
        key_norm=1 + draw((channels,), 7, 0.3),
        gate_constant=draw((heads, case.layout.gate_channels), 10) if gate.input == GateInput.CONSTANT else None,
        gate_output=draw((HIDDEN, HIDDEN), 11, 0.3) if gate.position == GatePosition.OUTPUT else None,
        sdpa_norm=1 + draw((heads, channels), 12, 0.3) if gate.sdpa_output_norm else None,
    )
    for weight in vars(weights).values():
        if weight is not None:
            weight.requires_grad_()
    return weights


def expected_results(case: Layer) -> dict[str, Tensor]:
    """Return the reference's output and gradients, named as `layer_results` names them."""
    weights, hidden = random_weights(case), draw((SEQUENCE, BATCH, HIDDEN), 8).requires_grad_()
    output = reference_attention(
        hidden,
        weights,
        case.gate,
        num_attention_heads=case.heads,
        num_query_groups=case.groups,
        rotary=rotary_tables(torch.arange(SEQUENCE, dtype=torch.float64), case.channels, ROTARY_BASE),
        norm_epsilon=EPSILON,
    )
    output.backward(draw(output.shape, 9))
    gradients = [
        None if part is None else part.grad for part in (weights.query, weights.gate, weights.key, weights.value)
    ]
    results = {
        "output": output.detach(),
        "hidden": hidden.grad,
        "linear_qkv": case.layout.merge_weight(*gradients),
        "linear_proj": weights.output.grad,
        "q_layernorm": weights.query_norm.grad,
        "k_layernorm": weights.key_norm.grad,
    }
    own = {name: getattr(weights, field) for name, field in OWN_PARAMETERS.items()}
    return results | {name: weight.grad for name, weight in own.items() if weight is not None}


def layer_config(case: Layer, tensor_parallel: int, dtype: torch.dtype, sequence_parallel: bool = False) -> Any:
    """Return Megatron's configuration of a layer."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=case.heads,
        num_query_groups=case.groups,
        kv_channels=case.channels,
        normalization="RMSNorm",
        qk_layernorm=True,
        layernorm_epsilon=EPSILON,
        add_bias_linear=False,
        attention_dropout=0.0,
        attention_output_gate=case.gate.acts_on_sdpa_output,
        tensor_model_parallel_size=tensor_parallel,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        transformer_impl="local",
        sequence_parallel=sequence_parallel,
    )


def build(stack: Any, config: Any) -> Any:
    """Return the attention layer of a stack's spec."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    spec = stack.submodules.attention_layer.submodules.self_attention
    collection = ProcessGroupCollection.use_mpu_process_groups()
    return build_module(spec, config=config, layer_number=1, pg_collection=collection)


def layer_results(
    case: Layer,
    tensor_parallel: int,
    dtype: torch.dtype,
    recompute_gate: bool = False,
    precision: GatePrecision | None = None,
    sequence_parallel: bool = False,
) -> dict[str, Tensor]:
    """Return this rank's output and gradients of the layer, named by parameter.

    With `precision`, linear_qkv gets the gate's columns wrong by far, as an FP8 product gets them a little wrong.
    """
    from megagate.model.specs import hybrid_stack_spec

    config = layer_config(case, tensor_parallel, dtype, sequence_parallel)
    config.fp8 = None if precision is None else "hybrid"
    layer = build(hybrid_stack_spec(config, case.gate, recompute_gate=recompute_gate, precision=precision), config)

    if precision is not None and case.gate.is_fused:
        wrong = 1 + 7 * layer.local_rows(case.layout.gate_row_mask())
        layer.linear_qkv.register_forward_hook(lambda module, inputs, result: (result[0] * wrong, result[1]))

    weights, rank = random_weights(case), torch.distributed.get_rank()
    merged = case.layout.merge_weight(weights.query, weights.gate, weights.key, weights.value)
    with torch.no_grad():
        layer.linear_qkv.weight.copy_(merged.chunk(tensor_parallel)[rank])
        layer.linear_proj.weight.copy_(weights.output.chunk(tensor_parallel, dim=1)[rank])
        layer.q_layernorm.weight.copy_(weights.query_norm)
        layer.k_layernorm.weight.copy_(weights.key_norm)
        if case.gate.position == GatePosition.OUTPUT:
            layer.linear_gate.weight.copy_(weights.gate_output)
        for name in SHARDED_PARAMETERS:
            whole = getattr(weights, OWN_PARAMETERS[name])
            if whole is not None:
                getattr(layer, name).copy_(whole.flatten().chunk(tensor_parallel)[rank])

    def part(whole: Tensor) -> Tensor:
        return whole.chunk(tensor_parallel)[rank] if sequence_parallel else whole

    def joined(part: Tensor) -> Tensor:
        return torch.cat(everywhere(part, tensor_parallel)) if sequence_parallel else part

    hidden = part(draw((SEQUENCE, BATCH, HIDDEN), 8).to(dtype)).requires_grad_()
    exponents = torch.arange(0, case.channels, 2, dtype=torch.float64) / case.channels
    angles = torch.outer(torch.arange(SEQUENCE, dtype=torch.float64), ROTARY_BASE**-exponents)
    rotary = torch.cat((angles, angles), dim=-1)[:, None, None, :]  # what Megatron hands to its layers
    output, bias = layer(hidden, attention_mask=None, rotary_pos_emb=rotary)
    assert bias is None
    assert output.dtype == dtype
    output.backward(part(draw((SEQUENCE, BATCH, HIDDEN), 9).to(dtype)))
    gradients = {name.split(".")[0]: parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": joined(output.detach()), "hidden": joined(hidden.grad)} | gradients


def everywhere(tensor: Tensor, ranks: int) -> list[Tensor]:
    """Return what each rank holds."""
    held = [torch.empty_like(tensor) for _ in range(ranks)]
    torch.distributed.all_gather(held, tensor.contiguous())
    return held


def assembled(ranks: list[dict[str, Tensor]], heads: int = 8) -> dict[str, Tensor]:
    """Join the ranks' shards; head norms see a rank's own heads only, so their gradients are parts of a sum."""
    for result in ranks[1:]:
        assert torch.equal(result["output"], ranks[0]["output"])
        assert torch.equal(result["hidden"], ranks[0]["hidden"])
        if "linear_gate" in result:
            assert torch.equal(result["linear_gate"], ranks[0]["linear_gate"])
    own = {}
    if "linear_gate" in ranks[0]:
        own["linear_gate"] = ranks[0]["linear_gate"]
    for name in SHARDED_PARAMETERS:
        if name in ranks[0]:
            own[name] = torch.cat([result[name] for result in ranks]).view(heads, -1)
    return own | {
        "output": ranks[0]["output"],
        "hidden": ranks[0]["hidden"],
        "linear_qkv": torch.cat([result["linear_qkv"] for result in ranks]),
        "linear_proj": torch.cat([result["linear_proj"] for result in ranks], dim=1),
        "q_layernorm": sum(result["q_layernorm"] for result in ranks),
        "k_layernorm": sum(result["k_layernorm"] for result in ranks),
    }


def worst(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest error over the largest value, and where."""
    assert actual.keys() == expected.keys()
    return max(
        (float((actual[name].double() - value).abs().max() / value.abs().max()), name)
        for name, value in expected.items()
    )


def all_layers(
    cases: list[Layer], tensor_parallel: int, dtype: torch.dtype, *settings: object
) -> list[dict[str, Tensor]]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_parallel)
    model_parallel_cuda_manual_seed(1)
    return [layer_results(case, tensor_parallel, dtype, *settings) for case in cases]


# Combinations that are no row of the paper's tables: the axes are free.
COMBINATIONS = [
    GateConfig(position="query", granularity="headwise", combine="add", activation="silu"),
    GateConfig(position="key", sharing="head-shared", activation="identity"),
    GateConfig(position="value", granularity="headwise", sharing="head-shared", combine="add"),
    GateConfig(position="sdpa", granularity="headwise", sharing="head-shared", activation="ns-sigmoid"),
    GateConfig(position="sdpa", input="constant", sharing="head-shared"),
    GateConfig(position="sdpa", input="constant", granularity="headwise", combine="add"),
    GateConfig(position="output", combine="add", activation="silu"),
    GateConfig(position="sdpa", granularity="headwise", row_alignment=3),
]
CASES = [Layer(gate, groups) for gate in PRESETS.values() for groups in (1, 2, 8)]
CASES += [Layer(gate, 2) for gate in COMBINATIONS]
CASES += [Layer(gate, groups) for gate in SWITCH_HEAD_PRESETS.values() for groups in (1, 8)]


def compare(
    cases: list[Layer],
    tensor_parallel: int,
    dtype: torch.dtype,
    tolerance: float,
    recompute_gate: bool = False,
    precision: GatePrecision | None = None,
    sequence_parallel: bool = False,
) -> None:
    """Compare the layers' outputs and gradients, put together from the ranks, with the reference's."""
    settings = (recompute_gate, precision, sequence_parallel)
    ranks = run_distributed(all_layers, tensor_parallel, cases, tensor_parallel, dtype, *settings, timeout=100)
    for index, case in enumerate(cases):
        actual = assembled([rank[index] for rank in ranks], case.heads)
        error, name = worst(actual, expected_results(case))
        assert error <= tolerance, f"{case}: {name} differs by {error:.1e}"
        assert torch.count_nonzero(actual["linear_qkv"][case.layout.padding_row_mask()]) == 0


@pytest.mark.parametrize("recompute_gate", [False, True], ids=["stored", "rebuilt"])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_layer(tensor_parallel: int, recompute_gate: bool) -> None:
    """Fewer groups than ranks, as many, and more; in float64, so that nothing hides in rounding."""
    cases = [case for case in CASES if not (recompute_gate and case.gate.is_baseline)]
    compare(cases, tensor_parallel, torch.float64, 1e-12, recompute_gate=recompute_gate)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_precision(dtype: torch.dtype, tolerance: float) -> None:
    gates = [*PRESETS.values(), SWITCH_HEAD_PRESETS["switch-head-v-4-top-4"]]
    compare([Layer(gate, 2) for gate in gates], 2, dtype, tolerance)


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_a_projection_outside_of_fp8(tensor_parallel: int) -> None:
    """It is the same gate, with the same gradients, though linear_qkv computes other logits."""
    cases = [Layer(gate, 2) for gate in (*PRESETS.values(), *COMBINATIONS) if gate.is_fused]
    compare(cases, tensor_parallel, torch.float64, 1e-12, precision=GatePrecision.FP32)
    if tensor_parallel > 1:
        compare(cases, tensor_parallel, torch.float64, 1e-12, precision=GatePrecision.FP32, sequence_parallel=True)
    with pytest.raises(AssertionError, match="differs by"):
        compare(cases[:1], tensor_parallel, torch.float64, 1e-3, precision=GatePrecision.FP8)


def test_activation_and_product_in_bf16() -> None:
    """Asked for, they are; unasked, they are in fp32 and nearer to the truth."""
    gate = PRESETS["sdpa-elementwise"]
    y, logits = draw((64, 2, 8, 8), 13), draw((64, 2, 8, 8), 14)
    truth = y * torch.sigmoid(logits)
    y, logits = y.bfloat16(), logits.bfloat16()
    narrow, wide = (_activate_and_combine(y, logits, gate, in_own_dtype) for in_own_dtype in (True, False))
    assert narrow.dtype == wide.dtype == torch.bfloat16
    assert torch.equal(narrow, y * torch.sigmoid(logits))
    assert torch.equal(wide, (y.float() * torch.sigmoid(logits.float())).bfloat16())
    assert (narrow - truth).square().mean() > (wide - truth).square().mean()
    compare([Layer(preset, 2) for preset in PRESETS.values()], 2, torch.bfloat16, 3e-2, precision=GatePrecision.BF16)


def gates() -> st.SearchStrategy[GateConfig]:
    """Every gate that GateConfig allows, with any padding."""

    def build(**axes: object) -> GateConfig:
        try:
            return GateConfig(**axes)
        except UserError:
            reject()

    axes = {
        "position": st.sampled_from(list(GatePosition)),
        "granularity": st.sampled_from(list(GateGranularity)),
        "sharing": st.sampled_from(list(GateSharing)),
        "combine": st.sampled_from(list(GateCombine)),
        "activation": st.sampled_from(list(GateActivation)),
        "input": st.sampled_from(list(GateInput)),
        "row_alignment": st.sampled_from([4, 8, 12]),
    }
    return st.one_of(st.builds(build, **axes), st.sampled_from(list(PRESETS.values())))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    gate=gates(),
    tensor_parallel=st.sampled_from([1, 2, 4]),
    groups=st.sampled_from([1, 2, 4]),
    heads_per_group=st.integers(1, 4),
    channels=st.sampled_from([2, 4, 6]),
)
def test_any_gate_and_shape(
    gate: GateConfig, tensor_parallel: int, groups: int, heads_per_group: int, channels: int
) -> None:
    heads = groups * heads_per_group
    assume(heads % tensor_parallel == 0)
    case = Layer(gate, groups, heads, channels)
    assume(case.layout.total_rows % tensor_parallel == 0)
    compare([case], tensor_parallel, torch.float64, 1e-12)


def megatron_rotary(channels: int, base: float) -> Tensor:
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    parallel_state.initialize_model_parallel()
    rotary = RotaryEmbedding(channels, rotary_percent=1.0, rotary_base=base, use_cpu_initialization=True)
    angles = rotary(SEQUENCE)
    RotaryEmbedding.forward.cache_clear()
    return angles.detach()


def test_rotary_angles_are_megatrons() -> None:
    angles = run_distributed(megatron_rotary, 1, 8, ROTARY_BASE, timeout=60)[0][:, 0, 0]
    cos, sin = rotary_tables(torch.arange(SEQUENCE, dtype=torch.float64), 8, ROTARY_BASE)
    torch.testing.assert_close(angles.double().cos(), cos, rtol=0, atol=1e-5)
    torch.testing.assert_close(angles.double().sin(), sin, rtol=0, atol=1e-5)
