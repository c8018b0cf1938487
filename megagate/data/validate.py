"""Cheap checks that a .bin/.idx pair is whole, so that a run does not start on a broken one.

The trainer calls :func:`check_indexed_dataset` for every data path before it makes a process group. It reads a few
dozen bytes per dataset, whatever the dataset's size.

Layout of an .idx file, little endian (megatron.core.datasets.indexed_dataset): 9 bytes magic, uint64 version, uint8
dtype code, uint64 S (sequences), uint64 D (documents + 1), int32[S] lengths in tokens, int64[S] byte offsets into
the .bin, int64[D] document boundaries, and for multimodal data int8[S] modes.
"""

import hashlib
import os
import struct

from megagate.errors import UserError, nearest

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Bytes per token, by the dtype code of the header."""
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, sequences, documents + 1."""
REMOTE = ("s3://", "msc://")


def check_indexed_dataset(prefix: str) -> None:
    """Return if `prefix`.bin and `prefix`.idx form a whole, non-empty dataset; remote prefixes are not checked.

    Raises:
        UserError: one of the two is missing, the index is not one or is cut off, the .bin's size is not what the
            index needs, or there are no documents.
    """
    if prefix.startswith(REMOTE):
        return
    index, data = prefix + ".idx", prefix + ".bin"
    _check_presence(prefix, index, data)
    try:
        data_bytes = os.path.getsize(data)
        needed_bytes = _needed_data_bytes(index)
    except OSError as error:
        raise UserError(
            f"cannot read the dataset {prefix}: {error.strerror}; make both files readable, or copy them again"
        ) from error
    if data_bytes != needed_bytes:
        raise UserError(
            f"{data} has {data_bytes} bytes but {index} describes {needed_bytes}; "
            "the two do not belong together or one was cut off: copy both again or preprocess again"
        )


def fingerprint(prefix: str) -> str:
    """Return a short text that changes when the dataset does: sizes, and a digest of both ends of both files.

    Cheap and the same on every file system; a remote prefix has none and gives an empty text.
    """
    if prefix.startswith(REMOTE):
        return ""
    digest = hashlib.sha256()
    sizes = []
    for suffix in (".bin", ".idx"):
        with open(prefix + suffix, "rb") as stream:
            sizes.append(stream.seek(0, os.SEEK_END))
            for start in (0, max(0, sizes[-1] - 65536)):
                stream.seek(start)
                digest.update(stream.read(65536))
    return f"{sizes[0]}-{sizes[1]}-{digest.hexdigest()[:16]}"


def _check_presence(prefix: str, index: str, data: str) -> None:
    missing = [path for path in (data, index) if not os.path.isfile(path)]
    if not missing:
        return
    stem, suffix = os.path.splitext(prefix)
    if suffix in (".bin", ".idx") and os.path.isfile(stem + ".idx"):
        raise UserError(f"the data path {prefix} names one file of a pair; drop its ending and give {stem}")
    if len(missing) == 1:
        other = index if missing[0] == data else data
        raise UserError(f"{missing[0]} is missing although {other} is there; a dataset needs both files")
    folder = os.path.dirname(prefix) or "."
    others = {os.path.splitext(name)[0] for name in os.listdir(folder)} if os.path.isdir(folder) else set()
    name = os.path.basename(prefix)
    longer = sorted(other for other in others if other.startswith(name + "_"))  # --output-prefix instead of the dataset
    hint = f"; did you mean {', '.join(longer[:3])}?" if longer else nearest(name, sorted(others))
    raise UserError(f"there is no dataset {prefix} (neither {data} nor {index} exists){hint}")


def _needed_data_bytes(index: str) -> int:
    """The size that the .bin must have, from the last sequence's offset and length."""
    index_bytes = os.path.getsize(index)
    with open(index, "rb") as stream:
        header = stream.read(HEADER.size)
        if header[: len(MAGIC)] != MAGIC:
            raise UserError(f"{index} is not a Megatron index: its first bytes are not MMIDIDX")
        if len(header) < HEADER.size:
            raise UserError(f"{index} is cut off: {len(header)} bytes, less than its header of {HEADER.size}")
        _, version, code, sequences, boundaries = HEADER.unpack(header)
        if version != VERSION:
            raise UserError(f"{index} has format version {version}; only version {VERSION} is known")
        if code not in ITEM_BYTES:
            raise UserError(f"{index} has the unknown token type code {code}")
        plain_bytes = HEADER.size + 12 * sequences + 8 * boundaries
        if index_bytes not in (plain_bytes, plain_bytes + sequences):  # the longer one holds modes too
            raise UserError(
                f"{index} has {index_bytes} bytes but its header, with {sequences} sequences, needs {plain_bytes}; "
                "it was cut off or damaged: copy it again or preprocess again"
            )
        if sequences == 0 or boundaries < 2:
            raise UserError(f"{index} holds no documents; preprocess a corpus that has some")
        length = _read_one(stream, "<i", HEADER.size + 4 * (sequences - 1))
        pointer = _read_one(stream, "<q", HEADER.size + 12 * sequences - 8)
        last_boundary = _read_one(stream, "<q", plain_bytes - 8)
    if last_boundary != sequences or length < 0 or pointer < 0:
        raise UserError(
            f"{index} contradicts itself: {sequences} sequences, the last document ending at {last_boundary}, "
            f"the last sequence of {length} tokens at byte {pointer}; preprocess again"
        )
    return pointer + length * ITEM_BYTES[code]


def _read_one(stream, layout: str, offset: int) -> int:
    stream.seek(offset)
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))[0]
