"""Every gate preset's attention layer, forward and backward, against the reference in float64 on the CPU."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import megagate.platform  # noqa: F401  # before Megatron

# isort: split
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagate.gate import PRESETS, GateConfig, QKVLayout
from megagate.gate.functional import AttentionWeights, per_head_rms_norm, reference_attention, rotary_tables
from megagate.gpu_check.machine import Machine
from megagate.gpu_check.result import Row
from megagate.gpu_check.trainer import process_group
from megagate.model.specs import hybrid_stack_spec

HEADS, GROUPS, CHANNELS, HIDDEN, BATCH = 8, 2, 64, 256, 2
EPSILON, ROTARY_BASE = 1e-5, 10_000.0
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
"""The largest error of a tensor over its largest value."""
OWN_PARAMETERS = {
    "gate_constant": "gate_constant",
    "linear_gate.weight": "gate_output",
    "sdpa_norm_weight": "sdpa_norm",
}
"""Parameters that only some gates have -> their field of the reference's weights."""


def presets(machine: Machine) -> Iterator[Row]:
    """Yield for each preset, backend and dtype the largest error of the result or a gradient."""
    sequence = 256 if machine.is_cuda else 16
    cases = [("local", dtype) for dtype in TOLERANCES]
    if machine.is_cuda and HAVE_TE:
        cases.append(("transformer_engine", torch.bfloat16))  # its matrix products of fp32 are done in TF32
    with process_group(machine):
        for name, gate in PRESETS.items():
            for backend, dtype in cases:
                error, where = layer_error(gate, dtype, sequence, backend)
                which = f"{name}, {str(dtype).removeprefix('torch.')}{', TE' if backend != 'local' else ''}"
                yield Row(which, error, "relative", TOLERANCES[dtype], f"in {where}")


def layer_error(gate: GateConfig, dtype: torch.dtype, sequence: int, backend: str = "local") -> tuple[float, str]:
    """Return the largest error of one layer's result and gradients, relative to each tensor's largest value."""
    layer = build(gate, dtype, backend)
    layout = QKVLayout(HEADS, GROUPS, CHANNELS, gate)
    generator = torch.Generator().manual_seed(1)
    weights = random_weights(gate, layout, generator, dtype)
    hidden, outgoing = (_draw((sequence, BATCH, HIDDEN), generator, dtype) for _ in range(2))
    parameters = dict(layer.named_parameters())
    # Where the norm is fused into the projection, its weight is one of the layer's.
    norm_weight = _draw((HIDDEN,), generator, dtype) if "linear_qkv.layer_norm_weight" in parameters else None
    with torch.no_grad():
        for name, value in by_parameter(layout, weights, norm_weight).items():
            parameters[name].copy_(value.view(parameters[name].shape))

    x = hidden.to(dtype=dtype, device=parameters["linear_qkv.weight"].device).requires_grad_()
    result, _ = layer(x, attention_mask=None, rotary_pos_emb=_angles(sequence).to(x.device))
    result.backward(outgoing.to(result))
    actual = {"result": result, "hidden": x.grad} | {name: value.grad for name, value in parameters.items()}

    expected = expected_results(gate, layout, weights, hidden, outgoing, norm_weight)
    errors = {
        name: float((actual[name].detach().cpu().double().view(value.shape) - value).abs().max() / value.abs().max())
        for name, value in expected.items()
    }
    missing = set(actual) - set(expected)
    if missing:
        raise RuntimeError(f"the layer has parameters that nothing is compared with: {', '.join(sorted(missing))}")
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return errors[worst], worst


