"""Which files an input names, how documents are read from them, and what is said about bad ones."""

import gzip
import io
import json
import sys

import pytest

from megagate.data import corpus
from megagate.data.corpus import BadRecordPolicy, expand_inputs, iterate_texts, read_batches
from megagate.errors import UserError


def texts_of(*inputs, key="text", action="fail"):
    return list(iterate_texts(expand_inputs([str(item) for item in inputs]), key, BadRecordPolicy(action)))


def test_a_directory_is_searched_recursively_in_alphabetical_order(tmp_path):
    for name in ("b.txt", "a.jsonl", "sub/c.txt.gz", "notes.md", "package.json", ".hidden.txt", ".git/d.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    assert expand_inputs([str(tmp_path)]) == [str(tmp_path / name) for name in ("a.jsonl", "b.txt", "sub/c.txt.gz")]


def test_globs_are_sorted_and_inputs_keep_their_order(tmp_path):
    for name in ("b1.txt", "b0.txt", "a.json"):
        (tmp_path / name).write_text("x")
    found = expand_inputs([str(tmp_path / "b*.txt"), str(tmp_path / "a.json"), "-"])
    assert found == [str(tmp_path / "b0.txt"), str(tmp_path / "b1.txt"), str(tmp_path / "a.json"), "-"]


def test_inputs_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("x")
    (tmp_path / "data.parquet").write_text("x")
    (tmp_path / "empty").mkdir()
    cases = {
        "corpus.json": r"corpus.json does not exist; did you mean corpus.jsonl\?",
        "*.txt": r"no file matches the input pattern .*\*.txt",
        "data.parquet": r"data.parquet has an unknown kind; names must end in .jsonl, .json or .txt",
        "empty": r"the directory .*empty holds no .jsonl or .txt file",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message):
            expand_inputs([str(tmp_path / name)])
    with pytest.raises(UserError, match=r"corpus\.jsonl is named twice"):
        expand_inputs([str(tmp_path), str(tmp_path / "corpus.jsonl")])


def test_text_files_keep_every_byte_but_the_byte_order_mark(tmp_path):
    content = "\r\n first\tline \n\n\u00e9\r"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert texts_of(tmp_path / "a.txt") == [content]


def test_json_lines_with_byte_order_mark_blank_lines_and_windows_line_ends(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "\\ud83d\\ude00", "n": 1}')
    assert texts_of(tmp_path / "a.jsonl") == ["a", "\U0001f600"]


def test_standard_input_is_json_lines(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "a"}\n{"text": 1}\n')))
    with pytest.raises(UserError, match="standard input, line 2: the value of 'text' is not a string but int"):
        texts_of("-")


def test_compressed_files(tmp_path):
    lines = "".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(1000)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    assert len(texts_of(tmp_path / "a.jsonl.gz")) == 1000
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-20])
    with pytest.raises(UserError, match=r"cannot read .*a.jsonl.gz: Compressed file ended before"):
        texts_of(tmp_path / "a.jsonl.gz")
    (tmp_path / "a.jsonl.gz").write_bytes(lines)
    with pytest.raises(UserError, match=r"cannot read .*a.jsonl.gz: Not a gzipped file"):
        texts_of(tmp_path / "a.jsonl.gz")


def test_zstandard_files(tmp_path):
    zstd = pytest.importorskip("backports.zstd")
    lines = "".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(1000)).encode()
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(lines))
    assert len(texts_of(tmp_path / "a.jsonl.zst")) == 1000
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(lines)[:-20])
    with pytest.raises(UserError, match=r"cannot read .*a.jsonl.zst: Compressed file ended before"):
        texts_of(tmp_path / "a.jsonl.zst")


def test_zstandard_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "backports", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    with pytest.raises(UserError, match=r"needs a package: pip install backports\.zstd"):
        texts_of(tmp_path / "a.jsonl.zst")


BAD_LINES = {
    '{"text": "a"': r"not valid JSON \(Expecting ',' delimiter at character 14\)",
    "[1]": "not a JSON object but a list",
    '{"tex": "a"}': r"no key 'text'; did you mean tex\?",
    '{"text": null}': "the value of 'text' is not a string but NoneType",
    '{"text": "\\ud800"}': "the value of 'text' holds an unpaired surrogate",
    '{"text": ' + "9" * 5000 + "}": "not usable JSON",
    '{"text": ' + "[" * 100000 + "}": "not usable JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20])
def test_a_bad_line_is_reported_with_file_and_line_number(line, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "good"}\n' + line + '\n{"text": "also good"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 3: " + BAD_LINES[line]):
        texts_of(path)
    assert texts_of(path, action="skip") == ["good", "also good"]


def test_invalid_utf8_is_reported_with_line_and_column(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\nbad \xff here\n")
    with pytest.raises(UserError, match=r"a.txt, line 2: not valid UTF-8 \(0xff at byte 5 of the line\)"):
        texts_of(tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"a.jsonl, line 2: not valid UTF-8 \(0xff at byte 11 of the line\)"):
        texts_of(tmp_path / "a.jsonl")


def test_skipped_records_are_counted_and_the_first_few_shown(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("bad\n" * 25)
    policy = BadRecordPolicy("skip")
    assert list(iterate_texts([str(tmp_path / "a.jsonl")], "text", policy)) == []
    assert policy.skipped == 25
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 11
    assert shown[-1] == "further skipped records are counted, not shown"


def test_batches_are_small_and_know_their_line_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BATCH_BYTES", 100)
    lines = [json.dumps({"text": "x" * number}) + "\n" for number in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    batches = list(read_batches([str(tmp_path / "a.jsonl")]))
    assert b"".join(line for batch in batches for line in batch.records) == "".join(lines).encode()
    assert all(batch.size < 100 + max(map(len, lines)) for batch in batches)
    for batch in batches:
        assert batch.records[0].decode() == lines[batch.first_line - 1]


def test_a_text_file_too_large_for_one_document_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAXIMUM_TEXT_FILE_BYTES", 10)
    (tmp_path / "a.txt").write_text("x" * 11)
    with pytest.raises(UserError, match=r"store its documents as lines of a \.jsonl file"):
        texts_of(tmp_path / "a.txt")
