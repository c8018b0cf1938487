"""Reading raw text: which files an input names, and their documents one by one with file and line number.

Shared by `train_tokenizer` and `preprocess`, so that both understand inputs alike and complain about them alike.
A line of a .jsonl (or .json) file is one document, a whole .txt file is one document; either may be compressed
(.gz, .zst). A row of a .parquet file is one document. Files are read in batches of about 1 MiB: memory depends on the
longest document, not on the corpus.
"""

import codecs
import contextlib
import glob
import gzip
import hashlib
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from megagate.errors import UserError, nearest

STANDARD_INPUT = "-"
JSON_SUFFIXES = (".jsonl", ".json")
TEXT_SUFFIX = ".txt"
PARQUET_SUFFIX = ".parquet"
COMPRESSION_SUFFIXES = (".gz", ".zst")
READABLE = ".parquet, or in .jsonl, .json or .txt, optionally followed by .gz or .zst"
BATCH_BYTES = 1 << 20
MAXIMUM_BATCH_ROWS = 1 << 16
MAXIMUM_TEXT_FILE_BYTES = 1 << 30
MAXIMUM_REPORTED_BAD_RECORDS = 10


@dataclass(frozen=True)
class Batch:
    """Consecutive raw records of one input, small enough to hand to another process."""

    source: str
    """The input's name, as messages show it."""
    first_line: int
    """1-based line number of the first record; for Parquet, its row, counted from 1 too."""
    records: list[bytes]
    """Lines of JSON, or one whole text file."""
    is_text: bool
    """True if the single record is a whole text file."""
    columns: list[list[bytes | None]] | None = None
    """The values of each key's column, for rows of a Parquet file, which has no `records`."""

    @property
    def size(self) -> int:
        """Bytes of raw input (after decompression) in this batch."""
        if self.columns is not None:
            return sum(len(value) for column in self.columns for value in column if value)
        return sum(map(len, self.records))

    def digest(self) -> bytes:
        """Return what tells these records from others."""
        digest = hashlib.sha256(self.source.encode())
        for record in self.records:
            digest.update(record)
        for column in self.columns or ():
            for value in column:
                digest.update(repr(value).encode())
        return digest.digest()

    @property
    def unit(self) -> str:
        """What messages call a record."""
        return "line" if self.columns is None else "row"


@dataclass
class ReadLog:
    """How far `read_batches` has read: counted in bytes as they are stored, that is compressed."""

    stored_bytes: int = 0
    sha256: dict[str, str] = field(default_factory=dict)
    """Of each input that was read to its end, by the name that messages show."""
    empty_files: list[str] = field(default_factory=list)
    """Inputs with nothing in them; a compressed one may still have bytes."""

    def report_empty(self, name: str) -> None:
        """Note an input with nothing in it, and say so."""
        self.empty_files.append(name)
        print(f"{name} is empty", file=sys.stderr, flush=True)


class _Metered(io.RawIOBase):
    """A file that counts and digests what is read from it, once, from its start to its end."""

    def __init__(self, stream: BinaryIO, log: ReadLog) -> None:
        self._stream = stream
        self._log = log
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._stream.readinto(buffer)  # type: ignore[attr-defined]
        self.digest.update(memoryview(buffer)[:count])
        self._log.stored_bytes += count
        return int(count)


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used, and why."""

    source: str
    line: int
    reason: str
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.source}, {self.unit} {self.line}: {self.reason}"


class BadRecordPolicy:
    """Decides what a bad record does: `fail` raises `UserError` at the first, `skip` reports on stderr and counts."""

    def __init__(self, action: str = "fail") -> None:
        if action not in ("fail", "skip"):
            raise UserError(f"what to do with a bad line is either fail or skip, not {action!r}")
        self.action = action
        self.skipped = 0

    def handle(self, bad: BadRecord) -> None:
        """Raise `UserError`, or count the record and report the first few."""
        if self.action == "fail":
            raise UserError(f"{bad}; mend it, or leave such records out with --on-bad-line skip")
        self.skipped += 1
        if self.skipped <= MAXIMUM_REPORTED_BAD_RECORDS:
            print(f"skipped {bad}", file=sys.stderr, flush=True)
        if self.skipped == MAXIMUM_REPORTED_BAD_RECORDS:
            print("further skipped records are counted, not shown", file=sys.stderr, flush=True)


class _Unusable(Exception):
    """Why one record cannot be used; `line_offset` counts lines from the record's first."""

    def __init__(self, reason: str, line_offset: int = 0) -> None:
        super().__init__(reason)
        self.line_offset = line_offset


def is_text_file(path: str) -> bool:
    """Whether `path` is a text file that forms one document (as opposed to lines of JSON)."""
    return _content_suffix(path) == TEXT_SUFFIX


