"""Datasets hold exactly the documents, do not depend on the number of workers, and appear whole or not at all."""

import gc
import gzip
import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from megagate.data import corpus as corpus_module
from megagate.data import parallel
from megagate.data import preprocess as module
from megagate.data.preprocess import main, preprocess
from megagate.data.tokenizer import build_tokenizer
from megagate.data.validate import check_indexed_dataset
from megagate.errors import UserError


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(corpus_module, "BATCH_BYTES", 200)


@pytest.fixture(scope="module")
def numbers():
    return build_tokenizer("NullTokenizer", vocab_size=1000)


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


def digest_of(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def read(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    check_indexed_dataset(str(prefix))
    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [sequence.copy() for sequence in dataset[:]]


def test_datasets_decode_to_the_documents(corpus, documents, tokenizer, tmp_path):
    summary = preprocess([corpus], str(tmp_path / "out"), tokenizer, append_eod=True)
    sequences = read(tmp_path / "out_text_document")
    assert [tokenizer.detokenize(sequence[:-1].tolist()) for sequence in sequences] == documents
    assert all(sequence[-1] == tokenizer.eod for sequence in sequences)
    assert all(sequence.dtype == np.uint16 for sequence in sequences)
    counts = summary["datasets"][str(tmp_path / "out_text_document")]
    tokens = sum(map(len, sequences))
    digests = {suffix: digest_of(tmp_path / f"out_text_document{suffix}") for suffix in (".bin", ".idx")}
    assert counts.pop("sha256") == digests
    assert summary["inputs_sha256"] == {corpus: digest_of(corpus)}
    assert counts == {"documents": len(documents), "tokens": tokens, "empty_documents": 0, "cut_documents": 0}
    assert summary["bytes_read"] == os.path.getsize(corpus)


def test_without_append_eod_there_are_only_the_documents_tokens(corpus, documents, tokenizer, tmp_path):
    preprocess([corpus], str(tmp_path / "out"), tokenizer)
    sequences = read(tmp_path / "out_text_document")
    assert [sequence.tolist() for sequence in sequences] == [tokenizer.tokenize(text) for text in documents]


def test_bytes_do_not_depend_on_the_number_of_workers(tokenizer, tmp_path, small_batches, capfd):
    lines = [{"text": "word " * (number % 17), "title": f"title {number}"} for number in range(200)]
    lines[50] = {"title": "no text"}
    path = write_lines(tmp_path / "in.jsonl", lines)
    results = []
    for workers in (1, 2, 3):
        folder = tmp_path / str(workers)
        summary = preprocess(
            [path],
            str(folder / "out"),
            tokenizer,
            json_keys=["text", "title"],
            append_eod=True,
            workers=workers,
            on_bad_line="skip",
        )
        assert sorted(os.listdir(folder)) == [
            f"out_{key}_document.{suffix}" for key in ("text", "title") for suffix in ("bin", "idx")
        ]
        results.append({name: (folder / name).read_bytes() for name in os.listdir(folder)})
        assert summary["malformed_records"] == 1
        assert [counts["empty_documents"] for counts in summary["datasets"].values()] == [12, 0]
    assert results[0] == results[1] == results[2]
    assert len(read(tmp_path / "1" / "out_title_document")) == 199


def test_text_files_are_one_document_each_and_directories_are_read(tokenizer, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.txt").write_text(" two\n\nparagraphs ")
    (tmp_path / "in" / "a.txt").write_text("first")
    (tmp_path / "in" / "c.txt").write_text("")
    summary = preprocess([str(tmp_path / "in")], str(tmp_path / "out"), tokenizer)
    sequences = read(tmp_path / "out_text_document")
    assert [tokenizer.detokenize(sequence.tolist()) for sequence in sequences] == ["first", " two\n\nparagraphs "]
    assert summary["datasets"][str(tmp_path / "out_text_document")]["empty_documents"] == 1


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("limit", [2, 3, 7, 1000])
def test_long_documents_are_cut(append_eod, limit, numbers, tmp_path, small_batches):
    """The stream of tokens stays the same; every part but the last two is as long as allowed, none is EOD alone."""
    texts = [" ".join(map(str, range(length))) for length in range(1, 30)]
    path = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    summary = preprocess(
        [path], str(tmp_path / "out"), numbers, append_eod=append_eod, max_document_tokens=limit, workers=2
    )
    parts = iter([sequence.tolist() for sequence in read(tmp_path / "out_text_document")])
    cut = 0
    for length in range(1, 30):
        whole = [*range(length), numbers.eod] if append_eod else list(range(length))
        pieces = [next(parts)]
        while sum(map(len, pieces)) < len(whole):
            pieces.append(next(parts))
        assert [token for piece in pieces for token in piece] == whole
        assert len(pieces) == -(-len(whole) // limit)
        assert all(len(piece) == limit for piece in pieces[:-2])
        assert max(map(len, pieces)) <= limit
        assert not append_eod or len(pieces[-1]) > 1
        cut += len(pieces) > 1
    assert next(parts, None) is None
    assert summary["datasets"][str(tmp_path / "out_text_document")]["cut_documents"] == cut
    assert (cut > 0) == (limit < 1000)


def test_large_vocabularies_use_four_bytes(tmp_path):
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=70000)
    path = write_lines(tmp_path / "in.jsonl", [{"text": "69999 1"}])
    preprocess([path], str(tmp_path / "out"), tokenizer)
    (sequence,) = read(tmp_path / "out_text_document")
    assert (sequence.tolist(), sequence.dtype) == ([69999, 1], np.int32)
    with pytest.raises(UserError, match="a vocabulary of 2147483649 has ids too large for int32"):
        preprocess([path], str(tmp_path / "huge"), build_tokenizer("NullTokenizer", vocab_size=2**31 + 1))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "5 1000",
            r"in\.jsonl, line 42: the tokenizer cannot encode it \(token 1000 is outside the vocabulary",
        ),
        ("-1", r"in\.jsonl, line 42: the tokenizer cannot encode it \(token -1 is outside"),
        ("one", r"in\.jsonl, line 42: the tokenizer cannot encode it \(invalid literal"),
        (7, r"in\.jsonl, line 42: the value of 'text' is not a string but int; mend it, or leave such records out"),
    ],
)
def test_the_first_bad_record_ends_the_work_and_leaves_nothing(
    text, message, workers, numbers, tmp_path, small_batches
):
    lines = [{"text": "1 2"} for _ in range(60)]
    lines[41] = {"text": text}
    lines[55] = {"text": "later"}
    path = write_lines(tmp_path / "in.jsonl", lines)
    with pytest.raises(UserError, match=message):
        preprocess([path], str(tmp_path / "out"), numbers, workers=workers)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_an_empty_corpus_is_an_error_and_leaves_nothing(numbers, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": ""}, {"text": ""}, {"other": "1"}])
    with pytest.raises(UserError, match=r"no document has text under 'text' \(2 empty, 1 malformed records skipped\)"):
        preprocess([path], str(tmp_path / "out"), numbers, on_bad_line="skip")
    (tmp_path / "in.jsonl").write_text("")
    with pytest.raises(UserError, match="nothing to write"):
        preprocess([path], str(tmp_path / "out"), numbers)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_empty_files_are_said_and_counted(numbers, tmp_path, capsys):
    full = write_lines(tmp_path / "a.jsonl", [{"text": "1 2"}])
    empty = [tmp_path / name for name in ("b.jsonl", "c.jsonl.gz", "d.txt")]
    empty[0].touch()
    empty[1].write_bytes(gzip.compress(b""))
    empty[2].touch()
    summary = preprocess([full, *map(str, empty)], str(tmp_path / "out"), numbers)
    assert summary["empty_files"] == [str(path) for path in empty]
    assert all(f"{path} is empty\n" in capsys.readouterr().err for path in empty[:1])
    assert summary["datasets"][str(tmp_path / "out_text_document")]["documents"] == 1


def test_existing_output_is_kept_unless_overwrite_is_given(numbers, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1 2"}])
    preprocess([path], str(tmp_path / "out"), numbers)
    write_lines(tmp_path / "in.jsonl", [{"text": "3"}])
    with pytest.raises(UserError, match=r"out_text_document.bin exists; .* give --overwrite"):
        preprocess([path], str(tmp_path / "out"), numbers)
    assert [sequence.tolist() for sequence in read(tmp_path / "out_text_document")] == [[1, 2]]
    (tmp_path / "bad.jsonl").write_text("bad\n")
    with pytest.raises(UserError, match="not valid JSON"):
        preprocess([str(tmp_path / "bad.jsonl")], str(tmp_path / "out"), numbers, overwrite=True)
    assert [sequence.tolist() for sequence in read(tmp_path / "out_text_document")] == [[1, 2]]
    preprocess([path], str(tmp_path / "out"), numbers, overwrite=True)
    assert [sequence.tolist() for sequence in read(tmp_path / "out_text_document")] == [[3]]


def test_requests_that_make_no_sense(numbers, tmp_path):
    (tmp_path / "in.txt").write_text("1")
    for keys, message in [
        (["a", "b"], "in.txt is plain text and has no keys"),
        (["a", "a"], "names a key twice"),
        (["a/b"], "cannot be part of a file name"),
    ]:
        inputs = [str(tmp_path / "in.txt")] if keys == ["a", "b"] else [write_lines(tmp_path / "in.jsonl", [{}])]
        with pytest.raises(UserError, match=message):
            preprocess(inputs, str(tmp_path / "out"), numbers, json_keys=keys)


def test_append_eod_needs_a_token_for_it(tmp_path):
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=10, null_tokenizer_eod_id=10)
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    with pytest.raises(UserError, match="--append-eod needs a tokenizer with an end-of-document token"):
        preprocess([path], str(tmp_path / "out"), tokenizer, append_eod=True)


def test_output_that_cannot_be_written(numbers, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/out_"):
        preprocess([path], str(tmp_path / "file" / "out"), numbers)


def test_a_full_disk_leaves_nothing(tmp_path):
    """A limit on the size of files stands for it: the write fails in the same place."""
    path = write_lines(tmp_path / "in.jsonl", [{"text": " ".join(["7"] * 1000)}] * 50)
    arguments = ["--input", path, "--output-prefix", tmp_path / "out", "--tokenizer-type", "NullTokenizer"]
    finished = subprocess.run(
        [*command(*arguments, "--vocab-size", 1000, "--workers", 1)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000)),
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert finished.returncode == 2
    assert re.fullmatch(r"error: cannot write .*_document: File too large; make room there, .*\n", finished.stderr)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_progress_goes_to_standard_error(numbers, tmp_path, small_batches, capsys):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1 2"} for _ in range(100)])
    preprocess([path], str(tmp_path / "out"), numbers, log_interval=30)
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert len(lines) == 3
    number = r"\d+ documents, 0\.0 MB, [\d.]+ MB/s, \d+ tokens/s, ([\d.]+) %, 0:00:0\d left"
    percents = [float(re.fullmatch(number, line)[1]) for line in lines]
    assert percents == sorted(percents)
    assert 30 <= percents[0] < percents[1] <= percents[2] <= 100


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_reading_is_followed_and_digested_in_stored_bytes(suffix, tmp_path, small_batches):
    texts = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(10000)]
    path = tmp_path / f"in{suffix}"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").table({"text": texts}), path)
    else:
        path.write_bytes(gzip.compress(lines) if suffix.endswith("gz") else lines)
        if suffix.endswith("zst"):
            path.write_bytes(pytest.importorskip("backports.zstd").compress(lines))
    log = corpus_module.ReadLog()
    seen = [log.stored_bytes for _ in corpus_module.read_batches([str(path)], ["text"], log)]
    assert 0 < seen[0] < seen[-1] <= path.stat().st_size
    assert log.stored_bytes == path.stat().st_size
    assert log.sha256 == {str(path): digest_of(path)}


class Dies:
    """A tokenizer whose process is killed at one document, as the kernel does when memory runs out."""

    vocab_size = 10

    def tokenize(self, text):
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return [1]


def test_a_killed_worker_is_an_error_and_not_a_hang(tmp_path, small_batches):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "die" if number == 300 else "x"} for number in range(600)])
    with pytest.raises(UserError, match="a worker process died"):
        preprocess([path], str(tmp_path / "out"), Dies(), workers=2)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_workers_never_run_far_ahead_of_the_reader_of_their_results():
    taken = []

    def items():
        for number in range(100):
            taken.append(number)
            yield number

    results = parallel.map_in_order(abs, items(), 2)
    for expected in range(50):
        assert next(results) == expected
        assert len(taken) <= expected + 2 * parallel.ITEMS_PER_WORKER
    results.close()