def build(gate: GateConfig, dtype: torch.dtype, backend: str) -> Any:
    """Return one attention layer, as the trainer's model has it with `--transformer-impl` `backend`."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=CHANNELS,
        normalization="RMSNorm",
        qk_layernorm=True,
        layernorm_epsilon=EPSILON,
        add_bias_linear=False,
        attention_dropout=0.0,
        attention_output_gate=gate.acts_on_sdpa_output,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        transformer_impl=backend,
    )
    spec = hybrid_stack_spec(config, gate).submodules.attention_layer.submodules.self_attention
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return build_module(spec, config=config, layer_number=1, pg_collection=groups)


def random_weights(
    gate: GateConfig, layout: QKVLayout, generator: torch.Generator, dtype: torch.dtype
) -> AttentionWeights:
    """Return random weights in float64 that `dtype` holds exactly."""

    def draw(*shape: int, around: float = 0.0) -> Tensor:
        return _draw(shape, generator, dtype, 0.3 if around else shape[-1] ** -0.5, around)

    gate_rows, width = GROUPS * layout.gate_rows, HEADS * CHANNELS
    return AttentionWeights(
        query=draw(width, HIDDEN),
        gate=draw(gate_rows, HIDDEN) if gate_rows else None,
        key=draw(GROUPS * CHANNELS, HIDDEN),
        value=draw(GROUPS * CHANNELS, HIDDEN),
        output=draw(HIDDEN, width),
        query_norm=draw(CHANNELS, around=1.0),
        key_norm=draw(CHANNELS, around=1.0),
        gate_constant=draw(HEADS, layout.gate_channels) if gate.input == "constant" else None,
        gate_output=draw(HIDDEN, HIDDEN) if gate.position == "output" else None,
        sdpa_norm=draw(HEADS, CHANNELS, around=1.0) if gate.sdpa_output_norm else None,
    )


def by_parameter(layout: QKVLayout, weights: AttentionWeights, norm_weight: Tensor | None) -> dict[str, Tensor]:
    """Return the weights, or their gradients, by the names of the layer's parameters."""
    named = {
        "linear_qkv.weight": layout.merge_weight(weights.query, weights.gate, weights.key, weights.value),
        "linear_proj.weight": weights.output,
        "q_layernorm.weight": weights.query_norm,
        "k_layernorm.weight": weights.key_norm,
        "linear_qkv.layer_norm_weight": norm_weight,
    }
    named |= {name: getattr(weights, field) for name, field in OWN_PARAMETERS.items()}
    return {name: value for name, value in named.items() if value is not None}


def expected_results(
    gate: GateConfig,
    layout: QKVLayout,
    weights: AttentionWeights,
    hidden: Tensor,
    outgoing: Tensor,
    norm_weight: Tensor | None,
) -> dict[str, Tensor]:
    """Return the reference's result and gradients by name, in float64."""
    leaves = {
        field.name: None if value is None else value.clone().requires_grad_()
        for field in dataclasses.fields(weights)
        for value in [getattr(weights, field.name)]
    }
    x = hidden.clone().requires_grad_()
    norm = None if norm_weight is None else norm_weight.clone().requires_grad_()
    result = reference_attention(
        x if norm is None else per_head_rms_norm(x, norm, EPSILON),
        AttentionWeights(**leaves),  # type: ignore[arg-type]
        gate,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        rotary=rotary_tables(torch.arange(len(hidden), dtype=torch.float64), CHANNELS, ROTARY_BASE),
        norm_epsilon=EPSILON,
    )
    result.backward(outgoing)
    gradients = {name: None if leaf is None else leaf.grad for name, leaf in leaves.items()}
    named = by_parameter(
        layout,
        AttentionWeights(**gradients),  # type: ignore[arg-type]
        None if norm is None else norm.grad,
    )
    assert x.grad is not None
    return {"result": result.detach(), "hidden": x.grad} | named


def _draw(
    shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, scale: float = 1.0, around: float = 0.0
) -> Tensor:
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + around
    return drawn.to(dtype).double()


def _angles(sequence: int) -> Tensor:
    """Return what Megatron hands to its layers, [s, 1, 1, d]."""
    exponents = torch.arange(0, CHANNELS, 2, dtype=torch.float64) / CHANNELS
    angles = torch.outer(torch.arange(sequence, dtype=torch.float64), ROTARY_BASE**-exponents)
    return torch.cat((angles, angles), dim=-1)[:, None, None, :].float()