def expand_inputs(inputs: Sequence[str]) -> list[str]:
    """Return the files that `inputs` (files, globs, directories, or "-" for JSON lines on standard input) name.

    The order is that of `inputs`; within a glob or a directory it is alphabetical, so it never depends on the file
    system. Directories are searched recursively for .jsonl, .txt and .parquet files, hidden ones excluded.

    Raises:
        UserError: an input does not exist, matches nothing, has an unknown suffix, or names a file twice.
    """
    paths: list[str] = []
    for item in inputs:
        paths.extend(_expand(item))
    seen: set[str] = set()
    for path in paths:
        real = path if path == STANDARD_INPUT else os.path.realpath(path)
        if real in seen:
            raise UserError(f"{path} is named twice by --input; name every file once")
        seen.add(real)
    return paths


def _files_below(directory: str) -> list[str]:
    """Return all files below a directory, through links too; a directory that is reached twice counts once."""
    found: list[str] = []
    seen: set[str] = set()
    for folder, folders, names in os.walk(directory, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        found += [os.path.join(folder, name) for name in names]
    return found


def _expand(item: str) -> list[str]:
    if item == STANDARD_INPUT:
        return [item]
    if os.path.isdir(item):
        found = _files_below(item)
        shown = [path for path in found if not any(part.startswith(".") for part in _parts_below(path, item))]
        kept = sorted(path for path in shown if _content_suffix(path) in (".jsonl", TEXT_SUFFIX, PARQUET_SUFFIX))
        if not kept:
            raise UserError(f"the directory {item} holds no .jsonl, .txt or .parquet file")
        return kept
    if os.path.exists(item):
        matches = [item]
    elif glob.has_magic(item):
        matches = sorted(path for path in glob.glob(item, recursive=True) if not os.path.isdir(path))
        if not matches:
            raise UserError(f"no file matches the input pattern {item}")
    else:
        folder = os.path.dirname(item) or "."
        others = os.listdir(folder) if os.path.isdir(folder) else []
        raise UserError(f"the input {item} does not exist{nearest(os.path.basename(item), others)}")
    for path in matches:
        if _content_suffix(path) is None:
            raise UserError(f"the input {path} has an unknown kind; names must end in {READABLE}")
    return matches


def _parts_below(path: str, folder: str) -> list[str]:
    return os.path.relpath(path, folder).split(os.sep)


def _content_suffix(path: str) -> str | None:
    """The suffix below any compression suffix if it is one we read, else None."""
    name = path.lower()
    if name.endswith(PARQUET_SUFFIX):
        return PARQUET_SUFFIX
    for compression in COMPRESSION_SUFFIXES:
        name = name.removesuffix(compression)
    return next((suffix for suffix in (*JSON_SUFFIXES, TEXT_SUFFIX) if name.endswith(suffix)), None)


def read_batches(paths: Iterable[str], keys: Sequence[str], log: ReadLog | None = None) -> Iterator[Batch]:
    """Yield the raw records of `paths` in order; of Parquet files, the columns `keys`. `log` is kept up to date.

    Raises:
        UserError: a file cannot be read or decompressed, or a Parquet file lacks a column of text that `keys` names.
    """
    log = ReadLog() if log is None else log
    for path in paths:
        name = "standard input" if path == STANDARD_INPUT else path
        try:
            if _content_suffix(path) == PARQUET_SUFFIX:
                yield from _parquet_batches(path, keys, log)
                continue
            with _open_raw(path) as raw:
                metered = _Metered(raw, log)
                stream = _decompressed(path, io.BufferedReader(metered, BATCH_BYTES))
                batches: Iterable[Batch] = _line_batches(stream, name)
                if is_text_file(path):
                    batches = [Batch(name, 1, [_read_whole(stream, name)], is_text=True)]
                has_content = False
                for batch in batches:
                    has_content |= any(batch.records)
                    yield batch
                if not has_content:
                    log.report_empty(name)
                log.sha256[name] = metered.digest.hexdigest()
        except UserError:
            raise
        except Exception as error:  # each decompressor has exceptions of its own; only reading happens in this block
            detail = error.strerror if isinstance(error, OSError) and error.strerror else error
            said = " ".join(str(detail).split())
            raise UserError(f"cannot read {name}: {said}; copy it again, or leave it out of --input") from error


def _open_raw(path: str) -> contextlib.AbstractContextManager[BinaryIO]:
    return contextlib.nullcontext(sys.stdin.buffer) if path == STANDARD_INPUT else open(path, "rb")


def _decompressed(path: str, stored: io.BufferedReader) -> BinaryIO:
    if path.lower().endswith(".gz"):
        return cast(BinaryIO, gzip.open(stored, "rb"))
    if path.lower().endswith(".zst"):
        try:
            from backports import zstd  # the standard library's compression.zstd, for Python before 3.14
        except ImportError as error:
            raise UserError(f"reading {path} needs a package: pip install backports.zstd") from error
        return cast(BinaryIO, zstd.open(stored, "rb"))
    return stored


def _read_whole(stream: BinaryIO, name: str) -> bytes:
    content = stream.read(MAXIMUM_TEXT_FILE_BYTES + 1)
    if len(content) > MAXIMUM_TEXT_FILE_BYTES:
        raise UserError(
            f"{name} is one document of more than {MAXIMUM_TEXT_FILE_BYTES >> 20} MiB, which must fit in memory; "
            "split it, or store its documents as lines of a .jsonl file"
        )
    return content.removeprefix(codecs.BOM_UTF8)


def _line_batches(stream: BinaryIO, name: str) -> Iterator[Batch]:
    first, size, records = 1, 0, []
    for number, line in enumerate(stream, start=1):
        records.append(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
        size += len(line)
        if size >= BATCH_BYTES:
            yield Batch(name, first, records, is_text=False)
            first, size, records = number + 1, 0, []
    if records:
        yield Batch(name, first, records, is_text=False)


def _parquet_batches(path: str, keys: Sequence[str], log: ReadLog) -> Iterator[Batch]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"reading {path} needs a package: pip install pyarrow") from error
    with open(path, "rb") as stream:  # parts are read in any order, so the digest takes a pass of its own
        log.sha256[path] = hashlib.file_digest(stream, "sha256").hexdigest()
    before, stored = log.stored_bytes, os.path.getsize(path)
    with parquet.ParquetFile(path, buffer_size=BATCH_BYTES, pre_buffer=False) as file:
        schema, metadata = file.schema_arrow, file.metadata
        for key in keys:
            if key not in schema.names:
                raise UserError(f"{path} has no column {key!r}{nearest(key, schema.names)}; see --json-keys")
            kind = schema.field(key).type
            kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
                raise UserError(f"the column {key!r} of {path} holds {kind} and not text; name another by --json-keys")
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema in keys)
        rows = max(1, BATCH_BYTES * metadata.num_rows // max(size, 1))
        first = 1
        for table in file.iter_batches(min(rows, MAXIMUM_BATCH_ROWS), columns=list(keys), use_threads=False):
            # as bytes, so that text that is not UTF-8 is one bad row
            columns = [table.column(key).cast(pyarrow.large_string()).cast(pyarrow.large_binary()) for key in keys]
            log.stored_bytes = before + stored * (first - 1 + table.num_rows) // metadata.num_rows
            yield Batch(path, first, [], is_text=False, columns=[column.to_pylist() for column in columns])
            first += table.num_rows


def parse_batch(batch: Batch, keys: Sequence[str]) -> Iterator[tuple[int, list[str]] | BadRecord]:
    """Yield, for each record of `batch`, its line number and one text per key, or why it cannot be used.

    Blank lines of a JSON file are not records. A text file gives the same text for every key.
    """
    if batch.columns is not None:
        for row, values in enumerate(zip(*batch.columns, strict=True), start=batch.first_line):
            try:
                yield row, [_parse_value(value, key) for value, key in zip(values, keys, strict=True)]
            except _Unusable as error:
                yield BadRecord(batch.source, row, str(error), batch.unit)
        return
    for offset, record in enumerate(batch.records):
        line = batch.first_line + offset
        if not batch.is_text and not record.strip():
            continue
        try:
            texts = [_decode(record)] * len(keys) if batch.is_text else _parse_json(record, keys)
        except _Unusable as error:
            yield BadRecord(batch.source, line + error.line_offset, str(error))
        else:
            yield line, texts


def _decode(record: bytes) -> str:
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError as error:
        before = record[: error.start]
        column = error.start - (before.rfind(b"\n") + 1) + 1
        reason = f"not valid UTF-8 (0x{record[error.start]:02x} at byte {column} of the line)"
        raise _Unusable(reason, before.count(b"\n")) from None


def _parse_value(value: bytes | None, key: str) -> str:
    if value is None:
        raise _Unusable(f"the value of {key!r} is not a string but null")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"0x{value[error.start]:02x} at byte {error.start + 1}"
        raise _Unusable(f"the value of {key!r} is not valid UTF-8 ({reason})") from None


def _parse_json(record: bytes, keys: Sequence[str]) -> list[str]:
    try:
        value = json.loads(_decode(record))
    except json.JSONDecodeError as error:
        raise _Unusable(f"not valid JSON ({error.msg} at character {error.pos + 1})") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, brackets nested too deep
        raise _Unusable(f"not usable JSON ({error})") from None
    if not isinstance(value, dict):
        raise _Unusable(f"not a JSON object but a {type(value).__name__}")
    texts = []
    for key in keys:
        if key not in value:
            raise _Unusable(f"no key {key!r}{nearest(key, value)}")
        text = value[key]
        if not isinstance(text, str):
            raise _Unusable(f"the value of {key!r} is not a string but {type(text).__name__}")
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
                raise _Unusable(f"the value of {key!r} holds an unpaired surrogate, not a character") from None
        texts.append(text)
    return texts


def iterate_texts(paths: Iterable[str], key: str, policy: BadRecordPolicy) -> Iterator[str]:
    """Yield the documents of `paths`, bad records handled by `policy`.

    Raises:
        UserError: a file cannot be read, or a record is bad and the policy is to fail.
    """
    for batch in read_batches(paths, [key]):
        for record in parse_batch(batch, [key]):
            if isinstance(record, BadRecord):
                policy.handle(record)
            else:
                yield record[1][0]