def test_workers_do_not_copy_what_they_inherit():
    """A collection of garbage writes to each object that it looks at."""
    assert list(parallel.map_in_order(lambda _: gc.get_freeze_count() > 10000, range(4), 2)) == [True] * 4


def command(*arguments):
    return [sys.executable, "tools/preprocess_data.py", *map(str, arguments)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_the_command(corpus, model_path, documents, tmp_path):
    arguments = ["--input", corpus, "--output-prefix", tmp_path / "out", "--workers", 2, "--write-summary"]
    arguments += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model_path]
    done = subprocess.run(command(*arguments), capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"wrote {tmp_path}/out_text_document.bin and .idx: {len(documents)} documents, ")
    assert len(done.stdout.splitlines()) == 1
    assert sorted(os.listdir(tmp_path)) == ["out_summary.json", "out_text_document.bin", "out_text_document.idx"]
    summary = json.loads((tmp_path / "out_summary.json").read_text())
    assert summary["datasets"][str(tmp_path / "out_text_document")]["documents"] == len(documents)
    assert summary["tokenizer_model"] == model_path
    assert summary["vocab_size"] > 256


def test_command_errors(tmp_path, capsys):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    base = ["--input", path, "--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "NullTokenizer"]
    with pytest.raises(UserError, match="NullTokenizer needs --vocab-size"):
        main(base)
    with pytest.raises(UserError, match="--max-document-tokens must be at least 2, not 1"):
        main([*base, "--vocab-size", "10", "--max-document-tokens", "1"])
    with pytest.raises(SystemExit, match="2"):
        main([*base, "--workers", "0"])
    assert "0 is not a positive number" in capsys.readouterr().err
    (tmp_path / "out_summary.json").write_text("{}")
    with pytest.raises(UserError, match=r"out_summary\.json exists"):
        main([*base, "--vocab-size", "10", "--write-summary"])
    done = subprocess.run(
        command(*base, "--json-keys", "a", "a"), capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert (done.returncode, done.stderr) == (2, "error: --json-keys names a key twice: a a\n")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_ends_at_once_and_leaves_nothing(sent, tmp_path):
    """The input is a pipe that never ends, so the command is surely at work when the signal comes."""
    arguments = ["--input", "-", "--output-prefix", tmp_path / "out", "--tokenizer-type", "NullTokenizer"]
    process = subprocess.Popen(
        command(*arguments, "--vocab-size", 10, "--workers", 2),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    process.stdin.write(b'{"text": "1 2 3"}\n' * 200000)  # 3.6 MB: more than the pipe and the first batches hold
    process.stdin.flush()
    deadline = time.monotonic() + 120
    while not os.listdir(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [name.rsplit("-")[0] for name in os.listdir(tmp_path)] == ["out_unfinished"]
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)  # a terminal sends Ctrl-C to the workers too
    else:
        process.send_signal(sent)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, b"interrupted\n")
    assert os.listdir(tmp_path) == []


def test_workers_end_with_a_command_that_is_killed(tmp_path):
    arguments = ["--input", "-", "--output-prefix", tmp_path / "out", "--tokenizer-type", "NullTokenizer"]
    words = command(*arguments, "--vocab-size", 10, "--workers", 3)
    process = subprocess.Popen(words, stdin=subprocess.PIPE, env=ENVIRONMENT)
    try:
        process.stdin.write(b'{"text": "1 2 3"}\n' * 200000)
        deadline = time.monotonic() + 60
        workers = []
        while len(workers) < 3 and time.monotonic() < deadline:
            workers = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.05)
        assert len(workers) == 3
    finally:
        process.kill()
    process.wait(60)
    assert psutil.wait_procs(workers, timeout=60)[1] == []


def test_an_interrupted_publication_never_leaves_a_whole_looking_pair(numbers, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1 2"}])
    preprocess([path], str(tmp_path / "out"), numbers)
    replace = os.replace

    def interrupted_at_the_index(source, target):
        if target.endswith(".idx"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(module.os, "replace", interrupted_at_the_index)
    with pytest.raises(KeyboardInterrupt):
        preprocess([path], str(tmp_path / "out"), numbers, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out_text_document.bin"]
    with pytest.raises(UserError, match=r"\.idx is missing"):
        check_indexed_dataset(str(tmp_path / "out_text_document"))
