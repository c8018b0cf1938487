"""Turn raw text into the .bin/.idx pairs that Megatron trains on.

    python tools/preprocess_data.py --input corpus/*.jsonl --output-prefix data/corpus --append-eod \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --workers 16

writes data/corpus_text_document.bin and .idx; train with `--data-path data/corpus_text_document`. The flags are those
of Megatron's own tool. What differs: the bytes never depend on `--workers`, a bad record is reported with its file and
line, a dead worker is an error and not a hang, and the output appears only when it is whole.

A job that is interrupted after `SAVE_SECONDS` or more goes on where it was when the same command is given again.

Memory: `ITEMS_PER_WORKER` batches of about 1 MiB per worker, whatever the number of documents.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from megagate.data.corpus import STANDARD_INPUT, BadRecordPolicy, ReadLog, expand_inputs, is_text_file, read_batches
from megagate.data.encode import Encoder
from megagate.data.parallel import map_in_order
from megagate.data.tokenizer import add_tokenizer_arguments, build_tokenizer, describe_tokenizer
from megagate.data.unfinished import Job
from megagate.errors import UserError

PROGRESS_SECONDS = 10.0
MAXIMUM_DEFAULT_WORKERS = 16


class Progress:
    """Prints a line on stderr every `interval` documents, and every `PROGRESS_SECONDS` while batches arrive."""

    def __init__(self, interval: int, paths: Sequence[str]) -> None:
        self.interval = interval
        self.log = ReadLog()
        self.bytes_read = 0
        self.started = self._shown = time.monotonic()
        self._next = interval
        self._before = (0, 0)
        self._total = None if STANDARD_INPUT in paths else sum(map(os.path.getsize, paths))

    def go_on(self, bytes_read: int, tokens: int) -> None:
        """Begin with what an interrupted job has done, which does not count for the rates."""
        self.bytes_read = bytes_read
        self._before = bytes_read, tokens

    def update(self, bytes_read: int, documents: int, tokens: int) -> None:
        """Count `bytes_read` more bytes of text; `documents` and `tokens` are totals."""
        self.bytes_read += bytes_read
        now = time.monotonic()
        if documents < self._next and now - self._shown < PROGRESS_SECONDS:
            return
        self._next, self._shown = (documents // self.interval + 1) * self.interval, now
        seconds = max(now - self.started, 1e-9)
        new_bytes, new_tokens = self.bytes_read - self._before[0], tokens - self._before[1]
        print(
            f"{documents} documents, {self.bytes_read / 1e6:.1f} MB, {new_bytes / 1e6 / seconds:.2f} MB/s, "
            f"{new_tokens / seconds:.0f} tokens/s{self._remaining(seconds)}",
            file=sys.stderr,
            flush=True,
        )

    def _remaining(self, seconds: float) -> str:
        """Per cent and time left, from the stored bytes that were read; a few MB of these are still being worked on."""
        if not self._total or not self.log.stored_bytes:
            return ""
        done = min(self.log.stored_bytes / self._total, 1.0)
        left = timedelta(seconds=round(seconds * (1 - done) / done))
        return f", {100 * done:.1f} %, {left} left"


def output_prefixes(output_prefix: str, keys: Sequence[str]) -> list[str]:
    """The dataset prefixes for `keys`, named as Megatron's tool names them: PREFIX_KEY_document.

    Raises:
        UserError: a key is named twice or cannot be part of a file name.
    """
    if len(set(keys)) != len(keys):
        raise UserError(f"--json-keys names a key twice: {' '.join(keys)}")
    for key in keys:
        if not key or "/" in key or "\0" in key:
            raise UserError(f"the JSON key {key!r} cannot be part of a file name; rename it in the data")
    return [f"{output_prefix}_{key}_document" for key in keys]


def check_job(inputs: Sequence[str], output_prefix: str, keys: Sequence[str], overwrite: bool) -> list[str]:
    """Check what can be checked at once and return the input files.

    Raises:
        UserError: an input is missing, output exists, or the keys do not suit the inputs.
    """
    paths = expand_inputs(inputs)
    text = next((path for path in paths if is_text_file(path)), None)
    if text and len(keys) > 1:
        raise UserError(f"{text} is plain text and has no keys; preprocess it apart, with a single --json-keys")
    for prefix in output_prefixes(output_prefix, keys):
        for path in (prefix + ".bin", prefix + ".idx"):
            if os.path.exists(path) and not overwrite:
                raise UserError(f"{path} exists; choose another --output-prefix or give --overwrite")
    return paths


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    tokenizer: Any,
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    max_document_tokens: int | None = None,
    workers: int = 1,
    log_interval: int = 10000,
    overwrite: bool = False,
    restart: bool = False,
    on_bad_line: str = "fail",
) -> dict[str, Any]:
    """Tokenize `inputs` into one dataset per JSON key and return the counts.

    Args:
        inputs: files, globs, directories or "-", see `corpus.expand_inputs`.
        tokenizer: from `build_tokenizer`.
        append_eod: end every document with the tokenizer's end-of-document token.
        max_document_tokens: cut a longer document into several of this many tokens (the last has the rest), which
            then are documents of their own; only the last gets the end-of-document token, which counts as one token.
        workers: processes that tokenize; the output does not depend on it.
        log_interval: documents between progress lines.
        restart: begin anew where an interrupted job could be continued.
        on_bad_line: "fail" or "skip".

    Returns:
        `malformed_records`, `bytes_read`, `seconds`, `dtype`, `vocab_size`, `append_eod`, and under `datasets`, for
        each prefix, `documents` (parts counted one by one), `tokens` (end-of-document tokens included),
        `empty_documents`, `cut_documents` and `sha256` of the two files; `inputs_sha256` has the digest of each input
        as it is stored.

    Raises:
        UserError: bad input or output; then no output file is left or changed. What a long job has done is kept in
            OUTPUT_PREFIX_unfinished, and the next call with the same arguments goes on from there.
    """
    paths = check_job(inputs, output_prefix, json_keys, overwrite)
    policy = BadRecordPolicy(on_bad_line)
    if max_document_tokens is not None and max_document_tokens < 2:
        raise UserError(f"--max-document-tokens must be at least 2, not {max_document_tokens}")
    encoder = Encoder(tokenizer, json_keys, append_eod, max_document_tokens)
    progress = Progress(max(log_interval, 1), paths)
    asked = {
        "inputs": paths,
        "tokenizer": describe_tokenizer(tokenizer),
        "json_keys": list(json_keys),
        "append_eod": append_eod,
        "max_document_tokens": max_document_tokens,
    }
    prefixes = output_prefixes(output_prefix, json_keys)
    try:
        with Job(Path(f"{output_prefix}_unfinished"), asked, encoder.dtype, len(json_keys), restart) as job:
            if job.malformed and on_bad_line == "fail":
                raise UserError(
                    f"{job.directory} holds an unfinished job that left out {job.malformed} malformed records; go on "
                    "with it by --on-bad-line skip, or give --restart to begin anew"
                )
            policy.skipped = job.malformed
            progress.go_on(job.bytes_read, sum(dataset.counts.tokens for dataset in job.datasets))
            remaining = job.remaining(read_batches(paths, json_keys, progress.log))
            with contextlib.closing(map_in_order(encoder, remaining, workers)) as batches:
                for batch in batches:
                    for bad in batch.bad:
                        policy.handle(bad)
                    job.add(batch.texts, batch.digest, batch.bytes_read, len(batch.bad))
                    counts = [dataset.counts for dataset in job.datasets]
                    progress.update(batch.bytes_read, counts[0].documents, sum(one.tokens for one in counts))
            counts = [dataset.counts for dataset in job.datasets]
            for one, key in zip(counts, json_keys, strict=True):
                if not one.documents:
                    raise UserError(
                        f"nothing to write: no document has text under {key!r} "
                        f"({one.empty} empty, {policy.skipped} malformed records skipped); "
                        "correct --input or --json-keys"
                    )
            digests = job.publish(prefixes)
    except OSError as error:
        raise UserError(
            f"cannot write {output_prefix}_*_document: {error.strerror or error}; make room there, or choose another "
            "--output-prefix"
        ) from error
    return {
        "datasets": {
            prefix: {
                "documents": one.documents,
                "tokens": one.tokens,
                "empty_documents": one.empty,
                "cut_documents": one.cut,
                "sha256": digest,
            }
            for prefix, one, digest in zip(prefixes, counts, digests, strict=True)
        },
        "inputs_sha256": progress.log.sha256,
        "empty_files": progress.log.empty_files,
        "malformed_records": policy.skipped,
        "bytes_read": progress.bytes_read,
        "seconds": round(time.monotonic() - progress.started, 3),
        "dtype": encoder.dtype.name,
        "vocab_size": encoder.vocab_size,
        "json_keys": list(json_keys),
        "append_eod": append_eod,
        "max_document_tokens": max_document_tokens,
    }


def describe(summary: dict[str, Any]) -> str:
    """One line per dataset of what :func:`preprocess` returned."""
    return "\n".join(
        f"wrote {prefix}.bin and .idx: {counts['documents']} documents, {counts['tokens']} tokens "
        f"({summary['dtype']}), skipped {counts['empty_documents']} empty documents and "
        f"{summary['malformed_records']} malformed records, {summary['seconds']:.1f} s"
        for prefix, counts in summary["datasets"].items()
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tools/preprocess_data.py."""
    parser = argparse.ArgumentParser(
        prog="preprocess_data.py",
        description="Turn raw text into the .bin/.idx files that training reads.",
        allow_abbrev=False,
    )
    available = min(len(os.sched_getaffinity(0)), MAXIMUM_DEFAULT_WORKERS)
    parser.add_argument(
        "--input", nargs="+", required=True, help=".jsonl, .txt (.gz, .zst) or .parquet files, globs, folders, -"
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], help="keys of a .jsonl line, columns of .parquet (text)"
    )
    parser.add_argument("--output-prefix", required=True, help="writes OUTPUT_PREFIX_KEY_document.bin and .idx")
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    parser.add_argument("--max-document-tokens", type=_positive, help="cut longer documents into several")
    parser.add_argument("--workers", type=_positive, default=available, help=f"processes that tokenize ({available})")
    parser.add_argument("--log-interval", type=_positive, default=10000, help="documents per progress line (10000)")
    parser.add_argument("--on-bad-line", choices=("fail", "skip"), default="fail", help="for malformed lines (fail)")
    parser.add_argument("--overwrite", action="store_true", help="replace existing output")
    parser.add_argument("--restart", action="store_true", help="begin anew instead of going on with unfinished work")
    parser.add_argument("--write-summary", action="store_true", help="also write OUTPUT_PREFIX_summary.json")
    tokenizer_names = add_tokenizer_arguments(parser)
    options = parser.parse_args(arguments)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    check_job(options.input, options.output_prefix, options.json_keys, options.overwrite)
    summary_path = options.output_prefix + "_summary.json" if options.write_summary else None
    if summary_path and os.path.exists(summary_path) and not options.overwrite:
        raise UserError(f"{summary_path} exists; choose another --output-prefix or give --overwrite")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # Hugging Face threads do not survive a fork
    tokenizer = build_tokenizer(**{name: getattr(options, name) for name in tokenizer_names})
    summary = preprocess(
        options.input,
        options.output_prefix,
        tokenizer,
        json_keys=options.json_keys,
        append_eod=options.append_eod,
        max_document_tokens=options.max_document_tokens,
        workers=options.workers,
        log_interval=options.log_interval,
        overwrite=options.overwrite,
        restart=options.restart,
        on_bad_line=options.on_bad_line,
    )
    if summary_path:
        _write_json(summary_path, {**{name: getattr(options, name) for name in tokenizer_names}, **summary})
    print(describe(summary))
    return 0


def _write_json(path: str, content: dict[str, Any]) -> None:
    temporary = f"{path}.partial-{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(content, indent=2) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"the datasets are complete, but cannot write {path}: {error.strerror}; tools/inspect_dataset.py shows the "
            "counts"
        ) from error
