"""Held-out token files as windows in which every token is predicted once.

The documents of a dataset stand one after the other, as in training, and the stream is cut into windows of
`seq_length` inputs. A window's labels are its inputs moved by one token, and the next window begins `stride` tokens
after it. By default that is `seq_length`, and it begins with the last label of this one:

    stream    a b c d e f g h          seq_length 3, stride 3
    inputs    a b c | d e f | g
    labels    b c d | e f g | h

So all tokens but the very first of a dataset are predicted exactly once, each from at most `seq_length` tokens before
it, which may belong to the documents before its own. The last window is as short as what is left.

With a smaller stride windows overlap, and of the labels of a window only those count that no window before it has
predicted, its last `stride` ones; all of the first window:

    stream    a b c d e f              seq_length 3, stride 1
    inputs    a b c | b c d | c d e
    count     b c d |     e |     f

So a token is still predicted exactly once, and each after the first window from at least `seq_length` - `stride` + 1
tokens before it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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


class Window(NamedTuple):
    """Inputs and labels in one: the inputs are all but the last token, the labels all but the first."""

    tokens: np.ndarray
    """int64 [s + 1], or of several windows [b, s + 1]."""
    counted: Any
    """How many of the last labels count, at least one; of several windows int64 [b]."""


def windows(dataset: Any, seq_length: int, stride: int | None = None) -> Iterator[Window]:
    """Yield the windows of the stream, of `seq_length` + 1 tokens, the last one of 2 at least.

    Args:
        dataset: documents of tokens.
        seq_length: inputs of a window.
        stride: from the beginning of a window to that of the next, at most `seq_length`, which None stands for.
    """
    stride = stride or seq_length
    rest = np.empty(0, np.int64)
    predicted = 0  # of the labels in `rest`
    for index in range(len(dataset)):
        rest = np.concatenate([rest, dataset[index].astype(np.int64)])
        start = 0
        while len(rest) - start > seq_length:
            yield Window(rest[start : start + seq_length + 1], seq_length - predicted)
            predicted = seq_length - stride
            start += stride
        rest = rest[start:]
    if len(rest) - 1 > predicted:
        yield Window(rest, len(rest) - 1 - predicted)


def batches(dataset: Any, seq_length: int, size: int, stride: int | None = None) -> Iterator[Window]:
    """Yield up to `size` windows of equal length at a time."""
    batch: list[Window] = []

    def joined() -> Window:
        return Window(np.stack([window.tokens for window in batch]), np.array([window.counted for window in batch]))

    for window in windows(dataset, seq_length, stride):
        if batch and (len(batch) == size or len(window.tokens) != len(batch[0].tokens)):
            yield joined()
            batch = []
        batch.append(window)
    if batch:
        yield joined()


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
