"""A batch gets exactly the ids that Megatron's `tokenize` gives for each text alone, whatever library is underneath."""

import base64
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megagate.data.corpus import Batch
from megagate.data.encode import Encoder
from megagate.data.tokenizer import BYTE_LEVEL, batch_encoder, build_tokenizer

SPECIALS = ["<s>", "</s>", "<unk>", "<pad>", "<extra>"]
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.lists(st.sampled_from([*SPECIALS, "def", " ", "  ", "\n", "self.", "\u262f", "\u2581", "a\u0301"])).map(
            "".join
        ),
    ),
    max_size=8,
)
KINDS = {
    "sentencepiece": True,
    "sentencepiece, legacy with added tokens": False,
    "sentencepiece, spaces marked": False,
    "hugging face": True,
    "hugging face, no special tokens": False,
    "bytes": True,
    "null": False,
}


@pytest.fixture(scope="session")
def hugging_face_folder(documents, tmp_path_factory) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(documents, trainer)
    trained.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = str(tmp_path_factory.mktemp("hugging_face"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def space_removing_model(documents, tmp_path_factory) -> str:
    """A SentencePiece model with the library's defaults, which drop repeated spaces."""
    import sentencepiece

    prefix = str(tmp_path_factory.mktemp("spaces") / "spaces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(documents).splitlines()),
        model_prefix=prefix,
        vocab_size=400,
        byte_fallback=True,
        minloglevel=2,
    )
    return prefix + ".model"


@pytest.fixture(scope="session", params=KINDS)
def kind_and_tokenizer(request, model_path, hugging_face_folder, space_removing_model):
    kind = request.param
    if kind == "sentencepiece":
        return kind, build_tokenizer("SentencePieceTokenizer", model_path)
    if kind == "sentencepiece, legacy with added tokens":
        options = {"tokenizer_sentencepiece_legacy": True, "special_tokens": ["<extra>"]}
        return kind, build_tokenizer("SentencePieceTokenizer", model_path, **options)
    if kind == "sentencepiece, spaces marked":
        options = {"tokenizer_sentencepiece_ignore_extra_whitespaces": False}
        return kind, build_tokenizer("SentencePieceTokenizer", space_removing_model, **options)
    if kind == "bytes":
        return kind, build_tokenizer(BYTE_LEVEL)
    if kind == "null":
        return kind, build_tokenizer("NullTokenizer", vocab_size=100)
    without = kind == "hugging face, no special tokens"
    return kind, build_tokenizer(
        "HuggingFaceTokenizer", hugging_face_folder, tokenizer_hf_no_include_special_tokens=without
    )


def check_equal(tokenizer, texts):
    encoded = batch_encoder(tokenizer)(texts)
    assert [list(map(int, ids)) for ids in encoded] == [tokenizer.tokenize(text) for text in texts]


def test_batches_are_encoded_as_single_texts_are(kind_and_tokenizer):
    kind, tokenizer = kind_and_tokenizer

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(TEXTS)
    def compare(texts):
        if kind == "null":
            texts = [" ".join(str(len(text)) for text in texts) or "1"]
        if texts:
            check_equal(tokenizer, texts)

    compare()


def test_the_librarys_batch_encoder_is_used_where_it_may_be(kind_and_tokenizer, documents, monkeypatch):
    kind, tokenizer = kind_and_tokenizer

    def fail(text):
        raise AssertionError("tokenized one by one")

    encode = batch_encoder(tokenizer)
    monkeypatch.setattr(tokenizer._tokenizer, "text_to_ids", fail)
    if KINDS[kind]:
        assert len(encode(documents)) == len(documents)
    else:
        with pytest.raises(AssertionError, match="one by one"):
            encode(documents)


def test_tiktoken(tmp_path):
    pytest.importorskip("tiktoken")
    pieces = [bytes([value]) for value in range(256)] + [b"de", b"def", b" s", b"el", b" self"]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(pieces)
    ]
    path = tmp_path / "tiktoken.json"
    path.write_text(json.dumps(vocabulary))
    tokenizer = build_tokenizer("TikTokenizer", str(path), vocab_size=10 + len(pieces), tiktoken_num_special_tokens=10)

    @settings(max_examples=150, deadline=None)
    @given(TEXTS)
    def compare(texts):
        check_equal(tokenizer, texts)

    compare()


@pytest.mark.parametrize("append_eod", [False, True])
def test_encoded_batches_hold_each_document(kind_and_tokenizer, append_eod):
    """Against the plain way: tokenize a document, leave it out if it is empty, append the end-of-document token."""
    kind, tokenizer = kind_and_tokenizer
    append_eod = append_eod and "legacy" not in kind  # which has no end-of-document token
    encoder = Encoder(tokenizer, ["a", "b"], append_eod)
    end = [tokenizer.eod] if append_eod else []

    @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
    @given(TEXTS)
    def compare(texts):
        if kind == "null":
            texts = ["" if len(text) % 2 else str(len(text)) for text in texts]
        pairs = list(zip(texts, reversed(texts), strict=True))
        lines = [json.dumps({"a": first, "b": second}).encode() for first, second in pairs]
        encoded = encoder(Batch("in", 1, lines, is_text=False))
        assert not encoded.bad
        for column, result in zip(zip(*pairs, strict=True) if pairs else [(), ()], encoded.texts, strict=True):
            expected = [tokenizer.tokenize(text) for text in column if text]
            expected = [ids + end for ids in expected if ids]
            assert result.tokens.dtype == encoder.dtype
            assert result.empty == len(texts) - len(expected)
            assert [part.tolist() for part in np.split(result.tokens, np.cumsum(result.lengths))[:-1]] == expected

    compare()


def test_bad_documents_are_found_in_a_batch_and_left_out_under_every_key():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=10)
    rows = [("1 2", "3"), ("10", "4"), ("5", "x"), ("6", "7 -1"), ("", "8"), ("9 99 98", "11"), ("2", "3 1")]
    lines = [json.dumps({"a": first, "b": second}).encode() for first, second in rows]
    lines.insert(3, b"[]")
    encoded = Encoder(tokenizer, ["a", "b"], append_eod=False)(Batch("in", 1, lines, is_text=False))
    assert [bad.line for bad in encoded.bad] == [2, 3, 4, 5, 7]
    reasons = [bad.reason for bad in encoded.bad]
    assert "token 10 is outside" in reasons[0]
    assert "invalid literal" in reasons[1]
    assert "not a JSON object" in reasons[2]
    assert "token -1 is outside" in reasons[3]
    assert "token 99 is outside" in reasons[4]
    assert [texts.tokens.tolist() for texts in encoded.texts] == [[1, 2, 2], [3, 8, 3, 1]]
    assert [texts.lengths.tolist() for texts in encoded.texts] == [[2, 1], [1, 1, 2]]
    assert [texts.empty for texts in encoded.texts] == [1, 0]
