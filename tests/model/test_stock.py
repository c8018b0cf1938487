"""With the gate off the model is Megatron's, and the gate sdpa-elementwise is Megatron's own.

The comparison is with the same HybridModel whose layers are those of Megatron's local spec for GPT: its attention, its
core attention, its norms. These refuse sequence and context parallelism, so plain tensor parallelism is compared.
"""

import functools

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor

from megagate.gate import PRESETS
from tests.distributed import run_distributed
from tests.model.training import Case, Result, assemble, train_all

MODELS = {
    "dense": "--num-layers 2 --ffn-hidden-size 48 --num-query-groups 4",
    "experts": "--num-layers 2 --num-query-groups 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 "
    "--ffn-hidden-size 48 --moe-layer-freq [0,1] --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 "
    "--moe-router-load-balancing-type aux_loss --disable-bias-linear --add-qkv-bias "
    "--untie-embeddings-and-output-weights",
}
TOLERANCE = 1e-6
# Rounding alone reaches 1.3e-6 of the norm of a gradient in fp32: the two core attentions add in another order.
GRADIENT_TOLERANCE = 2e-6


class StockStack(HybridStack):
    """Megatron's stack; its final norm would need Transformer Engine."""

    def __init__(self, *args, post_layer_norm: bool = True, **kwargs) -> None:
        super().__init__(*args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process:
            self.final_norm = WrappedTorchNorm(self.config, self.config.hidden_size, self.config.layernorm_epsilon)


def stock_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of a stack of Megatron's local layers."""

    def submodules(num_experts: int | None) -> TransformerLayerSubmodules:
        return get_gpt_layer_local_submodules(
            num_experts, config.moe_grouped_gemm, config.qk_layernorm, normalization=config.normalization
        )

    def feed_forward(num_experts: int | None) -> TransformerLayerSubmodules:
        whole = submodules(num_experts)
        return TransformerLayerSubmodules(
            pre_mlp_layernorm=whole.pre_mlp_layernorm, mlp=whole.mlp, mlp_bda=whole.mlp_bda
        )

    whole = submodules(None)
    attention = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm,
        self_attention=whole.self_attention,
        self_attn_bda=whole.self_attn_bda,
    )
    layers = HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=feed_forward(None)),
    )
    if config.experimental_attention_variant == "gated_delta_net":
        delta_net = GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=whole.input_layernorm, out_proj=RowParallelLinear
        )
        linear_attention = TransformerLayerSubmodules(
            input_layernorm=whole.input_layernorm,
            self_attention=ModuleSpec(module=GatedDeltaNet, submodules=delta_net),
            self_attn_bda=whole.self_attn_bda,
        )
        layers.gdn_layer = ModuleSpec(module=TransformerLayer, submodules=linear_attention)
    if config.num_moe_experts:
        layers.moe_layer = ModuleSpec(module=MoETransformerLayer, submodules=feed_forward(config.num_moe_experts))
    return ModuleSpec(module=StockStack, submodules=layers)


@functools.cache
def results(preset: str, tensor_parallel: int) -> dict[str, list[Result]]:
    """Return for each model [Megatron's result, ours]."""
    models = [model for model in MODELS if tensor_parallel == 1 or model == "dense"]
    cases = []
    for model in models:
        flags = f"{MODELS[model]} --gate-preset {preset} --micro-batch-size 4"
        # Megatron's own layers need the second flag, which ours do not.
        flags += f" --tensor-model-parallel-size {tensor_parallel} --no-persist-layer-norm"
        cases += [Case(flags=flags, stack_spec=stock_spec), Case(flags=flags)]
    ranks = run_distributed(train_all, tensor_parallel, cases, timeout=100)
    assembled = iter([assemble([rank[index] for rank in ranks]) for index in range(len(cases))])
    return {model: [next(assembled), next(assembled)] for model in models}


def relative_norm(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("preset", ["baseline", "sdpa-elementwise"])
def test_same_parameters_losses_and_gradients(preset: str, tensor_parallel: int) -> None:
    assert preset == "baseline" or PRESETS[preset].has_gate
    for model, (stock, ours) in results(preset, tensor_parallel).items():
        shapes = [{name: value.shape for name, value in result.gradients.items()} for result in (stock, ours)]
        assert shapes[0] == shapes[1]
        assert ours.losses == pytest.approx(stock.losses, rel=TOLERANCE)
        assert ours.grad_norm == pytest.approx(stock.grad_norm, rel=TOLERANCE)
        for name, gradient in stock.gradients.items():
            error = relative_norm(ours.gradients[name], gradient)
            assert error <= GRADIENT_TOLERANCE, f"{model}: the gradient of {name} differs by {error:.1e}"


def test_the_gate_makes_a_difference() -> None:
    """Otherwise the comparison above would not have a gate in it."""
    with_gate, without = results("sdpa-elementwise", 1)["dense"][0], results("baseline", 1)["dense"][0]
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert with_gate.gradients[name].shape[0] - without.gradients[name].shape[0] == 8 * 8
    assert with_gate.losses["lm loss"] != pytest.approx(without.losses["lm loss"], rel=1e-3)
