"""Recipes: a YAML file of Megatron's own flag names, turned into command-line tokens.

    # recipe.yaml
    num-layers: 24
    swiglu: true                # a flag without a value
    data-path: [0.7, web, 0.3, code]
    environment:                # set before the processes connect, unless already set
      NCCL_DEBUG: WARN

The tokens stand before the command line's own, so that what is typed wins. Gate flags are one setting: a gate flag on
the command line replaces all gate flags of the recipe. Variables that Python or torch read when they start, such as
OMP_NUM_THREADS, must be set outside.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megagate.errors import UserError, nearest
from megagate.parser import Parser
from megagate.yaml_file import read_yaml

ENVIRONMENT_KEY = "environment"
NOT_IN_A_RECIPE = ("recipe", "omit", "verbose", "dry-run", "world-size", "rank")


def read_recipe(path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a recipe.

    Returns:
        Flag names without the leading dashes -> value, and environment variables.

    Raises:
        UserError: the file is missing, is not YAML, or is not a mapping.
    """
    content = read_yaml(path, "the recipe")
    if not isinstance(content, dict):
        raise UserError(f"the recipe {path} must be a mapping of flag names to values")
    environment = content.pop(ENVIRONMENT_KEY, None) or {}
    if not isinstance(environment, dict):
        raise UserError(f"{ENVIRONMENT_KEY} in the recipe {path} must be a mapping of variable names to values")
    flags: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name in flags:
            raise UserError(f"the recipe {path} has the key {name} twice")
        if name in NOT_IN_A_RECIPE:
            raise UserError(f"{name} in the recipe {path} belongs on the command line")
        flags[name] = value
    empty = [name for name, value in environment.items() if value is None]
    if empty:
        raise UserError(f"the variable {empty[0]} under {ENVIRONMENT_KEY} in the recipe {path} has no value")
    return flags, {str(name): str(value) for name, value in environment.items()}


def recipe_tokens(flags: dict[str, Any], parser: argparse.ArgumentParser, path: str | Path) -> list[str]:
    """Return the command-line tokens of a recipe's flags.

    Args:
        flags: from `read_recipe`.
        parser: knows every flag.
        path: named in messages.

    Raises:
        UserError: a key is no flag, or its value does not fit the flag.
    """
    tokens: list[str] = []
    known = parser._option_string_actions
    for name, value in flags.items():
        flag = f"--{name}"
        action = known.get(flag)
        if action is None:
            names = [option.removeprefix("--") for option in known if option.startswith("--")]
            raise UserError(f"{name!r} in the recipe {path} is no flag{nearest(name, names)}")
        takes_value = action.nargs != 0
        if isinstance(value, bool) and not takes_value:
            negative = f"--no-{name}"
            if value:
                tokens.append(flag)
            elif negative in action.option_strings:  # a flag that has both forms
                tokens.append(negative)
        elif not takes_value:
            raise UserError(
                f"{name} in the recipe {path} is a flag without a value: write true or false, not {value!r}"
            )
        elif value is None or isinstance(value, dict):
            raise UserError(f"{name} in the recipe {path} needs a value, not {value!r}")
        elif isinstance(value, list) and action.nargs is not None:
            tokens += [flag, *map(str, value)]
        else:
            # Megatron's own syntax for lists in one value, as in --moe-layer-freq, allows no spaces.
            tokens.append(f"{flag}={str(value).replace(' ', '') if isinstance(value, list) else value}")
    return tokens


def merge_recipe(argv: Sequence[str], parser: argparse.ArgumentParser, gate_flags: Sequence[str]) -> list[str]:
    """Return `argv` with the tokens of its `--recipe` before it, and set the recipe's environment variables.

    Args:
        argv: the command line without the program's name.
        parser: knows every flag.
        gate_flags: the flags that are one setting.
    """
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe")
    first.add_argument("--omit", nargs="+", default=[])
    chosen, rest = first.parse_known_args(argv)
    if chosen.omit and chosen.recipe is None:
        raise UserError(f"--omit {chosen.omit[0]} needs a --recipe to leave it out of")
    if chosen.recipe is None:
        return list(argv)
    flags, environment = read_recipe(chosen.recipe)
    for name in chosen.omit:
        key = name.removeprefix("--").replace("_", "-")
        if flags.pop(key, None) is None:
            raise UserError(f"--omit {name}: the recipe {chosen.recipe} has no such key{nearest(key, flags)}")
    if any(token.split("=")[0] in gate_flags for token in rest):
        flags = {name: value for name, value in flags.items() if f"--{name}" not in gate_flags}
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    return [*recipe_tokens(flags, parser, chosen.recipe), *argv]
