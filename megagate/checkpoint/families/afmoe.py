"""AFMoE (Arcee's Trinity): an elementwise gate in a projection of its own, gate_proj [q d, H]. Known, and refused.

The gate itself would convert, as rows of linear_qkv. But a block of AFMoE normalises what attention and experts have
computed before it is added to the residual stream, for which Megatron's layers have no norm.
"""

import argparse
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

from megagate.checkpoint.families.base import Rule
from megagate.checkpoint.families.settings import Settings
from megagate.errors import UserError


class Afmoe:
    """AfmoeForCausalLM of transformers."""

    name = "afmoe"
    dropped: Mapping[str, str] = {}

    def recognises(self, config: dict[str, Any]) -> bool:
        """Whether a config.json is of this family."""
        return config.get("model_type") == self.name

    def arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        """Refuse the model."""
        Settings(config, self)
        self.refuse()

    def config(self, args: argparse.Namespace) -> dict[str, Any]:
        """Refuse the model."""
        self.refuse()

    def rules(self, args: argparse.Namespace, config: dict[str, Any], names: Collection[str] = ()) -> Iterator[Rule]:
        """Refuse the model."""
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise UserError with the reason."""
        raise UserError(
            "models of the family afmoe normalise the output of attention and experts (post_attention_layernorm and "
            "post_mlp_layernorm), for which Megatron's layers have no norm: they cannot be converted"
        )
