"""Families of Hugging Face models that are converted from and to Megatron's checkpoints, one module each."""

import argparse
from typing import Any

from megagate.checkpoint.families.afmoe import Afmoe
from megagate.checkpoint.families.base import Family
from megagate.checkpoint.families.megagate import MegagateFamily
from megagate.checkpoint.families.official import Official
from megagate.checkpoint.families.qwen3 import Qwen3, Qwen3Moe
from megagate.checkpoint.families.qwen3_next import Qwen3Next, Qwen35Moe
from megagate.checkpoint.families.step import Step
from megagate.errors import UserError, nearest

FAMILIES: tuple[Family, ...] = (
    Qwen3(),
    Qwen3Moe(),
    Qwen3Next(),
    Qwen35Moe(),
    MegagateFamily(),
    Official(),
    Step(),
    Afmoe(),
)
"""All of them. An export without a model to follow takes the first that can hold it: one that transformers has, else
our own, which comes with its code; other people's code is not ours to write."""


def family_named(name: str) -> Family:
    """Return the family that `--family` names.

    Raises:
        UserError: there is none.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    names = [family.name for family in FAMILIES]
    raise UserError(f"--family {name} is not one of {', '.join(names)}{nearest(name, names)}")


def recognise(config: dict[str, Any], forced: str | None = None) -> Family:
    """Return the family of a config.json.

    Args:
        config: its content.
        forced: the name of a family that the config is to be read as, for one that no family recognises.

    Raises:
        UserError: no family recognises it, or another than the forced one does; names the keys that decide.
    """
    what = f"config.json has model_type {config.get('model_type')!r}"
    if isinstance(config.get("architectures"), list):
        what += f" and architectures {config['architectures']}"
    found = [family for family in FAMILIES if family.recognises(config)]
    if forced is not None:
        chosen = family_named(forced)
        if found and chosen not in found:
            raise UserError(f"{what}, which is the family {found[0].name}: its weights are not those of {forced}")
        return chosen
    if not found:
        names = ", ".join(family.name for family in FAMILIES)
        raise UserError(f"{what}, which is none of the families {names}: name the one to read it as with --family")
    return found[0]


def holding(args: argparse.Namespace, preferred: Family | None = None) -> tuple[Family, dict[str, Any]]:
    """Return a family that can hold the model which `args` describe exactly, and the model's config.json there.

    Args:
        args: complete, as in a checkpoint.
        preferred: tried before the others.

    Raises:
        UserError: none can; gives each one's reason.
    """
    reasons = []
    for family in (*((preferred,) if preferred else ()), *FAMILIES):
        try:
            return family, family.config(args)
        except UserError as error:
            reasons.append(f"{family.name}: {error}")
    raise UserError(f"no family can hold the model ({'; '.join(dict.fromkeys(reasons))})")
