"""From a batch of raw records to token ids: the work of one `preprocess` worker process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megagate.data.corpus import BadRecord, Batch, parse_batch
from megagate.data.tokenizer import quiet
from megagate.errors import UserError


@dataclass
class EncodedTexts:
    """The tokens of one key's documents in a batch."""

    tokens: np.ndarray
    """All tokens, one document after the other, in the dataset's dtype."""
    lengths: list[int]
    """Tokens of each document; never zero."""
    empty: int
    """Documents left out because they had no tokens."""


@dataclass
class EncodedBatch:
    """What became of one `Batch`."""

    texts: list[EncodedTexts]
    """One per JSON key."""
    bad: list[BadRecord]
    bytes_read: int


class Encoder:
    """Tokenizes batches; what worker processes run. Its result depends on the batch alone."""

    def __init__(self, tokenizer: Any, keys: Sequence[str], append_eod: bool) -> None:
        with quiet():
            from megatron.core.datasets.indexed_dataset import DType
        self.tokenizer = tokenizer
        self.keys = list(keys)
        self.vocab_size = int(tokenizer.vocab_size)
        self.dtype = np.dtype(DType.optimal_dtype(self.vocab_size))
        self.end_of_document = _end_of_document(tokenizer, self.vocab_size) if append_eod else None

    def __call__(self, batch: Batch) -> EncodedBatch:
        documents: list[list[np.ndarray]] = [[] for _ in self.keys]
        empty = [0] * len(self.keys)
        bad = []
        for record in parse_batch(batch, self.keys):
            if isinstance(record, BadRecord):
                bad.append(record)
                continue
            line, texts = record
            try:
                encoded = [self._encode(text) for text in texts]
            except ValueError as error:
                bad.append(BadRecord(batch.source, line, f"the tokenizer cannot encode it ({error})"))
                continue
            for index, tokens in enumerate(encoded):
                if tokens is None:
                    empty[index] += 1
                else:
                    documents[index].append(tokens)
        encoded_texts = [
            EncodedTexts(np.concatenate(kept) if kept else np.empty(0, self.dtype), [len(one) for one in kept], count)
            for kept, count in zip(documents, empty, strict=True)
        ]
        return EncodedBatch(encoded_texts, bad, batch.size)

    def _encode(self, text: str) -> np.ndarray | None:
        """The tokens of one document, or None if it has none.

        Raises:
            ValueError: the tokenizer refuses the text or gives a token outside its vocabulary.
        """
        tokens = self.tokenizer.tokenize(text) if text else []
        if not len(tokens):
            return None
        if self.end_of_document is not None:
            tokens = [*tokens, self.end_of_document]
        ids = np.array(tokens, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            outside = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise ValueError(f"token {outside} is outside the vocabulary of {self.vocab_size}")
        return ids.astype(self.dtype)


def _end_of_document(tokenizer: Any, vocab_size: int) -> int:
    try:
        token = tokenizer.eod
    except (AttributeError, NotImplementedError, TypeError, KeyError):
        token = None
    if token is None or not 0 <= token < vocab_size:
        raise UserError(
            f"--append-eod needs a tokenizer with an end-of-document token, but this one's is {token} "
            f"in a vocabulary of {vocab_size}"
        )
    return int(token)
