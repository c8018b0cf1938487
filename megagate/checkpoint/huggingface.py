"""The weights of a Hugging Face directory, read and written one tensor at a time.

A safetensors file is eight bytes for the length of its header, the header in JSON, and the tensors' bytes
(https://huggingface.co/docs/safetensors). The package of that name maps a file into memory, whose pages then stay, and
writes a file whole. Here a tensor is read into memory of its own, a few times as fast, and as all names, shapes and
dtypes are known beforehand, the header is written before data that do not exist yet.
"""

import itertools
import json
import math
import pickle
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megagate.errors import UserError, reason

CONFIG = "config.json"
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
"""Where all weights are in one file; with `.index.json` after it, the index of several files. Earlier ones win."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Name in a safetensors header -> dtype; weights of others (quantised ones, integers) are not converted."""


@dataclass(frozen=True)
class StoredTensor:
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None for one that is not in `DTYPES`."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * (self.dtype.itemsize if self.dtype else 0)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        UserError: it is missing or is no such file.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {reason(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object")
    return content


class WeightReader:
    """The weights of a directory, in safetensors or PyTorch's own format, in one file or several with an index.

    Raises:
        UserError: there are none, a file is missing or damaged, holds more than tensors, the index and the files
            disagree, or the index names a file outside the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        self._file_of: dict[str, str] = {}
        self._opened: tuple[str, _Safetensors | _PickledTensors] | None = None
        files, index = _weight_files(directory)
        for file in files:
            for name, tensor in self._open(file).tensors.items():
                if name in self.tensors:
                    raise UserError(f"{directory} has {name} twice, in {self._file_of[name]} and in {file}")
                self.tensors[name] = tensor
                self._file_of[name] = file
        for name, file in index.items():
            if self._file_of.get(name) != file:
                raise UserError(f"{directory / file} does not hold {name}, which the index promises")
        if index and (stray := sorted(self.tensors.keys() - index.keys())):
            raise UserError(f"{directory / self._file_of[stray[0]]} holds {stray[0]}, of which the index says nothing")

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor, or its slice `index` along the first axis; contiguous."""
        return self._open(self._file_of[name]).read(name, index)

    def close(self) -> None:
        """Let go of the file that is open."""
        if self._opened is not None:
            self._opened[1].close()
        self._opened = None

    def _open(self, file: str) -> "_Safetensors | _PickledTensors":
        if self._opened is None or self._opened[0] != file:
            self.close()
            path = self.directory / file
            try:
                self._opened = file, (_PickledTensors if file.endswith(".bin") else _Safetensors)(path)
            except (OSError, RuntimeError, ValueError, TypeError, EOFError) as error:
                raise UserError(f"cannot read {path}: {reason(error)}") from error
            except pickle.UnpicklingError as error:
                raise UserError(
                    f"{path} holds more than tensors and could run code when it is loaded, so it is not: save the "
                    "weights as safetensors where you trust them"
                ) from error
        return self._opened[1]


class _Safetensors:
    """An open file.

    Raises:
        ValueError: its header does not describe it.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # closed by close()
        size = path.stat().st_size
        (length,) = struct.unpack("<Q", self._file.read(8).ljust(8, b"\xff"))
        if length > size - 8:
            raise ValueError("it is no safetensors file, or is cut off")
        header = json.loads(self._file.read(length), object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        self.tensors: dict[str, StoredTensor] = {}
        self._start: dict[str, int] = {}
        places: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            try:
                (start, end), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), DTYPES.get(entry["dtype"])
            except (KeyError, TypeError) as error:
                raise ValueError(f"its header does not describe {name}") from error
            tensor = StoredTensor(shape, dtype)
            fits = 0 <= start <= end <= size - 8 - length and min(shape, default=0) >= 0
            if not fits or (dtype and end - start != tensor.nbytes):
                raise ValueError(f"it is cut off, or its header does not fit {name}")
            self.tensors[name] = tensor
            self._start[name] = 8 + length + start
            places.append((start, end, name))
        places.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(places):
            if start != end:
                raise ValueError(f"{first} and {second} overlap or have a gap between them")

    def read(self, name: str, index: int | None) -> Tensor:
        stored = self.tensors[name]
        tensor = torch.empty(stored.shape if index is None else stored.shape[1:], dtype=stored.dtype)
        self._file.seek(self._start[name] + (index or 0) * tensor.nbytes)
        view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        while view:  # one call reads at most 2 GiB
            count = self._file.readinto(view)
            if not count:
                raise UserError(f"{self._file.name} ends before {name} does")
            view = view[count:]
        return tensor

    def close(self) -> None:
        self._file.close()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, of whose entries of the same name Python would take the last."""
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it holds {twice} twice")
    return result


