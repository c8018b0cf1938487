"""The spec factory: which modules a hybrid stack is built of, for a gate and a backend."""

import dataclasses
from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megagate.gate.config import GateConfig
from megagate.model.attention import GatedSelfAttention
from megagate.model.backends import TorchBackend, TorchHybridStack
from megagate.model.backends.norm import norm_class
from megagate.model.delta_net import GatedDeltaNet
from megagate.model.router import Router


def hybrid_stack_spec(config: TransformerConfig, gate: GateConfig, *, recompute_gate: bool = False) -> ModuleSpec:
    """Return the spec of a stack whose attention layers have `gate`.

    For the baseline the attention is Megatron's own class, so the model is Megatron's.

    Args:
        config: gives `qk_layernorm`, `num_moe_experts` and `moe_grouped_gemm`; its `attention_output_gate` must be
            `gate.acts_on_sdpa_output`.
        gate: any.
        recompute_gate: rebuild gated tensors in the backward pass instead of storing them.
    """
    backend = TorchBackend()
    norm = backend.layer_norm()
    head_norm = norm if config.qk_layernorm else None
    column_parallel, row_parallel = backend.column_parallel_linear(), backend.row_parallel_linear()

    attention = ModuleSpec(
        module=SelfAttention if gate.is_baseline else GatedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal}
        | ({} if gate.is_baseline else {"gate": gate, "recompute_gate": recompute_gate}),
        submodules=SelfAttentionSubmodules(
            linear_qkv=column_parallel,
            core_attention=backend.core_attention(),
            linear_proj=row_parallel,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    attention_layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm, self_attention=attention, self_attn_bda=get_bias_dropout_add
        ),
    )
    dense_layer = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=norm,
            mlp=partial(
                MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=column_parallel, linear_fc2=row_parallel)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    delta_net = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=column_parallel, out_norm=norm_class(config), out_proj=row_parallel),
    )
    delta_net_layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm, self_attention=delta_net, self_attn_bda=get_bias_dropout_add
        ),
    )
    layers = HybridStackSubmodules(attention_layer=attention_layer, gdn_layer=delta_net_layer, mlp_layer=dense_layer)
    if config.num_moe_experts:
        experts = get_moe_module_spec_for_backend(
            backend=backend, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
        )
        layers.moe_layer = ModuleSpec(
            module=MoETransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=norm,
                mlp=partial(MoELayer, submodules=dataclasses.replace(experts.keywords["submodules"], router=Router)),
                mlp_bda=get_bias_dropout_add,
            ),
        )
    return ModuleSpec(module=TorchHybridStack, submodules=layers)
