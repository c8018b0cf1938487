"""Step-3.5's layers, as transformers has them in its later model, with the names that the released files have."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

CONFIG = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_attention_groups": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "rope_theta": [1000.0, 1000.0],
    "partial_rotary_factors": [0.5, 0.5],
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": 512,
    "att_impl_type": "GQA",
    "use_head_wise_attn_gate": True,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 24,
    "share_expert_dim": 16,
    "moe_layers_enum": "1",
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 1.5,
    "norm_expert_weight": True,
    "use_moe_router_bias": True,
    "swiglu_limits": [0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0],
}
OTHER_NAMES = {"num_attention_groups": "num_key_value_heads", "moe_num_experts": "n_routed_experts"}
OTHER_NAMES |= {"moe_top_k": "num_experts_per_tok"}


class Reference(nn.Module):
    """The text model with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIG
        settings = {OTHER_NAMES.get(key, key): value for key, value in CONFIG.items()}
        self.model = Step3p7TextModel(Step3p7TextConfig(**settings))
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [b, s, v] of tokens [b, s]."""
        return self.lm_head(self.model(tokens).last_hidden_state)

    def on_disk(self) -> dict[str, Tensor]:
        """Return the tensors as the released files have them."""
        tensors: dict[str, Any] = {}
        for name, value in self.state_dict().items():
            name = name.replace("mlp.shared_experts.", "share_expert.")
            if name.endswith("experts.gate_up_proj"):
                parts = torch.chunk(value, 2, dim=1)
                prefix = name.replace("mlp.experts.gate_up_proj", "moe.")
                tensors |= {
                    f"{prefix}{part}_proj.weight": half for part, half in zip(("gate", "up"), parts, strict=True)
                }
                continue
            name = name.replace("mlp.experts.down_proj", "moe.down_proj.weight")
            name = name.replace("mlp.gate.e_score_correction_bias", "moe.router_bias")
            tensors[name.replace("mlp.gate.weight", "moe.gate.weight")] = value
        return tensors