class _PickledTensors:
    """A file of PyTorch's own format, mapped into memory.

    Raises:
        pickle.UnpicklingError: it holds more than tensors.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            content = torch.load(path, map_location="cpu", weights_only=True)  # written before torch 1.6
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise ValueError("it must hold a mapping of names to tensors")
        self._content: dict[str, Tensor] = content
        self.tensors = {
            name: StoredTensor(tuple(tensor.shape), tensor.dtype if tensor.dtype in DTYPES.values() else None)
            for name, tensor in content.items()
        }

    def read(self, name: str, index: int | None) -> Tensor:
        tensor = self._content[name].detach()
        return (tensor if index is None else tensor[index]).contiguous()

    def close(self) -> None:
        self._content = {}


def _weight_files(directory: Path) -> tuple[list[str], dict[str, str]]:
    """Return the files with weights, and the index: tensor name -> file, empty where there is one file."""
    for single in SINGLE_FILES:
        index_file = directory / f"{single}.index.json"
        if index_file.is_file():
            index = read_json(index_file).get("weight_map")
            if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
                raise UserError(f"{index_file} has no weight_map of tensor names to files")
            for name, file in index.items():
                path = PurePosixPath(file)
                leaves = path.is_absolute() or ".." in path.parts or "\\" in file
                folder = (directory / file).parent.resolve()  # files themselves are links in the cache of transformers
                if leaves or not folder.is_relative_to(directory.resolve()):
                    raise UserError(f"{index_file} has {name} in {file!r}, outside its directory: it is not read")
            return sorted(set(index.values())), index
        if (directory / single).is_file():
            return [single], {}
    if not directory.is_dir():
        raise UserError(f"{directory} does not exist")
    raise UserError(f"{directory} has no weights: neither {' nor '.join(SINGLE_FILES)}, nor an index of several files")


def has_weights(directory: Path) -> bool:
    """Whether a directory has a file of weights, or the index of several."""
    return any((directory / name).is_file() for single in SINGLE_FILES for name in (single, f"{single}.index.json"))


class WeightWriter:
    """Writes safetensors files whose tensors are filled in later, in any order.

    Args:
        directory: where to write.
        tensors: everything that will be written.
        max_shard_size: bytes after which a further file begins.
    """

    def __init__(self, directory: Path, tensors: dict[str, StoredTensor], max_shard_size: int) -> None:
        shards: list[list[str]] = [[]]
        size = 0
        for name, tensor in tensors.items():
            if shards[-1] and size + tensor.nbytes > max_shard_size:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += tensor.nbytes
        self._tensors = tensors
        self._place: dict[str, tuple[BinaryIO, int]] = {}
        self._files: list[BinaryIO] = []
        index: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            suffix = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            file_name = f"model{suffix}.safetensors"
            self._start(directory / file_name, names)
            index |= dict.fromkeys(names, file_name)
        if len(shards) > 1:
            total = sum(tensor.nbytes for tensor in tensors.values())
            content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
            (directory / f"{SINGLE_FILES[0]}.index.json").write_text(json.dumps(content, indent=2) + "\n")

    def write(self, name: str, tensor: Tensor, index: int | None = None) -> None:
        """Write a tensor, or the slice `index` along the first axis of one; shape and dtype must be as announced."""
        file, place = self._place[name]
        announced = self._tensors[name]
        shape = announced.shape if index is None else announced.shape[1:]
        if tuple(tensor.shape) != shape or tensor.dtype != announced.dtype:
            raise ValueError(f"{name} was announced as {announced}, not {tensor.dtype} {tuple(tensor.shape)}")
        file.seek(place + (index or 0) * tensor.nbytes)
        file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())

    def close(self) -> None:
        """Finish the files."""
        for file in self._files:
            file.close()

    def _start(self, path: Path, names: list[str]) -> None:
        """Write the header of a file."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        kinds = {dtype: kind for kind, dtype in DTYPES.items()}
        for name in names:
            tensor = self._tensors[name]
            assert tensor.dtype is not None
            start, end = end, end + tensor.nbytes
            header[name] = {"dtype": kinds[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data are aligned
        file = open(path, "wb")  # noqa: SIM115  # closed by close()
        self._files.append(file)
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            self._place[name] = file, 8 + len(text) + header[name]["data_offsets"][0]
