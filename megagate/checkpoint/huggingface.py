"""The weights of a Hugging Face directory, read and written one tensor at a time.

Reading maps a file into memory and lets it go again after `REOPEN_AFTER` bytes, so that pages already read do not stay.
Writing knows all names, shapes and dtypes beforehand, so that the header of a safetensors file can stand before data
that do not exist yet: a header is eight bytes for its length, then JSON (https://huggingface.co/docs/safetensors).
"""

import contextlib
import json
import math
import pickle
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megagate.errors import UserError, reason

CONFIG = "config.json"
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
"""Where all weights are in one file; with `.index.json` after it, the index of several files. Earlier ones win."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Name in a safetensors header -> dtype; weights of others (quantised ones, integers) are not converted."""

REOPEN_AFTER = 256 * 2**20


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
        self._opened: tuple[str, contextlib.ExitStack, Any] | None = None
        self._bytes_since_open = 0
        files, index = _weight_files(directory)
        for file in files:
            for name, tensor in self._list(file):
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
        file = self._open(self._file_of[name])
        tensor = file.get_slice(name)[index] if index is not None else file.get_tensor(name)
        self._bytes_since_open += tensor.nbytes
        return tensor.contiguous()

    def close(self) -> None:
        """Let go of the file that is open."""
        if self._opened is not None:
            self._opened[1].close()
        self._opened, self._bytes_since_open = None, 0

    def _list(self, file: str) -> Iterator[tuple[str, StoredTensor]]:
        opened = self._open(file)
        for name in opened.keys():  # noqa: SIM118  # safe_open is no mapping
            part = opened.get_slice(name)
            yield name, StoredTensor(tuple(part.get_shape()), DTYPES.get(part.get_dtype()))

    def _open(self, file: str) -> Any:
        if self._opened is None or self._opened[0] != file or self._bytes_since_open > REOPEN_AFTER:
            self.close()
            stack = contextlib.ExitStack()
            path = self.directory / file
            try:
                opened = _PickledTensors(path) if file.endswith(".bin") else safe_open(path, framework="pt")
                self._opened = file, stack, stack.enter_context(opened)
            except (OSError, SafetensorError, RuntimeError, EOFError) as error:
                raise UserError(f"cannot read {path}: {reason(error)}") from error
            except pickle.UnpicklingError as error:
                raise UserError(
                    f"{path} holds more than tensors and could run code when it is loaded, so it is not: save the "
                    "weights as safetensors where you trust them"
                ) from error
        return self._opened[2]


class _PickledTensors:
    """A file of PyTorch's own format, with the part of `safe_open`'s interface that is used here."""

    def __init__(self, path: Path) -> None:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            content = torch.load(path, map_location="cpu", weights_only=True)  # of torch before 1.6
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise UserError(f"{path} must hold a mapping of names to tensors")
        self._tensors: dict[str, Tensor] = content

    def __enter__(self) -> "_PickledTensors":
        return self

    def __exit__(self, *_: Any) -> None:
        self._tensors = {}

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def get_slice(self, name: str) -> "_PickledSlice":
        return _PickledSlice(self._tensors[name].detach())


@dataclass(frozen=True)
class _PickledSlice:
    tensor: Tensor

    def get_shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def get_dtype(self) -> str:
        return next((name for name, dtype in DTYPES.items() if dtype == self.tensor.dtype), str(self.tensor.dtype))

    def __getitem__(self, index: int) -> Tensor:
        return self.tensor[index]


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
                if path.is_absolute() or ".." in path.parts or "\\" in file:
                    raise UserError(f"{index_file} has {name} in {file!r}, outside its directory: it is not read")
            return sorted(set(index.values())), index
        if (directory / single).is_file():
            return [single], {}
    if not directory.is_dir():
        raise UserError(f"{directory} does not exist")
    raise UserError(f"{directory} has no weights: neither {' nor '.join(SINGLE_FILES)}, nor an index of several files")


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
