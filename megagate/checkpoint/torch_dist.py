"""The tensors of a checkpoint in Megatron's distributed format, read and written one at a time by one process.

The format is torch's: `.metadata` lists which parts of each global tensor exist and at which bytes of which file they
lie; each part there is what `torch.save` writes. torch's own writer holds on to every tensor until the last is written,
and its reader needs all that it reads in memory; neither does for a model that is larger than that.
"""

import math
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view
from torch.serialization import get_crc32_options, set_crc32_options

from megagate.checkpoint.huggingface import StoredTensor
from megagate.checkpoint.pickles import read_index
from megagate.errors import UserError, reason

NOT_OF_THE_MODEL = ("optimizer.", "chained_", "rng_state", "rerun_state_machine", "common_state")
"""Beginnings of the keys that are not the model's."""

EXTRA_STATE = "._extra_state"
"""In the keys of what a layer keeps besides its tensors: scales of FP8, else nothing."""

COMMON_STATE = "common_state/shard_0_1"
DATA_FILE = "__0_0.distcp"


class TensorReader:
    """The tensors of the model in a checkpoint that was written on any layout.

    Args:
        checkpoint: an iteration's directory, complete.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        index = read_index(checkpoint)
        self._storage: dict[MetadataIndex, _StorageInfo] = index.storage_data
        self._entries: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            and not name.startswith(NOT_OF_THE_MODEL)
            and EXTRA_STATE not in name
        }
        self.tensors = {
            name: StoredTensor(tuple(entry.size), entry.properties.dtype) for name, entry in self._entries.items()
        }
        self._file: tuple[str, Any] | None = None
        self._last: tuple[MetadataIndex | None, Tensor | None] = (None, None)

    def read(self, name: str, index: int | tuple[int, ...] | None = None) -> Tensor:
        """Return a tensor, or its slice `index` along the first axis or axes, joined from the parts ranks have written.

        Raises:
            UserError: a part is damaged, or the parts do not cover the tensor exactly once.
        """
        entry = self._entries[name]
        fixed = () if index is None else (index,) if isinstance(index, int) else index
        starts = [*fixed, *[0] * (len(entry.size) - len(fixed))]
        shape = [1] * len(fixed) + list(entry.size[len(fixed) :])
        stops = [start + size for start, size in zip(starts, shape, strict=True)]
        whole, covered = None, 0
        for chunk in entry.chunks:
            first = [max(start, offset) for start, offset in zip(starts, chunk.offsets, strict=True)]
            ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            last = [min(stop, end) for stop, end in zip(stops, ends, strict=True)]
            if any(begin >= end for begin, end in zip(first, last, strict=True)):
                continue
            part = self._part(name, chunk)[_box(first, last, chunk.offsets)]
            covered += part.numel()
            if list(part.shape) == shape:
                whole = part
                continue
            if whole is None:
                whole = torch.empty(shape, dtype=entry.properties.dtype)
            whole[_box(first, last, starts)] = part
        if whole is None or covered != math.prod(shape):
            raise UserError(f"{self.checkpoint} is damaged: the parts of {name} do not cover it exactly once")
        return whole[(0,) * len(fixed)]

    def close(self) -> None:
        """Close the file that is open."""
        if self._file is not None:
            self._file[1].close()
        self._file, self._last = None, (None, None)

    def _part(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        key = MetadataIndex(name, chunk.offsets)
        if self._last[0] == key and self._last[1] is not None:  # its rows are asked for one after another
            return self._last[1]
        self._last = (None, None)  # frees memory before more is taken
        info = self._storage[key]
        path = self.checkpoint / info.relative_path
        try:
            if self._file is None or self._file[0] != info.relative_path:
                self.close()
                if os.path.dirname(info.relative_path):
                    raise UserError(f"the index of {self.checkpoint} has {name} outside its directory: it is not read")
                self._file = info.relative_path, open(path, "rb")  # noqa: SIM115
            view: Any = _create_file_view(self._file[1], info.offset, info.length)
            part = torch.load(view, map_location="cpu", weights_only=True).detach()
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(f"{path} is damaged at {name}: {reason(error)}") from error
        if part.shape != chunk.sizes:
            raise UserError(f"{path} holds {tuple(part.shape)} of {name}, but its index says {tuple(chunk.sizes)}")
        if len(chunk.sizes) > 1 and chunk.sizes[0] > 1:
            self._last = key, part
        return part


def _box(first: Sequence[int], last: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return what lies between two corners, counted from `origin`."""
    return tuple(slice(begin - zero, end - zero) for begin, end, zero in zip(first, last, origin, strict=True))


class TensorWriter:
    """Writes a checkpoint without optimizer; the tensors come in any order, stacked ones slice by slice.

    Args:
        checkpoint: an empty directory.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._file = open(checkpoint / DATA_FILE, "wb")  # noqa: SIM115  # closed by close()
        self._entries: dict[str, STORAGE_TYPES] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def write(self, name: str, tensor: Tensor, index: int | None = None, count: int = 0) -> None:
        """Write a whole tensor, or the slice `index` along the first axis of one that has `count` of them."""
        offsets = [0] * tensor.dim()
        size = tensor.shape
        if index is not None:
            tensor, offsets = tensor[None], [index, *offsets]
            size = torch.Size((count, *size))
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch.save would write what the tensor is a view of
        properties = TensorProperties.create_from_tensor(tensor)
        entry = self._entries.setdefault(name, TensorStorageMetadata(properties, size, []))
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), tensor.shape))
        self._save(MetadataIndex(name, offsets), tensor)

    def write_object(self, key: str, value: Any) -> None:
        """Write what is no tensor; `key` says which part of how many it is, as Megatron does."""
        self._entries[key] = BytesStorageMetadata()
        self._save(MetadataIndex(key), [value])

    def close(self) -> None:
        """Write the index, which makes the checkpoint complete."""
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        self._file.close()
        index = Metadata(
            self._entries, storage_data=self._storage, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION
        )
        with open(self._checkpoint / ".metadata", "wb") as file:
            pickle.dump(index, file)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._checkpoint))

    def _save(self, key: MetadataIndex, value: Any) -> None:
        start = self._file.tell()
        checksums = get_crc32_options()
        set_crc32_options(False)  # torch never looks at them, and they take as long as all else
        try:
            torch.save(value, self._file)
        finally:
            set_crc32_options(checksums)
        self._storage[key] = _StorageInfo(DATA_FILE, start, self._file.tell() - start)
