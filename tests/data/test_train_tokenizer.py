"""The trained model gives back every text exactly, is the same each time, and bad requests get one sentence."""

import os
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megagate.data import train_tokenizer as module
from megagate.data.train_tokenizer import main, sample_sentences, train_sentencepiece
from megagate.errors import UserError
from tests.launch.cluster import wait_for

DIFFICULT = " \n\t\r\0\u2581\u2585\U0010fffda b_\u00a0\u3000\ufeff\U0001f600\U0001f468\u200d\u0301\ufb01"
"""Spaces, controls, U+2581 and the escape with its suffixes, SentencePiece's reserved characters, emoji, ligatures."""


@pytest.fixture(scope="module")
def unigram(documents):
    import sentencepiece

    model = train_sentencepiece("".join(documents).splitlines(), 400, "unigram")
    return sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.fixture(scope="module")
def bpe(model_path):
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=model_path)


@settings(max_examples=400)
@given(st.one_of(st.text(), st.text(alphabet=DIFFICULT)))
@example(" ")
@example("  leading and trailing  ")
@example("\n\n\t    if x:\r\n")
@example("a\u2581b \u2581\u2581 \U0010fffda\U0010fffdb\U0010fffd")
@example("</s><s><unk><pad><0x0A>")
@example("e\u0301 \u00e9 \ufb01 \u212b")
@example("\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea")
def test_decode_gives_back_every_text(bpe, unigram, tokenizer, text):
    for processor in (bpe, unigram):
        ids = processor.encode(text)
        assert processor.decode(ids) == text
        assert not set(ids) & {0, 1, 2, 3}, "special tokens never come from text"
    assert tokenizer.tokenize(text) == bpe.encode(text)
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_the_corpus_itself_round_trips_in_fewer_tokens_than_bytes(bpe, documents):
    for text in documents:
        ids = bpe.encode(text)
        assert bpe.decode(ids) == text
        assert len(ids) < 0.7 * len(text)


def test_runs_of_spaces_have_pieces(bpe):
    assert len(bpe.encode("        ")) <= 2


def test_special_ids(bpe, tokenizer):
    assert (bpe.unk_id(), bpe.bos_id(), bpe.eos_id(), bpe.pad_id()) == (0, 1, 2, 3)
    assert tokenizer.eod == 2
    assert tokenizer.vocab_size == len(bpe)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_the_same_input_gives_the_same_bytes(documents, model_type):
    sentences = "".join(documents).splitlines()
    first, second = (train_sentencepiece(sentences, 400, model_type) for _ in range(2))
    assert first == second


def test_a_model_trained_on_the_reserved_characters_themselves_round_trips():
    import sentencepiece

    sentences = ["\u2581\u2581 \U0010fffd\U0010fffda", "\U0010fffdb\u2581", "\U0010fffd ab ab"] * 50
    processor = sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece(sentences, 270))
    for text in sentences:
        assert processor.decode(processor.encode(text)) == text


@given(st.lists(st.text(alphabet="ab\n\u00e9", max_size=30), max_size=60), st.integers(1, 400))
def test_the_sample_is_bounded_and_spread_evenly(texts, maximum):
    everything = sample_sentences(texts, 10**9)
    assert everything.bytes_kept == everything.bytes_read
    sample = sample_sentences(iter(texts), maximum)
    assert sample.bytes_read == everything.bytes_read
    assert sample.bytes_kept == sum(len(sentence.encode()) for sentence in sample.sentences)
    assert sample.bytes_kept <= maximum or len(sample.sentences) == 1
    stride = next(2**power for power in range(20) if everything.sentences[:: 2**power] == sample.sentences)
    assert stride == 1 or everything.bytes_read > maximum


def test_long_lines_are_cut_rather_than_left_out():
    sentences = sample_sentences(["x" * (3 * module.SENTENCE_CHARACTERS + 1)], 10**9).sentences
    assert [len(sentence) for sentence in sentences] == [module.SENTENCE_CHARACTERS] * 3 + [1]


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_vocabulary_too_large_names_the_largest_possible(documents, model_type):
    sentences = documents[0].splitlines()
    with pytest.raises(UserError, match=r"too small for a vocabulary of 90000: it supports at most \d+;") as error:
        train_sentencepiece(sentences, 90000, model_type)
    largest = int(str(error.value).split("at most ")[1].split(";")[0])
    train_sentencepiece(sentences, largest, model_type)


def test_a_vocabulary_too_small_names_the_smallest_possible(documents):
    sentences = documents[0].splitlines()
    with pytest.raises(UserError, match=r"a vocabulary of 100 cannot hold .* it needs at least \d+;") as error:
        train_sentencepiece(sentences, 100)
    train_sentencepiece(sentences, int(str(error.value).split("at least ")[1].split(";")[0]))


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "tools/train_tokenizer.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_command_writes_a_model_and_one_line(corpus, tmp_path):
    done = run("--input", corpus, "--output-prefix", tmp_path / "new" / "tok", "--vocab-size", 500)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"wrote {tmp_path}/new/tok.model: bpe, 500 pieces, trained on ")
    assert len(done.stdout.splitlines()) == 1
    assert os.listdir(tmp_path / "new") == ["tok.model"]


def test_command_errors_are_one_sentence_and_leave_nothing(corpus, tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "b.jsonl").write_text("{}\n")
    cases = [
        (["--input", tmp_path / "zzzzzzzzzzzzzzz"], "does not exist"),
        (["--input", tmp_path / "empty.txt"], "the corpus is empty"),
        (["--input", tmp_path / "b.jsonl"], "line 1: no key 'text'"),
        (["--input", corpus, "--vocab-size", 100000], "supports at most"),
        (["--input", corpus, "--character-coverage", 2], "--character-coverage in (0, 1]"),
    ]
    for arguments, message in cases:
        with pytest.raises(UserError) as error:
            main([*map(str, ["--output-prefix", tmp_path / "tok", "--vocab-size", 300, *arguments])])
        assert message in str(error.value)
    done = run("--input", tmp_path / "zzzzzzzzzzzzzzz", "--output-prefix", tmp_path / "tok", "--vocab-size", 300)
    assert done.returncode == 2
    assert done.stderr == f"error: the input {tmp_path}/zzzzzzzzzzzzzzz does not exist\n"
    assert sorted(os.listdir(tmp_path)) == ["b.jsonl", "empty.txt"]


def test_an_existing_model_is_kept_unless_overwrite_is_given(corpus, tmp_path, capsys):
    arguments = ["--input", corpus, "--output-prefix", str(tmp_path / "tok"), "--vocab-size", "400"]
    (tmp_path / "tok.model").write_text("precious")
    with pytest.raises(UserError, match=r"tok.model exists; choose another --output-prefix or give --overwrite"):
        main(arguments)
    assert (tmp_path / "tok.model").read_text() == "precious"
    assert main([*arguments, "--overwrite"]) == 0
    assert (tmp_path / "tok.model").read_bytes()[:8] != b"precious"


def test_long_work_shows_progress(corpus, tmp_path, capsys, monkeypatch):
    def slow(*_):
        wait_for(lambda: "training on 0.0 MB, 0 s so far" in capsys.readouterr().err, 60, "progress")
        return b"model"

    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(module, "train_sentencepiece", slow)
    assert main(["--input", corpus, "--output-prefix", str(tmp_path / "tok"), "--vocab-size", "600"]) == 0
