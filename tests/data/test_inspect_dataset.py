"""Counts are those of the documents, and damage is found wherever it is."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from megagate.data.index_file import open_index
from megagate.data.inspect_dataset import check, document, document_lengths, main, statistics
from megagate.errors import UserError
from tests.data.datasets import read_dataset, write_dataset

DOCUMENTS = [[5, 6, 7], [], [8], list(range(100, 109)), [9, 9]]
HEADER_BYTES = 34


def test_counts(tmp_path: Path) -> None:
    counts = statistics(open_index(write_dataset(tmp_path / "data", DOCUMENTS)))
    assert counts == {
        "documents": 5,
        "sequences": 5,
        "tokens": 15,
        "dtype": "uint16",
        "empty_documents": 1,
        "length": {"minimum": 0, "median": 2.0, "mean": 3.0, "maximum": 9},
        "histogram": {0: 1, 1: 1, 2: 2, 8: 1},
    }


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=np.int32)
    builder.add_document(np.array([1, 2, 3]), [1, 2])
    builder.add_document(np.array([], int), [])
    builder.add_document(np.array([4, 5]), [2])
    builder.finalize(str(tmp_path / "data.idx"))
    index = open_index(str(tmp_path / "data"))
    check(index)
    assert document_lengths(index).tolist() == [3, 0, 2]
    assert [document(index, number).tolist() for number in range(3)] == [[1, 2, 3], [], [4, 5]]
    assert read_dataset(index.prefix) == [[1, 2, 3], [], [4, 5]]


def test_a_document_is_shown_as_text(tmp_path: Path, tokenizer, model_path, capsys) -> None:
    texts = ["def f(x): return x", "import os"]
    prefix = write_dataset(tmp_path / "data", [tokenizer.tokenize(text) for text in texts])
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model_path]
    assert main([prefix, "--document", "1", *flags]) == 0
    assert capsys.readouterr().out == texts[1] + "\n"
    assert main([prefix, "--document", "0"]) == 0
    assert capsys.readouterr().out.split() == [str(token) for token in tokenizer.tokenize(texts[0])]
    with pytest.raises(UserError, match="has documents 0 to 1, no document 2"):
        main([prefix, "--document", "2"])
    assert main([prefix, "--validate", *flags]) == 0
    capsys.readouterr()
    assert main([prefix, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 2
    assert main([prefix]) == 0
    assert "2 documents, 2 sequences" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "layout", "value", "message"),
    [
        (HEADER_BYTES + 4, "<i", -1, "sequence 1 has -1 tokens"),
        (HEADER_BYTES, "<i", 4, "sequence 1 begins at byte 6, but those before it end at 8"),
        (HEADER_BYTES + 4 * 5 + 8 * 2, "<q", 2, "sequence 2 begins at byte 2"),
        (HEADER_BYTES + 12 * 5, "<q", 1, "the first document begins with sequence 1"),
        (HEADER_BYTES + 12 * 5 + 8 * 2, "<q", 4, "document 2 ends before it begins"),
    ],
)
def test_damage_is_found(tmp_path: Path, place: int, layout: str, value: int, message: str) -> None:
    prefix = write_dataset(tmp_path / "data", DOCUMENTS)
    check(open_index(prefix))
    content = bytearray((tmp_path / "data.idx").read_bytes())
    struct.pack_into(layout, content, place, value)
    (tmp_path / "data.idx").write_bytes(content)
    with pytest.raises(UserError, match=message):
        check(open_index(prefix))
    if place >= HEADER_BYTES + 12 * 5:  # where documents begin, without which they have no lengths
        with pytest.raises(UserError, match=message):
            main([prefix])


def test_a_token_outside_the_vocabulary_is_found(tmp_path: Path) -> None:
    index = open_index(write_dataset(tmp_path / "data", DOCUMENTS))
    check(index, 109)
    with pytest.raises(UserError, match="has the token 108 at place 12, outside a vocabulary of 108"):
        check(index, 108)


def test_only_files_of_text_are_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="s3://data/a is remote; only files are handled here, so copy it first"):
        open_index("s3://data/a")
    prefix = write_dataset(tmp_path / "data", DOCUMENTS)
    with open(f"{prefix}.idx", "ab") as file:
        file.write(bytes(len(DOCUMENTS)))
    with pytest.raises(UserError, match=r"data\.idx has a mode for each sequence, as multimodal data have"):
        open_index(prefix)
