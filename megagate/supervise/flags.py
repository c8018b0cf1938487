"""What the supervisor has to know of the trainer's flags, on the command line or in its recipe."""

from pathlib import Path
from typing import Any

from megagate.errors import UserError

ONCE = {
    "finetune": "--pretrained-checkpoint DIR starts from another model's weights, the first time only",
    "no-load-optim": "--pretrained-checkpoint DIR starts from another model's weights, the first time only",
    "no-load-rng": "--pretrained-checkpoint DIR starts from another model's weights, the first time only",
    "ckpt-step": "write that step into latest_checkpointed_iteration.txt beside the checkpoints",
}
"""Flags that would hold again at each restart, and throw away what was trained since; what to do instead."""


def last_value(flags: list[str], name: str) -> str | None:
    """Return the value of the last `--name VALUE` or `--name=VALUE`."""
    value = None
    for position, word in enumerate(flags):
        if word == name and position + 1 < len(flags):
            value = flags[position + 1]
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def in_recipe(flags: list[str]) -> dict[str, Any]:
    """Return the flags of the recipe that a command line names, by their names without dashes.

    Raises:
        UserError: it cannot be read.
    """
    recipe = last_value(flags, "--recipe")
    if recipe is None:
        return {}
    from megagate.recipe import read_recipe

    return read_recipe(recipe)[0]


def save_folder(flags: list[str]) -> Path:
    """Return the folder that --save names, on the command line or in its recipe.

    Raises:
        UserError: there is none.
    """
    save = last_value(flags, "--save") or in_recipe(flags).get("save")
    if save is None:
        raise UserError("a supervised run needs --save, where its checkpoints and its history go: add it")
    return Path(save)


def is_given(flags: list[str], name: str) -> bool:
    """Whether a command line or its recipe has a flag, `name` without dashes."""
    return any(word.split("=")[0] == f"--{name}" for word in flags) or bool(in_recipe(flags).get(name))


def check(flags: list[str]) -> None:
    """Refuse flags that are meant for one start where there will be many.

    Raises:
        UserError: there is one.
    """
    for name, instead in ONCE.items():
        # --gate-warm-start knows the first start from the others by itself.
        if is_given(flags, name) and not (name == "ckpt-step" and is_given(flags, "gate-warm-start")):
            raise UserError(f"--{name} would hold at each restart of a supervised run: leave it out; {instead}")
