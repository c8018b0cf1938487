"""decode(dataset) = documents: for any Unicode text, empty documents, any number of workers and any length limit."""

import contextlib
import json
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megagate.data import corpus as corpus_module
from megagate.data.preprocess import preprocess

DOCUMENTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=25)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DOCUMENTS, st.integers(1, 3), st.none() | st.integers(2, 12), st.booleans())
@example(["", "\u2028a\x00\r\n", "", " \t \U0001f600", ""], 2, 2, True)
def test_round_trip(tokenizer, monkeypatch, documents, workers, longest, escape):
    monkeypatch.setattr(corpus_module, "BATCH_BYTES", 100)
    filled = [text for text in documents if text]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        lines = [json.dumps({"text": text}, ensure_ascii=escape) + "\n" for text in [*documents, "last"]]
        Path("in.jsonl").write_bytes("".join(lines).encode())
        options = {"append_eod": True, "max_document_tokens": longest, "workers": workers}
        summary = preprocess(["in.jsonl"], "out", tokenizer, **options)
        dataset = IndexedDataset("out_text_document")  # kept, since sequences are views of its memory
        parts = [sequence.tolist() for sequence in dataset[:]]
        files = [Path(f"out_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]
        preprocess(["in.jsonl"], "out", tokenizer, **{**options, "workers": 1}, overwrite=True)
        assert files == [Path(f"out_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]
    decoded, pending = [], []
    for part in parts:
        assert longest is None or len(part) <= longest
        pending += part
        if pending[-1] == tokenizer.eod:
            decoded.append(tokenizer.detokenize(pending[:-1]))
            pending = []
    assert pending == []
    assert decoded == [*filled, "last"]
    assert summary["datasets"]["out_text_document"]["empty_documents"] == len(documents) - len(filled)
