"""What a cell depends on, and where it lies.

    OUTPUT/cells/NAME-FINGERPRINT/
        recipe.yaml        all settings of the training
        checkpoints/       what a broken training goes on from
        tensorboard/
        logs/              train.log, evaluate.log, each command before its output
        evaluation.json    what tools/evaluate.py sinks found
        result.json        written at the very end, whole: a cell that has it is finished

A cell's fingerprint is a digest of all that its numbers depend on. With another setting, other data or another version
of megagate a cell is another one, in another folder; grids that share an output share equal cells.
"""

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import megagate
from megagate.ablate.grid import OWN_FLAGS, Cell, Grid
from megagate.errors import UserError
from megagate.recipe import ENVIRONMENT_KEY, read_recipe
from megagate.supervise.checkpoints import TRACKER

RESULT = "result.json"
IN_FOLDERS = (
    *("tokenizer*", "vocab*", "merges*", "added_tokens*", "special_tokens*", "*.model"),
    TRACKER,
)
"""Files by which a folder that a flag names is known: a tokenizer's, and what says which checkpoint is loaded."""


@dataclass
class Work:
    """A cell of a grid with its place and settings."""

    cell: Cell
    folder: Path
    recipe: dict[str, Any]
    """All settings of the training but those of the command line."""
    fingerprint: str
    trainer: list[str]
    """Flags of the command line."""
    evaluation: dict[str, Any]
    files: list[str]
    """Names of files and folders that it depends on."""
    data_cache: Path
    """For Megatron's indices, which cells on the same data share."""
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    """What runs for it now."""
    is_stopped: bool = False

    @property
    def save(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def events(self) -> Path:
        """The folder of the event files."""
        return self.folder / "tensorboard"

    def result(self) -> dict[str, Any] | None:
        """Return what the finished cell found, or None."""
        try:
            result = json.loads((self.folder / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return result if result.get("fingerprint") == self.fingerprint else None

    def stop(self, number: int, whole_group: bool) -> None:
        """Pass a signal on to what runs."""
        self.is_stopped = True
        for process in self.processes:
            if process.poll() is None:
                (os.killpg if whole_group else os.kill)(process.pid, number)


def works(grid: Grid, output: Path, trainer: Sequence[str]) -> list[Work]:
    """Return the cells of a grid with their places.

    Args:
        grid: what to run.
        output: the folder for all of it.
        trainer: flags of the trainer for every cell, as on the command line.

    Raises:
        UserError: two cells are the same, or a flag would be in all cells what an axis says.
    """
    _check_trainer(grid, trainer)
    base, variables = read_recipe(grid.recipe)
    found: list[Work] = []
    for cell in grid.cells:
        recipe = merged(base, cell.flags)
        if variables:
            recipe[ENVIRONMENT_KEY] = variables
        digests = _files([*recipe.values(), *trainer, *grid.evaluation.values()])
        depends = {
            "version": megagate.__version__,
            "recipe": recipe,
            "trainer": list(trainer),
            "world-size": grid.world_size,
            "evaluation": grid.evaluation,
            "files": digests,
        }
        fingerprint = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
        twin = next((work.cell.name for work in found if work.fingerprint == fingerprint), None)
        if twin is not None:
            raise UserError(
                f"the cells {twin} and {cell.name} of the grid {grid.path} have the same settings: leave one out"
            )
        slug = re.sub(r"[^\w.+-]+", "_", cell.name)[:80]
        known = sorted(output.glob(f"cells/*-{fingerprint[:10]}"))  # perhaps under another grid's name for it
        folder = known[0] if known else output / "cells" / f"{slug}-{fingerprint[:10]}"
        data = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:10]
        cache = output / "data_cache" / data  # Megatron's own name for it does not change with the data
        found.append(Work(cell, folder, recipe, fingerprint, list(trainer), grid.evaluation, list(digests), cache))
    return found


def _check_trainer(grid: Grid, trainer: Sequence[str]) -> None:
    """Raise UserError if a flag would overrule what makes cells different, or has no effect."""
    gate_axis = next((axis for flag, axis in grid.axis_of.items() if _is_gate(flag)), None)
    axis_of = {_unnegated(flag): axis for flag, axis in grid.axis_of.items()}
    for flag in names_of(trainer):
        name = _unnegated(flag)
        if name in OWN_FLAGS:
            raise UserError(f"--{flag} after -- is what each cell has of its own: leave it out")
        axis = axis_of.get(name) or (gate_axis if _is_gate(name) else None)
        if axis is not None:
            raise UserError(
                f"--{flag} after -- would overrule the axis {axis} of the grid {grid.path}, and make its cells alike: "
                "leave one of the two out"
            )


def _unnegated(flag: str) -> str:
    """Return what a flag such as no-rope-fusion, or disable-rope-fusion, turns off; any other as it is."""
    return flag.removeprefix("no-").removeprefix("disable-")


def names_of(trainer: Sequence[str]) -> list[str]:
    """Return which flags are on a command line, without dashes."""
    return [word.partition("=")[0].removeprefix("--").replace("_", "-") for word in trainer if word.startswith("--")]


def merged(recipe: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with other flags; as on the trainer's command line, a gate flag replaces all of the recipe's."""
    if any(_is_gate(name) for name in flags):
        recipe = {name: value for name, value in recipe.items() if not _is_gate(name)}
    return {name: value for name, value in {**recipe, **flags}.items() if value is not None}


def _is_gate(name: str) -> bool:
    return name in _gate_flags()


@cache
def _gate_flags() -> frozenset[str]:
    from megagate.gate.config import add_gate_arguments
    from megagate.parser import Parser

    parser = Parser(add_help=False)
    add_gate_arguments(parser)
    names = (name.removeprefix("--") for name in parser._option_string_actions)
    return frozenset((*names, "attention-output-gate"))


def _files(values: Sequence[Any]) -> dict[str, str]:
    """Return a digest of each file, dataset, and folder of a tokenizer or checkpoints that a value names."""
    found = {}
    for value in values:
        for word in value if isinstance(value, list) else [value]:
            text = str(word)
            digest = _digest(text) if text and not text.startswith("-") else None
            if digest:
                found[text] = digest
    return found


@cache
def _digest(name: str) -> str | None:
    from megagate.data.validate import fingerprint

    try:
        if all(Path(name + suffix).is_file() for suffix in (".bin", ".idx")):
            return fingerprint(name)
        path = Path(name)
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
        found = {file for pattern in IN_FOLDERS for file in path.glob(pattern) if file.is_file()}
        contents = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in found}
        return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest() if contents else None
    except OSError:
        return None
