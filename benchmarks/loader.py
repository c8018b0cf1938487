"""How much of a training step waits for data, how fast loader workers read, and what a sample on disk costs.

    python benchmarks/loader.py [--iterations N] [--workers N] [--directory DIR]

A small gated model trains through the trainer and its data loader, on random tokens in documents of 512 on average;
every wait for the next batch is timed, the first steps are left out. Then the loader reads without a model. At last
samples are read that are not in memory (where the file system forgets them when asked), as megagate reads and as
Megatron does.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megagate.data.index_file import write_index_of_lengths

TOKENS = 128_000_000
VOCABULARY = 8192
MEAN_TOKENS = 512
UINT16 = 8
WARM_UP = 3
SEQUENCE, BATCH = 4096, 4
"""Of the loader alone."""
LOADED = 300
"""Batches."""
COLD_SAMPLES = 30
MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu "
    "--ffn-hidden-size 384 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 192 --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 "
    "--normalization RMSNorm --position-embedding-type rope --gate-preset sdpa-elementwise --seq-length 512 "
    "--max-position-embeddings 512 --micro-batch-size 4 --global-batch-size 4 --lr 1e-3 --eval-iters 0 --split 1,0,0 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --log-interval 1000"
)


def write_dataset(prefix: str) -> None:
    """Write documents of random tokens."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 2 * MEAN_TOKENS, TOKENS // MEAN_TOKENS, np.int32)
    with open(prefix + ".idx", "wb") as file:
        write_index_of_lengths(file, UINT16, lengths)
    with open(prefix + ".bin", "wb") as file:
        generator.integers(0, VOCABULARY - 1, int(lengths.sum()), np.uint16).tofile(file)
        file.flush()
        os.fsync(file.fileno())


class Timed:
    """An iterator that notes how long each item takes."""

    def __init__(self, source: Iterator[Any], waits: list[float]) -> None:
        self._source, self._waits = source, waits

    def __next__(self) -> Any:
        started = time.perf_counter()
        item = next(self._source)
        self._waits.append(time.perf_counter() - started)
        return item


def train(result: str, flags: list[str]) -> None:
    """Train, and write the waits and the times at which steps began, in seconds."""
    import megagate.platform  # noqa: F401  # before Megatron

    # isort: split
    from megagate.pretrain import __main__ as entry
    from megagate.pretrain import train as trainer

    forward_step = trainer.forward_step
    starts: list[float] = []
    waits: list[float] = []

    def timed(iterator: Iterator[Any], model: Any) -> Any:
        starts.append(time.perf_counter())
        return forward_step(Timed(iterator, waits), model)  # type: ignore[arg-type]

    trainer.forward_step = timed
    sys.argv = ["megagate.pretrain", *flags]
    entry.main()
    Path(result).write_text(json.dumps([starts, waits]))


def read(prefix: str, workers: int) -> None:
    """Print what the loader does without a model, and what samples on disk cost."""
    import megagate.platform  # noqa: F401  # before Megatron

    # isort: split
    from megatron.core.datasets.indexed_dataset import IndexedDataset, _MMapBinReader
    from megatron.core.datasets.utils import Split
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler
    from torch.utils.data import DataLoader

    from megagate.data.tokenizer import build_tokenizer
    from megagate.pretrain.checked_datasets import CheckedGPTDataset, DatasetConfig

    config = DatasetConfig(
        random_seed=1,
        sequence_length=SEQUENCE,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=str(Path(prefix).parent / "cache"),
        tokenizer=build_tokenizer("NullTokenizer", vocab_size=VOCABULARY),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = IndexedDataset(prefix)
    documents = np.arange(len(indexed), dtype=np.int32)
    dataset = CheckedGPTDataset(indexed, prefix, documents, TOKENS // SEQUENCE - 1, Split.train, config)

    for name, reader in (("megagate's reads", dataset.dataset.bin_reader), ("Megatron's", None)):
        dataset.dataset.bin_reader = reader or _MMapBinReader(prefix + ".bin")
        descriptor = os.open(prefix + ".bin", os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        places = np.random.default_rng(len(name)).integers(0, len(dataset), COLD_SAMPLES)
        before, started = bytes_read(), time.perf_counter()
        for place in places:
            dataset[int(place)]
        milliseconds = 1000 * (time.perf_counter() - started) / COLD_SAMPLES
        kilobytes = (bytes_read() - before) / COLD_SAMPLES / 1000
        print(f"a sample of {2 * SEQUENCE} bytes on disk, {name}: {milliseconds:.1f} ms, {kilobytes:,.0f} kB read")

    sampler = MegatronPretrainingSampler(len(dataset), 0, BATCH, 0, 1)
    batches = iter(DataLoader(dataset, batch_sampler=sampler, num_workers=workers))
    for _ in range(WARM_UP):
        next(batches)
    started = time.perf_counter()
    for _ in range(LOADED):
        next(batches)
    rate = LOADED * BATCH * SEQUENCE / (time.perf_counter() - started)
    print(f"the loader alone, {workers} worker: {rate / 1e6:.1f} million tokens/s, {BATCH} x {SEQUENCE} at a time")


def bytes_read() -> int:
    """Return what this process has had read from disks."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"])


def main() -> None:
    """Measure in processes of their own, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=40, help="steps of the model (40)")
    parser.add_argument("--workers", type=int, default=1, help="of the loader (1)")
    parser.add_argument("--directory", help="where to write; the system's temporary directory if not given")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        what, first, *rest = options.run
        if what == "train":
            train(first, rest)
        else:
            read(first, options.workers)
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        prefix, result = str(Path(folder) / "data"), str(Path(folder) / "result.json")
        write_dataset(prefix)
        this = [sys.executable, "-W", "ignore", __file__, "--workers", str(options.workers), "--run"]
        subprocess.run([*this, "read", prefix], check=True, stderr=subprocess.DEVNULL)
        flags = [*MODEL.split(), "--data-path", prefix, "--data-cache-path", str(Path(folder) / "cache")]
        flags += ["--train-iters", str(options.iterations), "--num-workers", str(options.workers)]
        flags += ["--tensorboard-dir", folder]
        subprocess.run([*this, "train", result, *flags], check=True, stdout=subprocess.DEVNULL)
        starts, waits = (np.array(times[WARM_UP:]) for times in json.loads(Path(result).read_text()))
    steps = np.diff(starts)
    share = waits[:-1].sum() / steps.sum()
    print(
        f"training, {options.workers} worker: {1000 * np.median(steps):.0f} ms a step, of which "
        f"{1000 * np.median(waits):.2f} ms wait for data; {100 * share:.2f} % of {len(steps)} steps"
    )


if __name__ == "__main__":
    main()
