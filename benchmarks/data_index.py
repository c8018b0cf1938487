"""Time and memory to open, shuffle and sample the index of a dataset with very many documents.

    python benchmarks/data_index.py [--documents 200000000] [--directory DIR]

The index is synthetic (lengths drawn at random, 512 tokens on average) and the tokens are a hole in a sparse file, so
that only the index's cost is seen. Resident memory is told apart: what the process owns, and pages of mapped files,
which the system takes back when it needs them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megagate.data.index_file import write_index_of_lengths

MEAN_TOKENS = 512
SEQUENCE = 4096
UINT16 = 8
SAMPLES = 1000


def write_dataset(prefix: str, documents: int) -> int:
    """Write an index of random lengths and a .bin file without content; return the number of tokens."""
    lengths = np.random.default_rng(1).integers(1, 2 * MEAN_TOKENS, documents, np.int32)
    with open(prefix + ".idx", "wb") as file:
        write_index_of_lengths(file, UINT16, lengths)
    tokens = int(lengths.sum(dtype=np.int64))
    with open(prefix + ".bin", "wb") as file:
        file.truncate(2 * tokens)
    return tokens


def resident() -> tuple[float, float, float]:
    """Return the megabytes that this process owns, those of mapped files, and the most there were of both."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, mapped, peak = (int(status[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile", "VmHWM"))
    return own, mapped, peak


def measure(prefix: str, documents: int, tokens: int) -> None:
    """Open, shuffle and sample, and print a line about each."""
    import megagate.platform  # noqa: F401  # before Megatron

    # isort: split
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    from megagate.data.tokenizer import build_tokenizer
    from megagate.data.validate import check_indexed_dataset, fingerprint
    from megagate.pretrain.checked_datasets import CheckedGPTDataset, DatasetConfig

    config = DatasetConfig(
        fingerprints=[fingerprint(prefix)],
        random_seed=1,
        sequence_length=SEQUENCE,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=str(Path(prefix).parent / "cache"),
        tokenizer=build_tokenizer("NullTokenizer", vocab_size=60000),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    before = resident()
    print(f"{'':34}{'seconds':>9}{'own MB':>9}{'mapped MB':>11}{'peak MB':>9}    (after the imports)")

    def step(name: str, work: Callable[[], Any]) -> Any:
        started = time.monotonic()
        result = work()
        seconds = time.monotonic() - started
        own, mapped, peak = (now - then for now, then in zip(resident(), before, strict=True))
        print(f"{name:34}{seconds:>9.2f}{own:>9.0f}{mapped:>11.0f}{peak:>9.0f}", flush=True)
        return result

    def dataset() -> CheckedGPTDataset:
        indexed = IndexedDataset(prefix)
        documents_of_split = np.arange(documents, dtype=np.int32)
        return CheckedGPTDataset(indexed, prefix, documents_of_split, tokens // SEQUENCE - 1, Split.train, config)

    def sample(source: CheckedGPTDataset) -> None:
        for place in np.random.default_rng(2).integers(0, len(source), SAMPLES):
            source[int(place)]

    step("check", lambda: check_indexed_dataset(prefix))
    step("open", lambda: IndexedDataset(prefix))
    step("shuffle and write the cache", dataset)
    source = step("open again, with the cache", dataset)
    step(f"read {SAMPLES} random samples", lambda: sample(source))


def main() -> None:
    """Measure in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=200_000_000, help="of the synthetic dataset (200 million)")
    parser.add_argument("--directory", help="where to write; the system's temporary directory if not given")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(**json.loads(options.measure))
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        prefix = str(Path(folder) / "data")
        tokens = write_dataset(prefix, options.documents)
        size = Path(prefix + ".idx").stat().st_size
        print(f"{options.documents:,} documents, {tokens:,} tokens, an index of {size / 1e9:.2f} GB", flush=True)
        what = json.dumps({"prefix": prefix, "documents": options.documents, "tokens": tokens})
        subprocess.run([sys.executable, "-W", "ignore", __file__, "--measure", what], check=True)


if __name__ == "__main__":
    main()
