"""A corpus that is on every machine: the source files of the running Python's own standard library.

Real text of a few megabytes with structure at every scale, which a model of a few million parameters learns from within
minutes. Files are held out whole, chosen by a hash of their path, so that which files a model is tested on depends
neither on their order nor on the Python version's other files.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EXCLUDED_FOLDERS = frozenset(
    (
        "__pycache__",
        "dist-packages",
        "encodings",  # tables of characters
        "ensurepip",
        "idlelib",  # absent from many distributions
        "lib2to3",
        "pydoc_data",  # the manual as one string
        "site-packages",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
    )
)
HELD_OUT_PERCENT = 6


@dataclass(frozen=True)
class Corpus:
    """What was written."""

    train: Path
    held_out: Path
    train_files: int
    held_out_files: int
    train_bytes: int
    held_out_bytes: int


def standard_library_files(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield (path relative to the library, text) of the Python files, in alphabetical order of their paths.

    Args:
        root: the folder to read; the running Python's standard library if None.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    for path in sorted(path for path in paths if not EXCLUDED_FOLDERS.intersection(path.parts)):
        # Build settings of this very machine, which no other file has anything to say about.
        if path.name.startswith("_sysconfigdata"):
            continue
        try:
            text = (root / path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            yield path.as_posix(), text


def is_held_out(path: str) -> bool:
    """Whether the file at this relative path is for testing: about HELD_OUT_PERCENT of all paths are."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


def write_corpus(folder: Path, maximum_files: int | None = None) -> Corpus:
    """Write `folder`/train.jsonl and held_out.jsonl, one file of the library per line.

    Args:
        folder: is made if missing.
        maximum_files: take this many files, evenly spread over the library, or all if None.
    """
    files = list(standard_library_files())
    if maximum_files is not None:
        files = files[:: max(1, len(files) // maximum_files)]
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[bool, list[int]] = {False: [], True: []}
    paths = {False: folder / "train.jsonl", True: folder / "held_out.jsonl"}
    for held_out, path in paths.items():
        with open(path, "w", encoding="utf-8") as stream:
            for name, text in files:
                if is_held_out(name) == held_out:
                    stream.write(json.dumps({"path": name, "text": text}) + "\n")
                    written[held_out].append(len(text.encode("utf-8")))
    return Corpus(
        paths[False],
        paths[True],
        len(written[False]),
        len(written[True]),
        sum(written[False]),
        sum(written[True]),
    )
