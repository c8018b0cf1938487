"""The model that the benchmarks train, in all its variants, and its training step.

Four blocks, hidden size 256, 8 heads of 32 in 2 groups, 8 experts of width 256 of which a token uses 2, vocabulary
4096, fp32. A step is forward, backward, gradient clipping and AdamW on 2 x 4 x 256 random tokens.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import megagate.platform  # noqa: F401  # before Megatron

# isort: split
import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megagate.gate import GateConfig, QKVLayout, preset
from megagate.gate.config import GatePosition
from megagate.model.backends import functions
from megagate.model.specs import hybrid_stack_spec
from megagate.telemetry.telemetry import Telemetry

BLOCKS, HIDDEN, HEADS, GROUPS, CHANNELS, EXPERTS, TOP_K, WIDTH = 4, 256, 8, 2, 32, 8, 2, 256
SEQUENCE, MICRO_BATCH, MICRO_BATCHES, VOCABULARY = 256, 4, 2, 4096
AUXILIARY_COEFFICIENT = 1e-2
TELEMETRY_ROWS = 16  # the trainer's default

MEGATRONS_GATE = "Megatron's own gate"
MEGATRONS_LAYERS = "Megatron's local layers"

Step = Callable[[], None]
Loss = Callable[[Tensor, Tensor], Tensor]
"""From tokens and labels, each [b, s], to the mean loss."""


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Megatron's groups, of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def build(variant: str, auxiliary_coefficient: float = AUXILIARY_COEFFICIENT) -> HybridModel:
    """Return a fresh model.

    `variant` is a preset's name, `MEGATRONS_GATE` (sdpa-elementwise computed by Megatron's own attention) or
    `MEGATRONS_LAYERS` (the baseline with Megatron's norms, attention and experts).
    """
    gate = preset({MEGATRONS_GATE: "sdpa-elementwise", MEGATRONS_LAYERS: "baseline"}.get(variant, variant))
    config = TransformerConfig(
        transformer_impl="local",
        num_layers=2 * BLOCKS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=CHANNELS,
        ffn_hidden_size=WIDTH,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_ffn_hidden_size=WIDTH,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=auxiliary_coefficient,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        is_hybrid_model=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        attention_output_gate=gate.acts_on_sdpa_output,
    )
    spec = hybrid_stack_spec(config, gate)
    if variant == MEGATRONS_GATE:
        attention = spec.submodules.attention_layer.submodules.self_attention
        attention.module = SelfAttention
        for name in ("gate", "recompute_gate", "gate_fusion"):
            del attention.params[name]
    if variant == MEGATRONS_LAYERS:
        use_local_layers(spec)
    return HybridModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        hybrid_layer_pattern="*E" * BLOCKS,
        position_embedding_type="rope",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def use_local_layers(spec: ModuleSpec) -> None:
    """Put Megatron's local norms, attention and experts into the spec, in place; the final norm stays ours."""
    backend = LocalSpecProvider()
    norm = backend.layer_norm(rms_norm=True)
    attention_layer, moe_layer = spec.submodules.attention_layer.submodules, spec.submodules.moe_layer.submodules
    attention = attention_layer.self_attention.submodules
    attention.core_attention = DotProductAttention
    attention.q_layernorm = attention.k_layernorm = attention_layer.input_layernorm = norm
    moe_layer.pre_mlp_layernorm = norm
    submodules = dataclasses.replace(
        moe_layer.mlp.keywords["submodules"], experts=backend.grouped_mlp_modules(moe_use_grouped_gemm=False)
    )
    moe_layer.mlp = partial(moe_layer.mlp.func, submodules=submodules)


def loss_of(model: HybridModel) -> Loss:
    """Return the function that computes a model's mean loss."""
    positions = torch.arange(SEQUENCE).expand(MICRO_BATCH, -1)
    return lambda tokens, labels: model(tokens, positions, None, labels=labels).mean()


def random_batch() -> tuple[Tensor, Tensor]:
    """Return tokens and labels, each [b, s]."""
    tokens = torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def step_of(model: nn.Module, loss: Loss) -> Step:
    """Return a function that takes one optimizer step on random tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            (loss(*random_batch()) / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def observed(step: Step, model: HybridModel, preset_name: str) -> Step:
    """Return the step of a model as the trainer takes it where it logs, with all observers, but without timers."""
    options = argparse.Namespace(
        hybrid_layer_pattern="*E" * BLOCKS,
        gate_preset=preset_name,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        group_query_attention=True,
        num_experts=EXPERTS,
        sequence_parallel=False,
        attention_output_gate=False,
    )
    telemetry = Telemetry(options, [model], rows=TELEMETRY_ROWS)

    def watched() -> None:
        with telemetry.observing():
            step()
        telemetry.findings()

    return watched


def with_megatrons_functions(step: Step) -> Step:
    """Return the step with the functions that `functions` replaces as Megatron has them."""

    def restored() -> None:
        functions.restore()
        try:
            step()
        finally:
            functions.replace()

    return restored


def predicted_overhead(gate: GateConfig) -> float:
    """Return the share of multiplications that the gate's projection adds to the model's, padding rows included.

    Per token and block, with q = heads, g = groups, d = channels, s = sequence, H, V, E, k and F as usual, the model
    multiplies H (2 q + 2 g) d in the projections, q d s in causal attention (half of s keys on average, twice), H E in
    the router and 3 k H F in the experts, and once H V. The gate adds H times its rows of linear_qkv, or H^2 as a
    projection of its own. The backward pass doubles all alike.
    """
    layout = QKVLayout(HEADS, GROUPS, CHANNELS, gate)
    added = HIDDEN * (layout.gate_rows_padded * GROUPS if gate.is_fused else 0)
    if gate.position == GatePosition.OUTPUT:
        added = HIDDEN**2
    projections = HIDDEN * CHANNELS * (2 * HEADS + 2 * GROUPS)
    block = projections + HEADS * CHANNELS * SEQUENCE + HIDDEN * EXPERTS + 3 * TOP_K * HIDDEN * WIDTH
    return BLOCKS * added / (BLOCKS * block + HIDDEN * VOCABULARY)


def megabytes_for_backward(model: HybridModel) -> float:
    """Return what the forward pass of a micro batch keeps for the backward pass, parameters not counted."""
    kept: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)  # else its address could be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model)(*random_batch())
    return sum(kept.values()) / 2**20
