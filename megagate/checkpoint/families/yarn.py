"""YaRN (Peng et al. 2023, arXiv 2309.00071) as transformers has it in config.json and as Megatron has it in flags."""

import argparse
import math
from collections.abc import Mapping
from typing import Any

from megagate.errors import UserError

YARN: dict[str, str] = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "yarn_correction_range_round_to_int",
}
"""Keys of rope_parameters -> arguments."""

DEFAULTS: dict[str, Any] = {
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "truncate": True,
}
"""Megatron's, where an argument is None, and, but for the first, transformers', where a key is missing."""


def yarn_parameters(args: argparse.Namespace) -> dict[str, Any]:
    """Return rope_parameters for --position-embedding-type yarn."""
    rope = {key: getattr(args, name) for key, name in YARN.items()}
    rope |= {key: value for key, value in DEFAULTS.items() if rope[key] is None}
    kind = {"rope_type": "yarn", "rope_theta": float(args.rotary_base)}
    return kind | rope | {"attention_factor": attention_factor(rope)}


def yarn_arguments(rope: Mapping[str, Any], positions: int) -> dict[str, Any]:
    """Return the arguments for rope_parameters of the type yarn; `positions` is max_position_embeddings.

    Raises:
        UserError: the attention is scaled otherwise than Megatron scales it.
    """
    full = DEFAULTS | {"original_max_position_embeddings": positions}
    full |= {key: rope[key] for key in YARN if rope.get(key) is not None}
    if not full.get("factor"):
        raise UserError("config.json has rope_type 'yarn' without a factor: add it")
    if not (rope.get("mscale") and rope.get("mscale_all_dim")):  # transformers takes both or none
        full |= {"mscale": rope.get("mscale") or 1.0, "mscale_all_dim": 0.0}
    expected, given = attention_factor(full), rope.get("attention_factor")
    if given is not None and not math.isclose(given, expected, rel_tol=1e-6):
        raise UserError(
            f"config.json has attention_factor {given}, but YaRN with these values has {expected}: correct one"
        )
    return {"position_embedding_type": "yarn"} | {name: full[key] for key, name in YARN.items()}


def attention_factor(rope: Mapping[str, Any]) -> float:
    """Return the factor of cosine and sine, 0.1 ln(factor) + 1 (eq. 22, with the m of DeepSeek)."""

    def scale(m: float) -> float:
        return 0.1 * m * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
