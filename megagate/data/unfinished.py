"""Datasets while they are being written, and from where an interrupted job goes on.

A job keeps its files in a directory beside its output: for each dataset the tokens and lengths so far, and `state.json`
with what was asked, how much of the input has been used, and how much of the files counts. Whatever lies behind that
is cut off when the job goes on. Input that has been used is read again, which takes a fraction of the time that
tokenizing took, and compared, so that no other input is continued.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megagate.data.corpus import Batch
from megagate.data.encode import EncodedTexts
from megagate.data.index_file import DTYPES, write_index_of_lengths
from megagate.errors import UserError

SAVE_SECONDS = 60.0
"""Between two notes of how far a job is; one that ends earlier leaves nothing."""

STATE = "state.json"


@dataclass
class Counts:
    """Of one dataset."""

    tokens: int = 0
    documents: int = 0
    empty: int = 0
    cut: int = 0


class PendingDataset:
    """One dataset: tokens in `stem`.bin, int32 lengths in `stem`.lengths, which in the end become `stem`.idx.

    Args:
        stem: path without ending.
        dtype: of the tokens.
        counts: how much of the files counts.

    Raises:
        UserError: the files are shorter than that.
    """

    def __init__(self, stem: str, dtype: np.dtype, counts: Counts) -> None:
        self.counts = counts
        self._stem, self._dtype = stem, dtype
        self._files = {}
        for suffix, size in ((".bin", counts.tokens * dtype.itemsize), (".lengths", counts.documents * 4)):
            file = self._files[suffix] = open(stem + suffix, "ab")  # noqa: SIM115  # closed by close()
            if file.tell() < size:
                raise UserError(f"{stem}{suffix} has lost its end; give --restart to begin anew")
            file.truncate(size)

    def add(self, texts: EncodedTexts) -> None:
        """Append documents in order."""
        self._files[".bin"].write(texts.tokens)
        self._files[".lengths"].write(texts.lengths.astype("<i4"))
        self.counts.tokens += len(texts.tokens)
        self.counts.documents += len(texts.lengths)
        self.counts.empty += texts.empty
        self.counts.cut += texts.cut

    def sync(self) -> None:
        """Make what has been added durable."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> dict[str, str]:
        """Write the index, and return the SHA-256 of the files by their ending."""
        self.sync()
        lengths = np.memmap(self._stem + ".lengths", mode="r", dtype="<i4")
        code = next(code for code, name in DTYPES.items() if np.dtype(name) == self._dtype)
        with open(self._stem + ".idx", "wb") as file:
            write_index_of_lengths(file, code, lengths)
            file.flush()
            os.fsync(file.fileno())
        digests = {}
        for suffix in (".bin", ".idx"):
            with open(self._stem + suffix, "rb") as written:
                digests[suffix] = hashlib.file_digest(written, "sha256").hexdigest()
        return digests

    def publish(self, prefix: str) -> None:
        """Give the finished dataset its name; at no moment does an index stand beside another dataset's tokens."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(prefix + ".idx")
        os.replace(self._stem + ".bin", prefix + ".bin")
        os.replace(self._stem + ".idx", prefix + ".idx")

    def close(self) -> None:
        """Close the files, also where a full disk does not take their last bytes."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()


class Job:
    """Everything that a job has in its directory; a context that removes it, unless the job can go on from there.

    Args:
        directory: of the job, beside its output.
        asked: what was asked, as JSON has it; only a job of which the same was asked is continued.
        dtype: of the tokens.
        datasets: their number.
        restart: begin anew, whatever is there.

    Raises:
        UserError: another process works there, something else was asked of it, or it cannot be written.
    """

    def __init__(self, directory: Path, asked: dict[str, Any], dtype: np.dtype, datasets: int, restart: bool) -> None:
        self.directory = directory
        self._asked = asked
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise UserError(f"another process works in {directory}; wait for it, or choose another output") from error
        try:
            if restart:  # or a kill before the next note would have the old one count new files
                (directory / STATE).unlink(missing_ok=True)
            self._open(self._read_state(), dtype, datasets)
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self, state: dict[str, Any], dtype: np.dtype, datasets: int) -> None:
        self.batches = int(state.get("batches", 0))
        """Of the input that are in the datasets."""
        self.bytes_read = int(state.get("bytes_read", 0))
        self.malformed = int(state.get("malformed", 0))
        self._digest = bytes.fromhex(state.get("digest", ""))
        counts = [Counts(**one) for one in state.get("datasets", [{}] * datasets)]
        self.datasets = [PendingDataset(str(self.directory / str(n)), dtype, one) for n, one in enumerate(counts)]
        self._kept = bool(state)
        self._saved = time.monotonic()

    def remaining(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield what is left of the input.

        Raises:
            UserError: what has been used is not what the job was begun with.
        """
        if self.batches:
            print(f"going on after {self.bytes_read / 1e6:.1f} MB, from {self.directory}", file=sys.stderr, flush=True)
        digest = b""
        for _ in range(self.batches):
            batch = next(batches, None)
            digest = _chained(digest, batch.digest() if batch else b"")
        if digest != self._digest:
            raise UserError(f"the input is not what {self.directory} was begun with; give --restart to begin anew")
        yield from batches

    def add(self, texts: Sequence[EncodedTexts], digest: bytes, bytes_read: int, malformed: int) -> None:
        """Add what a batch has become; `digest` is that of the batch."""
        for dataset, one in zip(self.datasets, texts, strict=True):
            dataset.add(one)
        self.batches += 1
        self.bytes_read += bytes_read
        self.malformed += malformed
        self._digest = _chained(self._digest, digest)
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self._save()

    def publish(self, prefixes: Sequence[str]) -> list[dict[str, str]]:
        """Finish all datasets, and only then give them their names; return what `PendingDataset.finish` does."""
        digests = [dataset.finish() for dataset in self.datasets]
        for dataset, prefix in zip(self.datasets, prefixes, strict=True):
            dataset.publish(prefix)
        self._kept = False
        return digests

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: Any) -> None:
        for dataset in self.datasets:
            dataset.close()
        if not self._kept:
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)

    def _save(self) -> None:
        for dataset in self.datasets:
            dataset.sync()
        state = {
            "asked": self._asked,
            "batches": self.batches,
            "bytes_read": self.bytes_read,
            "malformed": self.malformed,
            "digest": self._digest.hex(),
            "datasets": [asdict(dataset.counts) for dataset in self.datasets],
        }
        part = self.directory / f"{STATE}.part"
        with open(part, "w", encoding="utf-8") as file:
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.directory / STATE)
        self._kept, self._saved = True, time.monotonic()

    def _read_state(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads((self.directory / STATE).read_bytes())
        except FileNotFoundError:
            return {}
        asked = state["asked"]
        for name in sorted(asked.keys() | self._asked.keys()):
            before, now = asked.get(name), self._asked.get(name)
            if before != now:
                raise UserError(
                    f"{self.directory} holds an unfinished job with {name} {before}, not {now}; "
                    "ask the same to go on with it, or give --restart to begin anew"
                )
        return state


def _chained(digest: bytes, of_batch: bytes) -> bytes:
    return hashlib.sha256(digest + of_batch).digest()
