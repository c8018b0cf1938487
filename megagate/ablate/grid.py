"""A grid: a base recipe, axes of settings, and what to measure on; its cells are all combinations.

recipe: ../moe_15a2b/recipe.yaml    # beside the grid's own file
world-size: 64                      # processes of a cell; 1 if left out
flags:                              # of the trainer, for every cell; they replace the recipe's, null leaves one out
  train-iters: 20000
axes:
  gate-preset: [baseline, sdpa-elementwise]     # a flag and its values
  schedule:                                     # or names, each for several flags
    short: {lr: 4.0e-3, train-iters: 20000}
    long: {lr: 3.0e-3, train-iters: 40000}
  seed: [1, 2]                      # the axis over which means are taken
evaluation:                         # flags of tools/evaluate.py sinks
  data-path: data/held_out_text_document
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagate.errors import UserError, nearest
from megagate.recipe import read_recipe
from megagate.yaml_file import read_yaml

KEYS = ("recipe", "world-size", "flags", "axes", "evaluation", "diverged-above")
EVALUATION_KEYS = ("data-path", "tokenizer-model", "seq-length", "micro-batch-size", "telemetry-rows")
OWN_FLAGS = ("recipe", "save", "load", "tensorboard-dir", "allow-fresh-start", "dry-run", "omit", "world-size", "rank")
"""Flags of the trainer that a cell has from here."""
SPREAD = "seed"
"""The axis over which means and deviations are taken."""
DIVERGED_ABOVE = 0.5
"""Nats by which the training loss ends above its lowest."""


@dataclass(frozen=True)
class Cell:
    """One combination."""

    number: int
    """Its place in the grid, from 0."""
    labels: dict[str, str]
    """Axis -> label, in the grid's order."""
    flags: dict[str, Any]
    """Flags of the trainer without dashes, those of all cells among them; None leaves the recipe's out."""

    @property
    def key(self) -> tuple[str, ...]:
        """The labels of what it is a sample of: all but the seed's."""
        return tuple(label for axis, label in self.labels.items() if axis != SPREAD)

    @property
    def name(self) -> str:
        """The labels, for people."""
        return ", ".join(
            label if axis == "gate-preset" or not re.match(r"[\d.+-]", label) else f"{axis} {label}"
            for axis, label in self.labels.items()
        )


@dataclass(frozen=True)
class Grid:
    """What a grid's file says, checked."""

    path: Path
    recipe: Path
    world_size: int
    axes: dict[str, list[str]]
    """Axis -> labels."""
    axis_of: dict[str, str]
    """Flag -> the axis that sets it."""
    cells: list[Cell]
    evaluation: dict[str, Any]
    diverged_above: float

    @property
    def name(self) -> str:
        """Of its outputs."""
        return self.path.stem


def read_grid(path: Path) -> Grid:
    """Read a grid.

    Raises:
        UserError: it is missing or says something that cannot be.
    """
    content = read_yaml(path, "the grid")
    if not isinstance(content, dict):
        raise UserError(f"the grid {path} must be a mapping with the keys {', '.join(KEYS)}")
    for key in content:
        if key not in KEYS:
            raise UserError(f"{key!r} in the grid {path} is not known{nearest(str(key), KEYS)}")
    for key in ("recipe", "axes"):
        if not content.get(key):
            raise UserError(f"the grid {path} has no {key}: see megagate/ablate/grid.py for an example")
    recipe = path.parent / str(content["recipe"])
    read_recipe(recipe)
    common = _flags(content.get("flags") or {}, f"flags in the grid {path}")
    axes, axis_of = _axes(content["axes"], path)
    evaluation = content.get("evaluation") or {}
    if not isinstance(evaluation, dict):
        raise UserError(f"evaluation in the grid {path} must be a mapping of flags to values")
    for key in evaluation:
        if key not in EVALUATION_KEYS:
            raise UserError(
                f"{key!r} under evaluation in the grid {path} is not known{nearest(str(key), EVALUATION_KEYS)}"
            )
    cells = [
        Cell(
            number,
            {axis: label for axis, (label, _) in zip(axes, chosen, strict=True)},
            common | {name: value for _, flags in chosen for name, value in flags.items()},
        )
        for number, chosen in enumerate(itertools.product(*(settings.items() for settings in axes.values())))
    ]
    return Grid(
        path=path,
        recipe=recipe,
        world_size=_number(content, "world-size", 1, path),
        axes={axis: list(settings) for axis, settings in axes.items()},
        axis_of=axis_of,
        cells=cells,
        evaluation=evaluation,
        diverged_above=_number(content, "diverged-above", DIVERGED_ABOVE, path),
    )


def _number[N: (int, float)](content: Mapping[str, Any], key: str, default: N, path: Path) -> N:
    """Return a positive number, whole if the default is."""
    value = content.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, type(default))) or value <= 0:
        raise UserError(f"{key} in the grid {path} must be a positive number, not {value!r}")
    return value


def _axes(content: Any, path: Path) -> tuple[dict[str, dict[str, dict[str, Any]]], dict[str, str]]:
    """Return axis -> label -> flags, and flag -> axis.

    Raises:
        UserError: an axis has no values, or two axes set the same flag.
    """
    if not isinstance(content, dict):
        raise UserError(f"axes in the grid {path} must be a mapping of axes to their values")
    axes: dict[str, dict[str, dict[str, Any]]] = {}
    setters: dict[str, str] = {}
    for axis, values in content.items():
        where = f"the axis {axis} in the grid {path}"
        if not values or not isinstance(values, (list, dict)):
            raise UserError(f"{where} needs a list of values, or a mapping of names to flags")
        if isinstance(values, list):
            settings = {str(value): {str(axis): value} for value in values}
            if len(settings) < len(values):
                raise UserError(f"{where} has a value twice: name each once")
        else:
            settings = {str(label): flags or {} for label, flags in values.items()}
        axes[str(axis)] = {label: _flags(flags, f"{label} on {where}") for label, flags in settings.items()}
        for name in dict.fromkeys(name for flags in axes[str(axis)].values() for name in flags):
            if name in setters:
                both = f"{setters[name]} and {axis}"
                raise UserError(f"the axes {both} in the grid {path} both set {name}: leave it out of one")
            setters[name] = str(axis)
    return axes, setters


def _flags(content: Any, where: str) -> dict[str, Any]:
    """Return flags without dashes.

    Raises:
        UserError: it is not a mapping, has a flag twice, or sets what each cell has of its own.
    """
    if not isinstance(content, dict):
        raise UserError(f"{where} must be a mapping of the trainer's flags to values")
    flags: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("_", "-").removeprefix("--")
        if name in flags:
            raise UserError(f"{where} has {name} twice: write it once")
        flags[name] = value
    for name in flags:
        if name in OWN_FLAGS:
            raise UserError(f"{where} sets {name}, which each cell has of its own: leave it out")
    return flags
