"""Preprocessing beside its limit, the tokenizer's batch encoder on the same text in memory, and its peak memory.

    python benchmarks/preprocess.py

Both take turns, with as many processes; a ratio is the median of the ratios of neighbours. Importing and building the
tokenizer are not timed, starting worker processes is, on both sides.
"""

import glob
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import psutil

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


def seconds_raw(tokenizer, parts: Sequence[Sequence[str]]) -> float:
    """Time to encode `parts`, one process each; the ids stay where they are."""
    started = time.perf_counter()
    if len(parts) == 1:
        encode_raw(tokenizer, parts[0])
    else:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=encode_raw, args=(tokenizer, part)) for part in parts]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
    return time.perf_counter() - started


def split(texts: Sequence[str], count: int) -> list[list[str]]:
    """`count` consecutive parts of about as many characters."""
    owners = np.cumsum([len(text) for text in texts]) * count // (sum(map(len, texts)) + 1)
    return [[text for text, owner in zip(texts, owners, strict=True) if owner == part] for part in range(count)]


def peak_memory(command: Sequence[str]) -> int:
    """Largest memory of a command and its children in bytes, shared pages divided between those that share them."""
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        total = 0
        for one in [process, *_children(process)]:
            try:
                total += one.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        peak = max(peak, total)
        time.sleep(SAMPLE_SECONDS)
    assert process.returncode == 0
    return peak


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


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
        print("| workers | tokens/s | MB/s | limit, MB/s | ratio |\n|---|---|---|---|---|")
        for workers in (1, 2):
            parts = split(texts, workers)
            ours, limits, tokens = [], [], 0
            for _ in range(ROUNDS):
                limits.append(seconds_raw(tokenizer, parts))
                started = time.perf_counter()
                summary = preprocess([path], output, tokenizer, workers=workers, overwrite=True, log_interval=10**9)
                ours.append(time.perf_counter() - started)
                tokens = sum(counts["tokens"] for counts in summary["datasets"].values())
            ratio = statistics.median(limit / our for limit, our in zip(limits, ours, strict=True))
            our, limit = statistics.median(ours), statistics.median(limits)
            rates = f"{tokens / our:,.0f} | {megabytes / our:.2f} | {megabytes / limit:.2f}"
            print(f"| {workers} | {rates} | {ratio:.2f} |", flush=True)
        peaks = []
        for times in (1, 10):
            path = write(os.path.join(folder, f"corpus{times}.jsonl"), python_sources(MEMORY_BYTES) * times)
            command = [sys.executable, "tools/preprocess_data.py", "--input", path, "--output-prefix", output]
            command += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model + ".model"]
            peaks.append(peak_memory([*command, "--workers", "2", "--overwrite"]))
        print(
            f"peak memory with 2 workers: {peaks[0] / 1e6:.0f} MB for {MEMORY_BYTES / 1e6:.0f} MB of text, "
            f"{peaks[1] / 1e6:.0f} MB for ten times that ({100 * (peaks[1] / peaks[0] - 1):+.1f} %)"
        )


if __name__ == "__main__":
    main()
