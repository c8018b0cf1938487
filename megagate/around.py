"""Functions of Megatron's that others are put around, for as long as a run lasts."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


def put_around(until_end: ExitStack, module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace the function `name` of `module` by `wrap` of it, until `until_end` closes.

    What several put around one function comes off in the reverse order. A process that trains again, or another rank of
    which only some have trained before, then finds Megatron as it is.
    """
    original = getattr(module, name)
    setattr(module, name, wrap(original))
    until_end.callback(setattr, module, name, original)
