"""Which files an input names, how documents are read from them, and what is said about bad ones."""

import gzip
import io
import json
import os
import sys

import pytest

from megagate.data import corpus
from megagate.data.corpus import BadRecordPolicy, expand_inputs, iterate_texts, read_batches
from megagate.errors import UserError


def texts_of(*inputs, key="text", action="fail"):
    return list(iterate_texts(expand_inputs([str(item) for item in inputs]), key, BadRecordPolicy(action)))


def test_links_to_directories_are_followed_once(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "b.txt").write_text("b")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "more").symlink_to(elsewhere)
    (folder / "again").symlink_to(folder)  # without an end, if it were followed for ever
    found = expand_inputs([str(folder)])
    assert [os.path.relpath(path, folder) for path in found] == ["a.txt", "more/b.txt"]


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
    (tmp_path / "data.csv").write_text("x")
    (tmp_path / "empty").mkdir()
    cases = {
        "corpus.json": r"corpus.json does not exist; did you mean corpus.jsonl\?",
        "*.txt": r"no file matches the input pattern .*\*.txt",
        "data.csv": r"data.csv has an unknown kind; names must end in .parquet, or in .jsonl, .json or .txt",
        "empty": r"the directory .*empty holds no .jsonl, .txt or .parquet file",
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
    batches = list(read_batches([str(tmp_path / "a.jsonl")], ["text"]))
    assert b"".join(line for batch in batches for line in batch.records) == "".join(lines).encode()
    assert all(batch.size < 100 + max(map(len, lines)) for batch in batches)
    for batch in batches:
        assert batch.records[0].decode() == lines[batch.first_line - 1]


def test_a_text_file_too_large_for_one_document_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAXIMUM_TEXT_FILE_BYTES", 10)
    (tmp_path / "a.txt").write_text("x" * 11)
    with pytest.raises(UserError, match=r"store its documents as lines of a \.jsonl file"):
        texts_of(tmp_path / "a.txt")


def write_parquet(path, columns, **options):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, **options)


def test_parquet_rows_are_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BATCH_BYTES", 2000)
    texts = [f"document {number} \u00e9 \U0001f600" * (number % 5) for number in range(1000)]
    (tmp_path / "in").mkdir()
    write_parquet(tmp_path / "in" / "b.parquet", {"n": range(1000), "text": texts}, row_group_size=300)
    (tmp_path / "in" / "a.txt").write_text("first")
    assert texts_of(tmp_path / "in") == ["first", *texts]
    assert texts_of(tmp_path / "in" / "*.parquet") == texts
    batches = list(read_batches([str(tmp_path / "in" / "b.parquet")], ["text"]))
    assert len(batches) > 10
    assert sum(batch.size for batch in batches) == sum(len(text.encode()) for text in texts)
    assert [batch.first_line for batch in batches[:2]] == [1, 1 + len(batches[0].columns[0])]


@pytest.mark.parametrize("kind", ["large_string", "string_view", "dictionary"])
def test_other_parquet_columns_of_text(kind, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    types = {"dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
    wanted = types[kind] if kind in types else getattr(pyarrow, kind)()
    write_parquet(tmp_path / "a.parquet", {"text": pyarrow.array(["a", "", "a"]).cast(wanted)})
    assert texts_of(tmp_path / "a.parquet") == ["a", "", "a"]


def test_bad_parquet_rows_are_reported_with_their_number(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    binary = pyarrow.array([b"a", b"\xff", None, b"b"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 4, binary.buffers())
    write_parquet(tmp_path / "a.parquet", {"text": text})
    with pytest.raises(
        UserError, match=r"a\.parquet, row 2: the value of 'text' is not valid UTF-8 \(0xff at byte 1\)"
    ):
        texts_of(tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet", action="skip") == ["a", "b"]
    write_parquet(tmp_path / "a.parquet", {"text": ["a", None]})
    with pytest.raises(UserError, match=r"a\.parquet, row 2: the value of 'text' is not a string but null"):
        texts_of(tmp_path / "a.parquet")


def test_parquet_files_that_cannot_be_used(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    write_parquet(path, {"tex": ["a"], "text": [1]})
    with pytest.raises(UserError, match=r"the column .text. of .*a\.parquet holds int64 and not text"):
        texts_of(path)
    write_parquet(path, {"tex": ["a" * 1000]})
    with pytest.raises(UserError, match=r"a\.parquet has no column 'text'; did you mean tex\?"):
        texts_of(path)
    write_parquet(path, {"text": ["a" * 1000]})
    whole = path.read_bytes()
    for broken in (whole[:-10], b"", b"\0" * 100 + whole[100:], b"PAR1" + b"\0" * 50 + whole[54:]):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=r"cannot read .*a\.parquet: [^\n]+$"):
            texts_of(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"a\.parquet needs a package: pip install pyarrow"):
        texts_of(path)
