"""The official repository's model in plain torch, from what is known of it: no code of theirs, no Megatron.

A dense decoder with RMSNorm, SwiGLU, full rotary embedding, and norms of queries and keys if `use_qk_norm`. The block
of a KV group in q_proj has the group's r query heads and then their gate: r d rows if it is elementwise, r if headwise.
Written by group and head, so that nothing here resembles the reshapes that it is to check.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def official_config(**changes: Any) -> dict[str, Any]:
    """Return a config.json with the official repository's keys."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-3,
        "rope_theta": 1000.0,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "qkv_bias": False,
        "headwise_attn_output_gate": False,
        "elementwise_attn_output_gate": False,
        **changes,
    }


class Reference(nn.Module):
    """The model of a config; its parameters are called as in its checkpoints."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        hidden, heads, groups, channels = (
            config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        )
        self.gate_rows = (
            channels if config["elementwise_attn_output_gate"] else int(config["headwise_attn_output_gate"])
        )
        shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
        if not config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (config["vocab_size"], hidden)
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
            shapes[f"{prefix}self_attn.q_proj.weight"] = (heads * (channels + self.gate_rows), hidden)
            shapes |= {f"{prefix}self_attn.{name}_proj.weight": (groups * channels, hidden) for name in "kv"}
            shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, heads * channels)
            if config["use_qk_norm"]:
                shapes |= {f"{prefix}self_attn.{name}_norm.weight": (channels,) for name in "qk"}
            shapes |= {
                f"{prefix}mlp.{name}_proj.weight": (config["intermediate_size"], hidden) for name in ("gate", "up")
            }
            shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, config["intermediate_size"])
        self.weights = {name: torch.zeros(shape) for name, shape in shapes.items()}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the tensors."""
        return self.weights

    def on_disk(self) -> dict[str, Tensor]:
        """Return the tensors as they are on disk."""
        return self.weights

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Return x / rms(x) * w."""
        return functional.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [b, s, v] of tokens [b, s]."""
        weights = self.weights
        x = weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            x = x + self.attention(self.norm(x, f"{prefix}input_layernorm"), f"{prefix}self_attn.")
            y = self.norm(x, f"{prefix}post_attention_layernorm")
            gate, up = (y @ weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (functional.silu(gate) * up) @ weights[f"{prefix}mlp.down_proj.weight"].T
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        return self.norm(x, "model.norm") @ head.T

    def attention(self, x: Tensor, prefix: str) -> Tensor:
        """Return the output of the attention on x [b, s, H]."""
        config, weights = self.config, self.weights
        channels, groups = config["head_dim"], config["num_key_value_heads"]
        per_group = config["num_attention_heads"] // groups
        outputs = []
        for group in range(groups):
            rows = weights[f"{prefix}q_proj.weight"].chunk(groups)[group]
            key = x @ weights[f"{prefix}k_proj.weight"].chunk(groups)[group].T
            value = x @ weights[f"{prefix}v_proj.weight"].chunk(groups)[group].T
            for head in range(per_group):
                query = x @ rows[head * channels : (head + 1) * channels].T
                output = self.attend(query, key, value, prefix)
                if self.gate_rows:
                    start = per_group * channels + head * self.gate_rows
                    output = output * torch.sigmoid(x @ rows[start : start + self.gate_rows].T)
                outputs.append(output)
        return torch.cat(outputs, dim=-1) @ weights[f"{prefix}o_proj.weight"].T

    def attend(self, query: Tensor, key: Tensor, value: Tensor, prefix: str) -> Tensor:
        """Return the causal attention of one head, all [b, s, d]."""
        if self.config["use_qk_norm"]:
            query, key = self.norm(query, f"{prefix}q_norm"), self.norm(key, f"{prefix}k_norm")
        scores = self.turn(query) @ self.turn(key).transpose(1, 2) / query.shape[-1] ** 0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -torch.inf).softmax(-1) @ value

    def turn(self, x: Tensor) -> Tensor:
        """Turn the channel pairs (i, i + d/2) of x [b, s, d] by position * theta^(-2i/d), as complex numbers."""
        half = x.shape[-1] // 2
        angles = torch.outer(torch.arange(x.shape[1]), self.config["rope_theta"] ** -(torch.arange(half) / half))
        turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1)
