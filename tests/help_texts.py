"""Megatron's flags without the price of their help: each class of arguments is read once in a process.

Megatron parses its own source for the help of a flag whenever it makes a parser, which takes longer than a training
step.
"""

import functools
import sys


def remember() -> None:
    """Keep what Megatron has read, from now on, if its parser is imported."""
    module = sys.modules.get("megatron.training.argument_utils")
    if module is None:
        return
    read = module.ArgumentGroupFactory._get_field_docstrings
    if hasattr(read, "__wrapped__"):
        return
    kept: dict[type, dict[str, str]] = {}

    @functools.wraps(read)
    def read_once(factory: object, kind: type) -> dict[str, str]:
        if kind not in kept:
            kept[kind] = read(factory, kind)
        return kept[kind]

    module.ArgumentGroupFactory._get_field_docstrings = read_once
