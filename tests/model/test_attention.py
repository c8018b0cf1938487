"""The gated attention layer against the reference of `megagate.gate.functional`, whole and sharded over ranks.

Everything is random, norms and biases of the projection too. The layer is the one that the model's spec builds.
"""

import pytest
import torch
from torch import Tensor

from megagate.gate import PRESETS, GateConfig, GateInput, GatePosition, QKVLayout, describe
from megagate.gate.functional import AttentionWeights, reference_attention, rotary_tables
from megagate.model.attention import SHARDED_PARAMETERS
from tests.distributed import run_distributed

HIDDEN, HEADS, CHANNELS, SEQUENCE, BATCH = 24, 8, 8, 12, 2
EPSILON = 1e-3  # large enough to matter
ROTARY_BASE = 100.0
OWN_PARAMETERS = {"gate_constant": "gate_constant", "linear_gate": "gate_output", "sdpa_norm_weight": "sdpa_norm"}
"""Parameters that only some gates have -> their field of the reference's weights."""


def draw(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_weights(layout: QKVLayout) -> AttentionWeights:
    """Return weights that require gradients, in float64."""
    gate = layout.gate
    groups, gate_rows = layout.num_query_groups, layout.num_query_groups * layout.gate_rows
    weights = AttentionWeights(
        query=draw((HEADS * CHANNELS, HIDDEN), 1, 0.3),
        gate=draw((gate_rows, HIDDEN), 2, 0.3) if gate_rows else None,
        key=draw((groups * CHANNELS, HIDDEN), 3, 0.3),
        value=draw((groups * CHANNELS, HIDDEN), 4, 0.3),
        output=draw((HIDDEN, HEADS * CHANNELS), 5, 0.3),
        query_norm=1 + draw((CHANNELS,), 6, 0.3),
        key_norm=1 + draw((CHANNELS,), 7, 0.3),
        gate_constant=draw((HEADS, layout.gate_channels), 10) if gate.input == GateInput.CONSTANT else None,
        gate_output=draw((HIDDEN, HIDDEN), 11, 0.3) if gate.position == GatePosition.OUTPUT else None,
        sdpa_norm=1 + draw((HEADS, CHANNELS), 12, 0.3) if gate.sdpa_output_norm else None,
    )
    for weight in vars(weights).values():
        if weight is not None:
            weight.requires_grad_()
    return weights


def expected_results(gate: GateConfig, groups: int) -> dict[str, Tensor]:
    """Return the reference's output and gradients, named as `layer_results` names them."""
    layout = QKVLayout(HEADS, groups, CHANNELS, gate)
    weights, hidden = random_weights(layout), draw((SEQUENCE, BATCH, HIDDEN), 8).requires_grad_()
    rotary = rotary_tables(torch.arange(SEQUENCE, dtype=torch.float64), CHANNELS, ROTARY_BASE)
    output = reference_attention(
        hidden,
        weights,
        gate,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        rotary=rotary,
        norm_epsilon=EPSILON,
    )
    output.backward(draw(output.shape, 9))
    gradients = [
        None if part is None else part.grad for part in (weights.query, weights.gate, weights.key, weights.value)
    ]
    results = {
        "output": output.detach(),
        "hidden": hidden.grad,
        "linear_qkv": layout.merge_weight(*gradients),
        "linear_proj": weights.output.grad,
        "q_layernorm": weights.query_norm.grad,
        "k_layernorm": weights.key_norm.grad,
    }
    own = {name: getattr(weights, field) for name, field in OWN_PARAMETERS.items()}
    return results | {name: weight.grad for name, weight in own.items() if weight is not None}


def layer_results(
    gate: GateConfig, groups: int, tensor_parallel: int, dtype: torch.dtype, recompute_gate: bool = False
) -> dict[str, Tensor]:
    """Return this rank's output and gradients of the layer, named by parameter."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megagate.model.specs import hybrid_stack_spec

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        kv_channels=CHANNELS,
        normalization="RMSNorm",
        qk_layernorm=True,
        layernorm_epsilon=EPSILON,
        add_bias_linear=False,
        attention_dropout=0.0,
        attention_output_gate=gate.acts_on_sdpa_output,
        tensor_model_parallel_size=tensor_parallel,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
    )
    stack = hybrid_stack_spec(config, gate, recompute_gate=recompute_gate)
    spec = stack.submodules.attention_layer.submodules.self_attention
    collection = ProcessGroupCollection.use_mpu_process_groups()
    layer = build_module(spec, config=config, layer_number=1, pg_collection=collection)

    layout, rank = QKVLayout(HEADS, groups, CHANNELS, gate), torch.distributed.get_rank()
    weights = random_weights(layout)
    merged = layout.merge_weight(weights.query, weights.gate, weights.key, weights.value)
    with torch.no_grad():
        layer.linear_qkv.weight.copy_(merged.chunk(tensor_parallel)[rank])
        layer.linear_proj.weight.copy_(weights.output.chunk(tensor_parallel, dim=1)[rank])
        layer.q_layernorm.weight.copy_(weights.query_norm)
        layer.k_layernorm.weight.copy_(weights.key_norm)
        if gate.position == GatePosition.OUTPUT:
            layer.linear_gate.weight.copy_(weights.gate_output)
        for name in SHARDED_PARAMETERS:
            whole = getattr(weights, OWN_PARAMETERS[name])
            if whole is not None:
                getattr(layer, name).copy_(whole.flatten().chunk(tensor_parallel)[rank])

    hidden = draw((SEQUENCE, BATCH, HIDDEN), 8).to(dtype).requires_grad_()
    exponents = torch.arange(0, CHANNELS, 2, dtype=torch.float64) / CHANNELS
    angles = torch.outer(torch.arange(SEQUENCE, dtype=torch.float64), ROTARY_BASE**-exponents)
    rotary = torch.cat((angles, angles), dim=-1)[:, None, None, :]  # what Megatron hands to its layers
    output, bias = layer(hidden, attention_mask=None, rotary_pos_emb=rotary)
    assert bias is None
    assert output.dtype == dtype
    output.backward(draw(output.shape, 9).to(dtype))
    gradients = {name.split(".")[0]: parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "hidden": hidden.grad} | gradients


def assembled(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
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
            own[name] = torch.cat([result[name] for result in ranks]).view(HEADS, -1)
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
    cases: list[tuple[GateConfig, int]], tensor_parallel: int, dtype: torch.dtype, recompute_gate: bool = False
) -> list[dict[str, Tensor]]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_parallel)
    model_parallel_cuda_manual_seed(1)
    return [layer_results(gate, groups, tensor_parallel, dtype, recompute_gate) for gate, groups in cases]


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
CASES = [(PRESETS[preset], groups) for preset in PRESETS for groups in (1, 2, 8)]
CASES += [(gate, 2) for gate in COMBINATIONS]


@pytest.mark.parametrize("recompute_gate", [False, True], ids=["stored", "rebuilt"])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_layer(tensor_parallel: int, recompute_gate: bool) -> None:
    """Fewer groups than ranks, as many, and more; in float64, so that nothing hides in rounding."""
    cases = [(gate, groups) for gate, groups in CASES if not (recompute_gate and gate.is_baseline)]
    ranks = run_distributed(
        all_layers, tensor_parallel, cases, tensor_parallel, torch.float64, recompute_gate, timeout=100
    )
    for index, (gate, groups) in enumerate(cases):
        actual = assembled([rank[index] for rank in ranks])
        error, name = worst(actual, expected_results(gate, groups))
        assert error <= 1e-12, f"{describe(gate)}, {groups} groups: {name} differs by {error:.1e}"
        padding = QKVLayout(HEADS, groups, CHANNELS, gate).padding_row_mask()
        assert torch.count_nonzero(actual["linear_qkv"][padding]) == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_precision(dtype: torch.dtype, tolerance: float) -> None:
    cases = [(gate, 2) for gate in PRESETS.values()]
    ranks = run_distributed(all_layers, 2, cases, 2, dtype, timeout=60)
    for index, (gate, groups) in enumerate(cases):
        error, name = worst(assembled([rank[index] for rank in ranks]), expected_results(gate, groups))
        assert error <= tolerance, f"{describe(gate)}: {name} differs by {error:.1e}"


def megatron_rotary(channels: int, base: float) -> Tensor:
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    parallel_state.initialize_model_parallel()
    rotary = RotaryEmbedding(channels, rotary_percent=1.0, rotary_base=base, use_cpu_initialization=True)
    angles = rotary(SEQUENCE)
    RotaryEmbedding.forward.cache_clear()
    return angles.detach()


def test_rotary_angles_are_megatrons() -> None:
    angles = run_distributed(megatron_rotary, 1, CHANNELS, ROTARY_BASE, timeout=60)[0][:, 0, 0]
    cos, sin = rotary_tables(torch.arange(SEQUENCE, dtype=torch.float64), CHANNELS, ROTARY_BASE)
    torch.testing.assert_close(angles.double().cos(), cos, rtol=0, atol=1e-5)
    torch.testing.assert_close(angles.double().sin(), sin, rtol=0, atol=1e-5)
