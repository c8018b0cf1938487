"""Weights that an architecture has a place for and megagate has not, kept as they are from an import to its export.

These are heads for multi-token prediction, which guess further tokens while the model generates. Training here leaves
them as they were: what they guess fits the trained model less, while the model's own output does not depend on them.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from megagate.checkpoint.families.base import Family
from megagate.checkpoint.huggingface import CONFIG, StoredTensor, WeightReader, WeightWriter, has_weights, read_json

FOLDER = "carried"
"""In the folder of an import that holds what its source held besides the model's weights."""


def names(family: Family, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return those tensors that are carried."""
    beginnings = tuple(getattr(family, "carried", ()))
    return {name: tensor for name, tensor in tensors.items() if beginnings and name.startswith(beginnings)}


def keep(reader: WeightReader, tensors: dict[str, StoredTensor], folder: Path) -> None:
    """Write the tensors to a new directory, one at a time; make none if there are none."""
    if not tensors:
        return
    folder.mkdir()
    writer = WeightWriter(folder, tensors, sys.maxsize)
    for name in tensors:
        writer.write(name, reader.read(name))
    writer.close()


def kept(family: Family, source: Path | None, hidden_size: int) -> WeightReader | None:
    """Return what reads the tensors that belong to a model that is exported as `family`; None if there are none.

    Args:
        family: of the export.
        source: what an import has kept, or a Hugging Face directory.
        hidden_size: of the model; what belongs to a model of another size is not taken.
    """
    if source is None or not getattr(family, "carried", ()):
        return None
    config = read_json(source / CONFIG)
    folder = source / FOLDER if (source / FOLDER).is_dir() else source
    if config.get("text_config", config).get("hidden_size") != hidden_size or not has_weights(folder):
        return None
    return WeightReader(folder)
