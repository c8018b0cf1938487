"""The models of the paper's authors (qiuzh20/gated_attention): dense Qwen3 with the gate's rows in q_proj.

They are of model_type qwen2 or qwen3, and have keys of their own. q_proj falls into one block for each KV group: first
the queries of its r heads, then their gate, d rows a head where it is elementwise and one where it is headwise. The
elementwise q_proj has the shape of Qwen3-Next's, which has the queries and the gate of one head after those of another.
"""

import argparse
from typing import Any

from megagate.checkpoint.families.qwen3 import Qwen3, check_no_delta_net
from megagate.checkpoint.families.settings import ANY, GATE_KEYS, Settings, check_gate, check_plain
from megagate.errors import UserError
from megagate.gate.config import PRESETS, GateGranularity, gate_config_from_args
from megagate.gate.layout import query_groups


class Official(Qwen3):
    """Qwen3ForCausalLM of the official repository.

    transformers has no such class, so an export needs that repository's modeling file beside it, unless it is a
    baseline.
    """

    name = "official"
    model_types = ("qwen2", "qwen3")

    def recognises(self, config: dict[str, Any]) -> bool:
        """Whether a config.json is of this family."""
        return config.get("model_type") in self.model_types and any(key in config for key in GATE_KEYS)

    def arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the model's arguments; see `Family`."""
        settings = Settings(config, self)
        settings.require("qkv_bias", False, "but the bias that o_proj then has too cannot be represented")
        headwise, elementwise = (settings.get(key, False) for key in GATE_KEYS)
        if headwise and elementwise:
            raise UserError(f"config.json has both {' and '.join(GATE_KEYS)}: set the one to false that is not so")
        gate = "sdpa-headwise" if headwise else "sdpa-elementwise" if elementwise else "baseline"
        return {
            **super().arguments(config),
            "qk_layernorm": settings.get("use_qk_norm", True),
            "gate_preset": gate,
        }

    def head_dim(self, settings: Settings) -> int:
        """Return d."""
        derived = settings.get("hidden_size") // settings.get("num_attention_heads")
        return settings.get("head_dim", derived if settings.config["model_type"] == "qwen2" else 128)

    def config(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the config.json of the model; see `Family`."""
        gate = gate_config_from_args(args)
        return {
            **super().config(args),
            "use_qk_norm": args.qk_layernorm,
            "qkv_bias": False,
            "headwise_attn_output_gate": gate.has_gate and gate.granularity == GateGranularity.HEADWISE,
            "elementwise_attn_output_gate": gate.has_gate and gate.granularity == GateGranularity.ELEMENTWISE,
        }

    def check(self, args: argparse.Namespace) -> None:
        """Raise UserError for a model that the family cannot hold."""
        check_plain(args, self.name, {"num_experts": None, "qk_layernorm": ANY})
        check_gate(args, self.name, PRESETS["baseline"], PRESETS["sdpa-elementwise"], PRESETS["sdpa-headwise"])
        check_no_delta_net(args, self.name)

    def gate_blocks(self, args: argparse.Namespace) -> int:
        """Return into how many blocks of queries and their gate q_proj falls; 0 without a gate."""
        return query_groups(args) if gate_config_from_args(args).has_gate else 0
