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
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megagate.gate.config import GateConfig, GatePosition, GatePrecision
from megagate.model.attention import GatedSelfAttention, projects_apart
from megagate.model.backends import BACKENDS
from megagate.model.delta_net import GatedDeltaNet
from megagate.model.router import Router

NORM_NAMES = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("input_layernorm.", "self_attention.in_proj.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
"""A norm's own name, and its name where it is fused with the linear layer that follows."""

OWN_NAMES = {fused: own for own, fused in NORM_NAMES}
"""What a checkpoint of ours calls fused norms, so that one of either backend loads in the other."""


def hybrid_stack_spec(
    config: TransformerConfig,
    gate: GateConfig,
    *,
    recompute_gate: bool = False,
    precision: GatePrecision | None = None,
    gate_fusion: bool = True,
) -> ModuleSpec:
    """Return the spec of a stack whose attention layers have `gate`.

    For the baseline the attention is Megatron's own class, so the model is Megatron's.

    Args:
        config: gives `transformer_impl`, `qk_layernorm`, `num_moe_experts` and `moe_grouped_gemm`; its
            `attention_output_gate` must be `gate.acts_on_sdpa_output`.
        gate: any.
        recompute_gate: rebuild gated tensors in the backward pass instead of storing them.
        precision: of the gate.
        gate_fusion: compute the gate in one kernel where that is possible.
    """
    backend = BACKENDS[config.transformer_impl]()
    norm, row_parallel = backend.layer_norm(), backend.row_parallel_linear()
    head_norm = norm if config.qk_layernorm else None
    # Where a norm is fused with the linear layer after it, the norm before that does nothing.
    apart = (norm, backend.column_parallel_linear())
    fused = (IdentityOp, backend.column_parallel_layer_norm_linear())
    norm_before, linear = fused if backend.fuse_layernorm_and_linear() else apart
    # A gate that reads the normalised input outside of linear_qkv must see it.
    reads_input = gate.position == GatePosition.OUTPUT or projects_apart(config, gate, precision)
    input_norm, linear_qkv = apart if reads_input else (norm_before, linear)

    options = {"gate": gate, "recompute_gate": recompute_gate, "precision": precision, "gate_fusion": gate_fusion}
    attention = ModuleSpec(
        module=SelfAttention if gate.is_baseline else GatedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal} | ({} if gate.is_baseline else options),
        submodules=SelfAttentionSubmodules(
            linear_qkv=linear_qkv,
            core_attention=backend.core_attention(),
            linear_proj=row_parallel,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    attention_layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=input_norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=OWN_NAMES,
        ),
    )
    dense_layer = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=norm_before,
            mlp=partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=linear, linear_fc2=row_parallel)),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=OWN_NAMES,
        ),
    )
    delta_net = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=linear, out_norm=backend.norm_class(config), out_proj=row_parallel),
    )
    delta_net_layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm_before,
            self_attention=delta_net,
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=OWN_NAMES,
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
    return ModuleSpec(module=backend.stack(), submodules=layers)
