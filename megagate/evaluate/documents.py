"""Held-out token files as windows in which every token is predicted once.

The documents of a dataset stand one after the other, as in training, and the stream is cut into windows of
`seq_length` inputs. A window's labels are its inputs moved by one token, and the next window begins with the last label
of this one:

    stream    a b c d e f g h          seq_length 3
    inputs    a b c | d e f | g
    labels    b c d | e f g | h

So all tokens but the very first of a dataset are predicted exactly once, each from at most `seq_length` tokens before
it, which may belong to the documents before its own. The last window is as short as what is left.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megagate.data.tokenizer import quiet
from megagate.data.validate import check_indexed_dataset
from megagate.errors import UserError


def open_dataset(prefix: str) -> Any:
    """Return Megatron's IndexedDataset for `prefix`.bin and `prefix`.idx; indexing gives one sequence's tokens.

    Raises:
        UserError: it is missing or damaged.
    """
    check_indexed_dataset(prefix)
    with quiet():
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    return IndexedDataset(prefix)


def count_tokens(dataset: Any) -> int:
    """Return the number of tokens of all documents."""
    return int(dataset.sequence_lengths.sum(dtype=np.int64))


def windows(dataset: Any, seq_length: int) -> Iterator[np.ndarray]:
    """Yield the windows of the stream: int64 arrays of `seq_length` + 1 tokens, the last one of 2 at least.

    A window is inputs and labels in one: the inputs are all but its last token, the labels all but its first.
    """
    rest = np.empty(0, np.int64)
    for index in range(len(dataset)):
        rest = np.concatenate([rest, dataset[index].astype(np.int64)])
        start = 0
        while len(rest) - start > seq_length:
            yield rest[start : start + seq_length + 1]
            start += seq_length
        rest = rest[start:]
    if len(rest) > 1:
        yield rest


def batches(dataset: Any, seq_length: int, size: int) -> Iterator[np.ndarray]:
    """Yield up to `size` windows of equal length at a time: int64 [b, s + 1]."""
    batch: list[np.ndarray] = []
    for window in windows(dataset, seq_length):
        if batch and (len(batch) == size or len(window) != len(batch[0])):
            yield np.stack(batch)
            batch = []
        batch.append(window)
    if batch:
        yield np.stack(batch)


def token_counts(prefix: str, vocabulary_size: int) -> np.ndarray:
    """Return how often each token occurs in a dataset: int64 [vocabulary_size].

    Raises:
        UserError: the dataset is missing or damaged, or holds tokens outside the vocabulary.
    """
    dataset = open_dataset(prefix)
    counts = np.zeros(vocabulary_size, np.int64)
    for index in range(len(dataset)):
        tokens = dataset[index]
        check_vocabulary(tokens, vocabulary_size, prefix)
        counts += np.bincount(tokens, minlength=vocabulary_size)
    return counts


def check_vocabulary(tokens: np.ndarray, vocabulary_size: int, prefix: str) -> None:
    """Raise UserError if a token is none of the model's."""
    if tokens.size and (tokens.max() >= vocabulary_size or tokens.min() < 0):
        strange = tokens.max() if tokens.max() >= vocabulary_size else tokens.min()
        raise UserError(
            f"{prefix} holds the token {strange}, but the model's vocabulary has {vocabulary_size} tokens: "
            "preprocess the text with the tokenizer that the model was trained with"
        )


def text_bytes(dataset: Any, tokenizer: Any, path: Path | str) -> int:
    """Return the UTF-8 bytes of the dataset's text, as the tokenizer gives it back; its end-of-document is no text.

    Raises:
        UserError: the tokenizer cannot decode the tokens.
    """
    total = 0
    for index in range(len(dataset)):
        tokens = dataset[index]
        try:
            text = tokenizer.detokenize(tokens[tokens != tokenizer.eod].tolist())
        except Exception as error:  # every tokenizer library has its own
            raise UserError(f"the tokenizer cannot decode document {index} of {path}: {error}") from error
        total += len(text.encode("utf-8", errors="surrogatepass"))
    return total
