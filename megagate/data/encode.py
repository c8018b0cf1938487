"""From a batch of raw records to token ids: the work of one `preprocess` worker process."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megagate.data.corpus import BadRecord, Batch, parse_batch
from megagate.data.tokenizer import batch_encoder, quiet
from megagate.errors import UserError


@dataclass
class EncodedTexts:
    """The tokens of one key's documents in a batch."""

    tokens: np.ndarray
    """All tokens, one document after the other, in the dataset's dtype."""
    lengths: np.ndarray
    """Tokens of each document, int64; never zero."""
    empty: int
    """Documents left out because they had no tokens."""
    cut: int
    """Documents that were cut into several, each of which counts as a document in `lengths`."""


@dataclass
class EncodedBatch:
    """What became of one `Batch`."""

    texts: list[EncodedTexts]
    """One per JSON key."""
    bad: list[BadRecord]
    bytes_read: int
    digest: bytes
    """Of the batch."""


class Encoder:
    """Tokenizes batches; what worker processes run. Its result depends on the batch alone."""

    def __init__(
        self, tokenizer: Any, keys: Sequence[str], append_eod: bool, max_document_tokens: int | None = None
    ) -> None:
        with quiet():
            from megatron.core.datasets.indexed_dataset import DType
        self.tokenizer = tokenizer
        self.encode_batch = batch_encoder(tokenizer)
        self.keys = list(keys)
        self.max_document_tokens = max_document_tokens
        self.vocab_size = int(tokenizer.vocab_size)
        self.dtype = np.dtype(DType.optimal_dtype(self.vocab_size))
        if self.vocab_size - 1 > np.iinfo(self.dtype).max:
            raise UserError(
                f"a vocabulary of {self.vocab_size} has ids too large for {self.dtype.name}, in which tokens are "
                "stored: use a smaller one"
            )
        self.end_of_document = _end_of_document(tokenizer, self.vocab_size) if append_eod else None

    def __call__(self, batch: Batch) -> EncodedBatch:
        bad: list[BadRecord] = []
        lines: list[int] = []
        records: list[list[str]] = []
        for record in parse_batch(batch, self.keys):
            if isinstance(record, BadRecord):
                bad.append(record)
            else:
                lines.append(record[0])
                records.append(record[1])
        refused: dict[int, str] = {}
        encoded = []
        for index in range(len(self.keys)):
            ids, lengths, reasons = self._encode([texts[index] for texts in records])
            encoded.append((ids, lengths))
            refused = reasons | refused
        kept = np.ones(len(records), dtype=bool)
        kept[list(refused)] = False
        for position, reason in refused.items():
            said = f"the tokenizer cannot encode it ({reason})"
            bad.append(BadRecord(batch.source, lines[position], said, batch.unit))
        bad.sort(key=lambda one: one.line)
        return EncodedBatch(
            [self._finish(ids, lengths, kept) for ids, lengths in encoded], bad, batch.size, batch.digest()
        )

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
        """Tokenize `texts`.

        Returns:
            All ids, one text after the other, int64 (or another integer type); the number of ids of each text, int64;
            and, by position, why a text cannot be encoded.
        """
        refused: dict[int, str] = {}
        filled = [position for position, text in enumerate(texts) if text]
        try:
            tokens = self.encode_batch([texts[position] for position in filled]) if filled else []
        except ValueError:  # find out which ones
            tokens = []
            for position in filled:
                try:
                    tokens.append(self.tokenizer.tokenize(texts[position]))
                except ValueError as error:
                    refused[position] = str(error)
                    tokens.append([])
        lengths = np.zeros(len(texts), dtype=np.int64)
        lengths[filled] = [len(one) for one in tokens]
        ids = _concatenate(tokens)
        outside = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        owners = np.searchsorted(np.cumsum(lengths), outside, side="right")
        for position, first in zip(*np.unique(owners, return_index=True), strict=True):
            token = ids[outside[first]]
            refused[int(position)] = f"token {token} is outside the vocabulary of {self.vocab_size}"
        return ids, lengths, refused

    def _finish(self, ids: np.ndarray, lengths: np.ndarray, kept: np.ndarray) -> EncodedTexts:
        """Leave out what is not `kept` (one bool per text) and what is empty; append the end-of-document token."""
        if not kept.all():
            ids, lengths = ids[np.repeat(kept, lengths)], lengths[kept]
        empty = int(np.count_nonzero(lengths == 0))
        lengths = lengths[lengths > 0]
        if self.end_of_document is None:
            return self._cut(ids.astype(self.dtype), lengths, empty)
        lengths = lengths + 1
        ends = np.cumsum(lengths) - 1
        is_text = np.ones(len(ids) + len(lengths), dtype=bool)
        is_text[ends] = False
        tokens = np.empty(len(is_text), dtype=self.dtype)
        tokens[is_text] = ids
        tokens[ends] = self.end_of_document
        return self._cut(tokens, lengths, empty)

    def _cut(self, tokens: np.ndarray, lengths: np.ndarray, empty: int) -> EncodedTexts:
        """Cut what is longer than `max_document_tokens`; no part is an end-of-document token alone."""
        longest = self.max_document_tokens
        if longest is None:
            return EncodedTexts(tokens, lengths, empty, cut=0)
        parts = -(-lengths // longest)
        last = np.cumsum(parts) - 1
        cut_lengths = np.full(int(parts.sum()), longest, dtype=np.int64)
        cut_lengths[last] = lengths - (parts - 1) * longest
        if self.end_of_document is not None:
            alone = last[(parts > 1) & (cut_lengths[last] == 1)]
            cut_lengths[alone - 1] -= 1
            cut_lengths[alone] += 1
        return EncodedTexts(tokens, cut_lengths, empty, cut=int(np.count_nonzero(parts > 1)))


def _concatenate(tokens: Sequence[Any]) -> np.ndarray:
    """The ids of all texts, one text after the other."""
    if all(isinstance(one, np.ndarray) for one in tokens):
        return np.concatenate(tokens) if len(tokens) else np.empty(0, dtype=np.int64)
    return np.fromiter(itertools.chain.from_iterable(tokens), dtype=np.int64, count=sum(map(len, tokens)))


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
