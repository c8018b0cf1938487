"""Small datasets, written by Megatron's own builder."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_dataset(prefix: Path, documents: Sequence[Sequence[int] | np.ndarray], dtype: type = np.uint16) -> str:
    """Write one sequence per document, and return the prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for tokens in documents:
        builder.add_document(np.array(tokens, dtype), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def read_dataset(prefix: str) -> list[list[int]]:
    """Return the tokens of each document, as Megatron reads them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices
    return [
        [int(token) for sequence in range(first, last) for token in dataset[sequence]]
        for first, last in itertools.pairwise(bounds)
    ]
