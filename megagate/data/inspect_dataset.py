"""What a dataset holds, and whether its two files agree.

python tools/inspect_dataset.py data/web_text_document [--document 3 --tokenizer-type ...] [--validate] [--json]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from megagate.data.index_file import Index, chunks, first_inconsistency, open_index
from megagate.data.tokenizer import add_tokenizer_arguments, build_tokenizer
from megagate.errors import UserError

BAR = 40
"""Characters of the longest bar of a histogram."""


def statistics(index: Index) -> dict[str, Any]:
    """Return the counts of a dataset and the lengths of its documents.

    Returns:
        `documents`, `sequences`, `tokens`, `dtype`, `empty_documents`; `length` with `minimum`, `median`, `mean` and
        `maximum`, in tokens; `histogram`, which gives for each power of two the number of documents that have at least
        so many tokens and less than twice as many (0 for empty ones).
    """
    lengths = document_lengths(index)
    histogram: dict[int, int] = {}
    for _, chunk in chunks(lengths):
        bits = np.frexp(chunk.astype(np.float64))[1]  # 0 for 0, else 1 + the power of two
        for bit, count in zip(*np.unique(bits, return_counts=True), strict=True):
            lower = 1 << (int(bit) - 1) if bit else 0
            histogram[lower] = histogram.get(lower, 0) + int(count)
    return {
        "documents": index.documents,
        "sequences": len(index.lengths),
        "tokens": index.tokens,
        "dtype": index.dtype.name,
        "empty_documents": histogram.get(0, 0),
        "length": {
            "minimum": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": index.tokens / index.documents,
            "maximum": int(lengths.max()),
        },
        "histogram": dict(sorted(histogram.items())),
    }


def document_lengths(index: Index) -> np.ndarray:
    """Return the tokens of each document, int32 or int64 [documents].

    Raises:
        UserError: the index contradicts itself, so that a document may have no length.
    """
    each_has_one = all(
        np.array_equal(chunk, np.arange(start, start + len(chunk))) for start, chunk in chunks(index.boundaries)
    )
    if each_has_one:  # as preprocessing writes them
        return index.lengths
    check(index)
    ends = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])
    return np.diff(ends[index.boundaries])


def document(index: Index, number: int) -> np.ndarray:
    """Return the tokens of a document, counted from 0.

    Raises:
        UserError: there are fewer documents.
    """
    if not 0 <= number < index.documents:
        raise UserError(f"{index.prefix} has documents 0 to {index.documents - 1}, no document {number}")
    first, last = index.boundaries[number : number + 2]
    tokens = np.memmap(index.prefix + ".bin", mode="r", dtype=index.dtype) if index.tokens else np.empty(0, index.dtype)
    start = int(index.pointers[first]) // index.dtype.itemsize if first < last else 0
    return tokens[start : start + int(index.lengths[first:last].sum(dtype=np.int64))]


def check(index: Index, vocab_size: int | None = None) -> None:
    """Check all of a dataset.

    Raises:
        UserError: the index contradicts itself or the .bin file, or a token is not in a vocabulary of `vocab_size`.
    """
    wrong = first_inconsistency(index)
    if wrong:
        raise UserError(f"{index.prefix} is damaged: {wrong}; preprocess it again")
    if vocab_size is None or not index.tokens:
        return
    for start, chunk in chunks(np.memmap(index.prefix + ".bin", mode="r", dtype=index.dtype)):
        outside = np.flatnonzero((chunk < 0) | (chunk >= vocab_size))
        if len(outside):
            raise UserError(
                f"{index.prefix}.bin has the token {chunk[outside[0]]} at place {start + outside[0]}, outside a "
                f"vocabulary of {vocab_size}: it was made with another tokenizer; preprocess with this one"
            )


def describe(counts: dict[str, Any]) -> str:
    """Return what `statistics` found, as text."""
    length = counts["length"]
    lines = [
        f"{counts['documents']:,} documents, {counts['sequences']:,} sequences, {counts['tokens']:,} tokens "
        f"({counts['dtype']}), {counts['empty_documents']:,} empty documents",
        f"tokens of a document: {length['minimum']:,} to {length['maximum']:,}, median {length['median']:,.0f}, "
        f"mean {length['mean']:,.1f}",
    ]
    largest = max(counts["histogram"].values())
    for lower, count in counts["histogram"].items():
        bar = "#" * max(1, round(BAR * count / largest))
        lines.append(f"{lower:>12,} {'or more' if lower else '       '} {count:>14,} {bar}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tools/inspect_dataset.py."""
    parser = argparse.ArgumentParser(
        prog="inspect_dataset.py", description="Say what a .bin/.idx dataset holds.", allow_abbrev=False
    )
    parser.add_argument("prefix", help="the dataset without its ending, as --data-path takes it")
    parser.add_argument("--document", type=int, metavar="I", help="show document I, counted from 0")
    parser.add_argument(
        "--validate", action="store_true", help="check all of both files, tokens too if a vocabulary is given"
    )
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    names = add_tokenizer_arguments(parser, required=False)
    options = parser.parse_args(arguments)
    index = open_index(options.prefix)
    tokenizer = None
    if options.tokenizer_type is not None:
        tokenizer = build_tokenizer(**{name: getattr(options, name) for name in names})
    if options.validate:
        vocab_size = tokenizer.vocab_size if tokenizer else options.vocab_size
        check(index, vocab_size)
        unchecked = "" if vocab_size else "; its tokens were not checked, for want of a vocabulary"
        print(f"{options.prefix} is whole{unchecked}", file=sys.stderr)
    if options.document is not None:
        tokens = document(index, options.document).tolist()
        print(tokenizer.detokenize(tokens) if tokenizer else " ".join(map(str, tokens)))
        return 0
    counts = statistics(index)
    print(json.dumps(counts) if options.json else describe(counts))
    return 0
