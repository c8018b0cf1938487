"""The arrays of a dataset's .idx file, without a Python object per document: mapped into memory, handled in chunks.

`megagate.data.validate` has the layout.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from megagate.data.validate import HEADER, ITEM_BYTES, MAGIC, REMOTE, VERSION, check_indexed_dataset
from megagate.errors import UserError

CHUNK = 1 << 20
"""Entries of an array that are looked at together."""

DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""numpy's name for the type of the tokens, by the code in the header."""


@dataclass(frozen=True)
class Index:
    """The index of a whole dataset, from `open_index`."""

    prefix: str
    code: int
    """Of the tokens' type, a key of `DTYPES`."""
    lengths: np.ndarray
    """int32 [sequences], in tokens."""
    pointers: np.ndarray
    """int64 [sequences], byte of the .bin file at which each begins."""
    boundaries: np.ndarray
    """int64 [documents + 1]: the first sequence of each document, and at the end the number of sequences."""

    @property
    def dtype(self) -> np.dtype:
        """Of the tokens."""
        return np.dtype(DTYPES[self.code])

    @property
    def documents(self) -> int:
        """Their number."""
        return len(self.boundaries) - 1

    @property
    def tokens(self) -> int:
        """Their number, from the size of the .bin file."""
        return os.path.getsize(self.prefix + ".bin") // ITEM_BYTES[self.code]

    def tokens_of_first(self, sequences: int) -> int:
        """Return how many tokens the first `sequences` sequences have."""
        return sum(int(chunk.sum(dtype=np.int64)) for _, chunk in chunks(self.lengths[:sequences]))


def open_index(prefix: str) -> Index:
    """Open the index of the dataset `prefix`.

    Raises:
        UserError: the dataset is remote or not whole (see `check_indexed_dataset`), or has modes, as multimodal do.
    """
    if prefix.startswith(REMOTE):
        raise UserError(f"{prefix} is remote; only files are handled here, so copy it first")
    check_indexed_dataset(prefix)
    path = prefix + ".idx"
    with open(path, "rb") as file:
        _, _, code, sequences, boundaries = HEADER.unpack(file.read(HEADER.size))
    content = np.memmap(path, mode="r", dtype=np.uint8)
    starts = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * boundaries])
    if len(content) != starts[-1]:
        raise UserError(f"{path} has a mode for each sequence, as multimodal data have; only text is handled here")
    arrays = [
        content[start:stop].view(dtype)
        for start, stop, dtype in zip(starts[:-1], starts[1:], ("<i4", "<i8", "<i8"), strict=True)
    ]
    return Index(prefix, code, *arrays)


def chunks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield, for each chunk of an array, the place of its first entry, and the chunk."""
    for start in range(0, len(array), CHUNK):
        yield start, array[start : start + CHUNK]


def first_inconsistency(index: Index) -> str | None:
    """Return what is wrong with an index's arrays, at the first place where something is; None if all agree.

    Sequences must lie in the .bin file one after the other without gaps, and documents must follow each other.
    """
    pointer = 0
    for start, lengths in chunks(index.lengths):
        negative = np.flatnonzero(lengths < 0)
        if len(negative):
            return f"sequence {start + negative[0]} has {lengths[negative[0]]} tokens"
        ends = pointer + np.cumsum(lengths, dtype=np.int64) * ITEM_BYTES[index.code]
        expected = np.concatenate([[pointer], ends[:-1]])
        wrong = np.flatnonzero(index.pointers[start : start + len(lengths)] != expected)
        if len(wrong):
            at = start + int(wrong[0])
            return f"sequence {at} begins at byte {index.pointers[at]}, but those before it end at {expected[wrong[0]]}"
        pointer = int(ends[-1])
    size = os.path.getsize(index.prefix + ".bin")
    if pointer != size:
        return f"the sequences have {pointer} bytes, but the .bin file has {size}"
    if index.boundaries[0] != 0:
        return f"the first document begins with sequence {index.boundaries[0]}"
    for start, boundaries in chunks(index.boundaries):
        steps = np.diff(index.boundaries[start : start + len(boundaries) + 1])
        wrong = np.flatnonzero(steps < 0)
        if len(wrong):
            return f"document {start + int(wrong[0])} ends before it begins"
    return None


def write_index_of_lengths(file: BinaryIO, code: int, lengths: np.ndarray) -> None:
    """Write the index of a dataset whose documents have one sequence each, of `lengths` int32 [documents] tokens."""
    count = len(lengths)
    file.write(HEADER.pack(MAGIC, VERSION, code, count, count + 1))
    for _, chunk in chunks(lengths):
        file.write(chunk.tobytes())
    pointer = 0
    for _, chunk in chunks(lengths):
        ends = pointer + np.cumsum(chunk, dtype=np.int64) * ITEM_BYTES[code]
        file.write(np.concatenate([[pointer], ends[:-1]]).astype("<i8").tobytes())
        pointer = int(ends[-1])
    for start in range(0, count + 1, CHUNK):
        file.write(np.arange(start, min(start + CHUNK, count + 1), dtype="<i8").tobytes())


def write_index(file: BinaryIO, code: int, parts: Sequence[Index]) -> None:
    """Write the index of a dataset with the documents of `parts`, none of which has an inconsistency, in turn."""
    sequences = sum(len(part.lengths) for part in parts)
    documents = sum(part.documents for part in parts)
    file.write(HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1))
    for part in parts:
        for _, lengths in chunks(part.lengths):
            file.write(lengths.tobytes())
    first_byte = 0
    for part in parts:
        for _, pointers in chunks(part.pointers):
            file.write((pointers + first_byte).tobytes())
        first_byte += os.path.getsize(part.prefix + ".bin")
    first_sequence = 0
    for part in parts:
        for _, boundaries in chunks(part.boundaries[:-1]):
            file.write((boundaries + first_sequence).tobytes())
        first_sequence += len(part.lengths)
    file.write(np.array([first_sequence], "<i8").tobytes())
