"""Reading a checkpoint without executing what it holds.

The index of a checkpoint in torch's distributed format, and the objects between its tensors, are pickles, and torch
reads both without restraint: a file could run any program. Here the first may refer only to what an index consists of,
and the second only to what torch and Megatron declare safe.
"""

import functools
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

INDEX_CLASSES = {
    "collections": {"OrderedDict"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.serialization": {"_get_layout"},
}
"""Module -> what a checkpoint's index may refer to there; data types of torch besides."""


class _IndexUnpickler(pickle.Unpickler):
    """Loads nothing but what an index consists of, so that reading it cannot run a program."""

    def find_class(self, module: str, name: str) -> Any:
        if name in INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no index needs")


def read_index(checkpoint: Path) -> Metadata:
    """Return the index of a distributed checkpoint: which tensors it holds, and where they lie.

    Raises:
        Exception: anything that a damaged pickle raises.
    """
    with open(checkpoint / ".metadata", "rb") as file:
        index = _IndexUnpickler(file).load()
    if not isinstance(index, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(index).__name__}")
    return index


@functools.cache
def refuse_code() -> None:
    """Let torch load no object of a distributed checkpoint that could run a program, for the rest of the process."""
    original = DefaultLoadPlanner.load_bytes

    @functools.wraps(original)
    def load_bytes(self: DefaultLoadPlanner, read_item: Any, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises for what is neither a tensor, nor plain, nor declared safe
        value.seek(0)
        original(self, read_item, value)

    DefaultLoadPlanner.load_bytes = load_bytes  # type: ignore[method-assign]
