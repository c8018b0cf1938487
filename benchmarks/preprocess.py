"""Preprocessing beside its limit, the tokenizer's batch encoder on the same text in memory, and its peak memory.

    python benchmarks/preprocess.py

Both take turns, with as many processes; a ratio is the median of the ratios of neighbours. Importing and building the
tokenizer are not timed, starting worker processes is, on both sides. The ratio of CPU time also holds on a machine with
other work, but says nothing about processes that wait. Memory is what the processes own, pages that they
share after a fork counted once: not the libraries' mapped files, of which other processes change the share.
"""

import contextlib
import glob
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil

from megagate.data.index_file import open_index
from megagate.data.preprocess import preprocess
from megagate.data.tokenizer import batch_encoder, build_tokenizer
from megagate.data.train_tokenizer import main as train_tokenizer

ROUNDS = 3
VOCAB_SIZE = 8000
CORPUS_BYTES = 6_000_000
MEMORY_BYTES = 8_000_000  # enough to fill the queue of every worker
SAMPLE_SECONDS = 0.05


def python_sources(size: int) -> list[str]:
    """The standard library's sources, the same ones again where that takes it, about `size` bytes."""
    paths = sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "**", "*.py"), recursive=True))
    texts: list[str] = []
    while size > 0:
        for path in paths:
            if "site-packages" in path:
                continue
            with open(path, encoding="utf-8", errors="ignore") as stream:
                texts.append(stream.read())
            size -= len(texts[-1])
            if size <= 0:
                break
    return texts


def write(path: str, texts: Sequence[str]) -> str:
    with open(path, "w", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return path


def encode_raw(tokenizer, texts: Sequence[str]) -> None:
    batch_encoder(tokenizer)(list(texts))


def encode_parts(tokenizer, parts: Sequence[Sequence[str]]) -> None:
    """Encode `parts`, one process each; the ids stay where they are."""
    if len(parts) == 1:
        encode_raw(tokenizer, parts[0])
        return
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=encode_raw, args=(tokenizer, part)) for part in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def seconds(work: Callable[[], Any]) -> np.ndarray:
    """Elapsed time, and CPU time of this process and its children."""
    started, before = time.perf_counter(), sum(os.times()[:4])
    work()
    return np.array([time.perf_counter() - started, sum(os.times()[:4]) - before])


def split(texts: Sequence[str], count: int) -> list[list[str]]:
    """`count` consecutive parts of about as many characters."""
    owners = np.cumsum([len(text) for text in texts]) * count // (sum(map(len, texts)) + 1)
    return [[text for text, owner in zip(texts, owners, strict=True) if owner == part] for part in range(count)]


def peak_memory(command: Sequence[str]) -> int:
    """Largest memory that a command and its children own, in bytes."""
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            peak = max(peak, sum(map(owned, [process, *process.children(recursive=True)])))
        time.sleep(SAMPLE_SECONDS)
    assert process.returncode == 0
    return peak


def owned(process: psutil.Process) -> int:
    """Memory of a process that is no mapped file, in bytes, shared pages divided between those that share them."""
    try:
        with open(f"/proc/{process.pid}/smaps_rollup", encoding="ascii") as stream:
            return sum(int(line.split()[1]) << 10 for line in stream if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def main() -> None:
    texts = python_sources(CORPUS_BYTES)
    megabytes = sum(len(text.encode("utf-8")) for text in texts) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        path = write(os.path.join(folder, "corpus.jsonl"), texts)
        model = os.path.join(folder, "tokenizer")
        options = ["--vocab-size", str(VOCAB_SIZE), "--max-bytes", "2000000"]
        train_tokenizer(["--input", path, "--output-prefix", model, *options])
        tokenizer = build_tokenizer("SentencePieceTokenizer", model + ".model")
        output = os.path.join(folder, "out")
        print("| workers | tokens/s | MB/s | limit, MB/s | ratio | of CPU time |\n|---|---|---|---|---|---|")
        for workers in (1, 2):
            parts = split(texts, workers)
            work = partial(preprocess, [path], output, tokenizer, workers=workers, overwrite=True, log_interval=10**9)
            limits, ours = [], []
            for _ in range(ROUNDS):
                limits.append(seconds(partial(encode_parts, tokenizer, parts)))
                ours.append(seconds(work))
            ratio, of_cpu = np.median(np.array(limits) / ours, axis=0)
            limit, our = np.median(limits, axis=0)[0], np.median(ours, axis=0)[0]
            tokens = open_index(f"{output}_text_document").tokens
            rates = f"{tokens / our:,.0f} | {megabytes / our:.2f} | {megabytes / limit:.2f}"
            print(f"| {workers} | {rates} | {ratio:.2f} | {of_cpu:.2f} |", flush=True)
        peaks = []
        text = python_sources(MEMORY_BYTES)
        for texts in (text[:1], text, text * 10):
            path = write(os.path.join(folder, "memory.jsonl"), texts)
            command = [sys.executable, "tools/preprocess_data.py", "--input", path, "--output-prefix", output]
            command += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model + ".model"]
            peaks.append(peak_memory([*command, "--workers", "2", "--overwrite"]))
        print(
            f"peak memory with 2 workers: {peaks[0] / 1e6:.0f} MB for one document, {peaks[1] / 1e6:.0f} MB for "
            f"{MEMORY_BYTES / 1e6:.0f} MB of text, {peaks[2] / 1e6:.0f} MB for ten times that "
            f"({100 * (peaks[2] / peaks[1] - 1):+.1f} %)"
        )


if __name__ == "__main__":
    main()
