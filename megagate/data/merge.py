"""Join datasets into one, document after document.

    python tools/merge_datasets.py --input data/part_*_text_document.idx --output-prefix data/all_text_document

The tokens are copied by the kernel and the index in chunks, so that memory does not depend on the size. The result is
what Megatron's builder makes of the same datasets, and appears only when it is whole.
"""

import argparse
import contextlib
import errno
import glob
import json
import os
from collections.abc import Sequence
from io import FileIO
from typing import Any

from megagate.data.index_file import Index, first_inconsistency, open_index, write_index
from megagate.data.validate import check_indexed_dataset
from megagate.errors import UserError
from megagate.progress import ByteProgress

PARTIAL = ".partial-"
"""In the names of files that are being written."""

COPIED_AT_ONCE = 64 << 20
NOT_IN_THE_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""What copy_file_range says where the two file systems cannot copy between them."""


def expand(inputs: Sequence[str]) -> list[str]:
    """Return the prefixes that `inputs` name: prefixes, .idx or .bin files, patterns, or directories.

    What a pattern or a directory has comes in alphabetical order.

    Raises:
        UserError: one matches nothing, or a dataset is named twice.
    """
    prefixes: list[str] = []
    for item in inputs:
        if os.path.isfile(item + ".idx"):  # also where Megatron keeps its cache, in a directory named as the dataset
            found = [item]
        elif os.path.isdir(item):
            found = sorted(glob.glob(os.path.join(glob.escape(item), "*.idx")))
        elif glob.has_magic(item):
            paths = glob.glob(item) + glob.glob(item + ".idx")
            found = sorted({os.path.splitext(path)[0] for path in paths if path.endswith((".idx", ".bin"))})
        else:
            found = [item]
        found = [path for path in found if PARTIAL not in path]  # left by a run that was killed
        if not found:
            raise UserError(f"--input {item} has no .idx file; name datasets, a pattern of theirs, or their directory")
        prefixes += [path.removesuffix(".idx").removesuffix(".bin") for path in found]
    seen: set[str] = set()
    for prefix in prefixes:
        if os.path.realpath(prefix) in seen:
            raise UserError(f"the dataset {prefix} is named twice by --input; name every dataset once")
        seen.add(os.path.realpath(prefix))
    return prefixes


def merge(prefixes: Sequence[str], output_prefix: str) -> dict[str, Any]:
    """Write the documents of all datasets, in turn, as the dataset `output_prefix`.

    Returns:
        `output`, `datasets`, `documents`, `tokens` and `dtype`.

    Raises:
        UserError: a dataset is damaged, their tokens have different types, or the output exists or cannot be written.
    """
    for suffix in (".bin", ".idx"):
        if os.path.exists(output_prefix + suffix):
            raise UserError(f"{output_prefix}{suffix} exists; choose another --output-prefix or remove it")
    parts = [open_index(prefix) for prefix in prefixes]
    for part in parts:
        if part.dtype != parts[0].dtype:
            raise UserError(
                f"{part.prefix} has {part.dtype.name} tokens but {parts[0].prefix} has {parts[0].dtype.name}: "
                "they come from vocabularies of different sizes; preprocess one with the other's tokenizer, or, if "
                "it is the same, train on a blend of both"
            )
        wrong = first_inconsistency(part)
        if wrong:
            raise UserError(f"{part.prefix} is damaged: {wrong}; preprocess it again")
    _write(parts, output_prefix)
    return {
        "output": output_prefix,
        "datasets": len(parts),
        "documents": sum(part.documents for part in parts),
        "tokens": sum(part.tokens for part in parts),
        "dtype": parts[0].dtype.name,
    }


def _write(parts: Sequence[Index], output_prefix: str) -> None:
    """Write both files under temporary names, check them, and only then name them."""
    temporary = f"{output_prefix}{PARTIAL}{os.getpid()}"
    total = sum(os.path.getsize(part.prefix + ".bin") for part in parts)
    try:
        os.makedirs(os.path.dirname(output_prefix) or ".", exist_ok=True)
        with open(temporary + ".bin", "wb", buffering=0) as file:
            progress = ByteProgress(total)
            for part in parts:
                _append(part.prefix + ".bin", file, progress)
            os.fsync(file.fileno())
        with open(temporary + ".idx", "wb") as file:
            write_index(file, parts[0].code, parts)
            file.flush()
            os.fsync(file.fileno())
        check_indexed_dataset(temporary)
        os.replace(temporary + ".bin", output_prefix + ".bin")
        os.replace(temporary + ".idx", output_prefix + ".idx")
    except OSError as error:
        raise UserError(
            f"cannot write {output_prefix}: {error.strerror or error}; make room there, or choose another "
            "--output-prefix"
        ) from error
    finally:
        for suffix in (".bin", ".idx"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(temporary + suffix)


def _append(source: str, target: FileIO, progress: ByteProgress) -> None:
    """Append a file to an open one, in the kernel where the file systems can."""
    with open(source, "rb", buffering=0) as file:
        remaining = os.fstat(file.fileno()).st_size
        while remaining:
            try:
                copied = os.copy_file_range(file.fileno(), target.fileno(), min(remaining, COPIED_AT_ONCE))
            except OSError as error:
                if error.errno not in NOT_IN_THE_KERNEL:
                    raise
                copied = target.write(file.read(COPIED_AT_ONCE))
            if not copied:
                raise OSError(f"{source} became shorter while it was read")
            remaining -= copied
            progress.add(copied)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tools/merge_datasets.py."""
    parser = argparse.ArgumentParser(
        prog="merge_datasets.py", description="Join .bin/.idx datasets into one.", allow_abbrev=False
    )
    parser.add_argument(
        "--input", nargs="+", required=True, help="datasets without their ending, patterns, directories"
    )
    parser.add_argument("--output-prefix", required=True, help="writes OUTPUT_PREFIX.bin and .idx")
    options = parser.parse_args(arguments)
    print(json.dumps(merge(expand(options.input), options.output_prefix)))
    return 0
