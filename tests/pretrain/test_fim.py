"""With --fim-data a document comes as prefix, suffix and middle, which together are the document."""

import argparse
import base64
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megagate.data.byte_tokenizer import ByteLibrary, ByteTokenizer
from megagate.data.tokenizer import build_tokenizer
from megagate.errors import UserError
from megagate.pretrain import fim
from megagate.pretrain.fim import FimDataset
from tests.data.datasets import write_dataset
from tests.pretrain.indexed import training_dataset

TOKENS = {"prefix": "<fim_prefix>", "middle": "<fim_middle>", "suffix": "<fim_suffix>", "pad": "<fim_pad>"}
NAMES = {**TOKENS, "eod": "<|endoftext|>"}
END, PREFIX, MIDDLE, SUFFIX, PAD = 256, 258, 259, 260, 261
LENGTH = 200


class Squeezing(ByteLibrary):
    """A tokenizer of which the parts of a text have fewer tokens than the whole."""

    def text_to_ids(self, text: str) -> list[int]:
        return super().text_to_ids(text.replace(" ", ""))


@pytest.fixture(scope="module")
def tokenizer() -> ByteTokenizer:
    return build_tokenizer("ByteLevelTokenizer", special_tokens=list(TOKENS.values()))


@pytest.fixture(scope="module")
def documents() -> list[str]:
    generator = np.random.default_rng(1)
    return ["".join(generator.choice(list("abcdefg \u00e9\n"), size)) for size in generator.integers(1, 60, 120)]


@pytest.fixture(scope="module")
def prefix(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "data"
    return write_dataset(path, [[*text.encode(), END] for text in documents])


def dataset(prefix: str, tokenizer: Any, spm_rate: float, rate: float = 1.0, **options: Any) -> FimDataset:
    settings = {"fim_rate": rate, "fim_spm_rate": spm_rate, "fim_extra_tokens": NAMES, "eod_mask_loss": True}
    cache = str(Path(prefix).parent / "cache")
    settings |= {"tokenizer": tokenizer, "path_to_cache": cache, "blend": ([prefix], None)}
    return training_dataset(30, LENGTH, FimDataset, **settings | options)


def whole_documents(sample: list[int], end: int = END) -> list[list[int]]:
    """Return what lies between two ends of documents."""
    ends = [place for place, token in enumerate(sample) if token == end]
    return [sample[start + 1 : stop] for start, stop in itertools.pairwise(ends)]


def original(tokens: list[int], is_spm: bool) -> str:
    """Return the text of prefix, middle and suffix, put together in this order."""
    first, second, third = (tokens.index(mark) for mark in (PREFIX, SUFFIX, MIDDLE))
    assert first == 0 and sum(token > END for token in tokens) == 3
    if is_spm:
        assert second == 1  # prefix and middle follow each other, without a mark between them
        parts = [tokens[third + 1 :], tokens[2:third]]
    else:
        parts = [tokens[1:second], tokens[third + 1 :], tokens[second + 1 : third]]
    return bytes(token for part in parts for token in part).decode()


@pytest.mark.parametrize("is_spm", [False, True])
def test_parts_are_the_document(tokenizer: Any, documents: list[str], prefix: str, is_spm: bool) -> None:
    train = dataset(prefix, tokenizer, float(is_spm))
    seen = []
    for place in range(30):
        sample = train[place]
        assert len(sample["tokens"]) == LENGTH
        seen += [original(tokens, is_spm) for tokens in whole_documents(sample["tokens"].tolist())]
    assert len(seen) > 60 and set(seen) <= set(documents)


def test_the_rate_is_that_of_documents(tokenizer: Any, documents: list[str], prefix: str) -> None:
    train = dataset(prefix, tokenizer, 0.5, rate=0.5)
    segments = [tokens for place in range(30) for tokens in whole_documents(train[place]["tokens"].tolist())]
    plain = [tokens for tokens in segments if PREFIX not in tokens]
    assert 0.3 < len(plain) / len(segments) < 0.7
    assert {bytes(tokens).decode() for tokens in plain} <= set(documents)


def test_a_sample_does_not_depend_on_what_was_read_before(tokenizer: Any, prefix: str) -> None:
    train, again = (dataset(prefix, tokenizer, 0.5) for _ in range(2))
    samples = [train[place]["tokens"].tolist() for place in range(30)]
    assert [again[place]["tokens"].tolist() for place in reversed(range(30))] == samples[::-1]
    other = dataset(prefix, tokenizer, 0.5, random_seed=2)
    assert [other[place]["tokens"].tolist() for place in range(30)] != samples


def test_padding_has_no_loss(prefix: str) -> None:
    tokenizer = ByteTokenizer(list(TOKENS.values()))
    tokenizer._tokenizer = Squeezing(list(TOKENS.values()))
    train = dataset(prefix, tokenizer, 0.5)
    padded = 0
    for place in range(30):
        sample = train[place]
        uncounted = (sample["labels"] == PAD) | (sample["tokens"] == END)
        assert ((sample["loss_mask"] == 0) == uncounted).all()
        padded += int((sample["labels"] == PAD).sum())
    assert padded > 0


def hugging_face(folder: Path, texts: list[str]) -> Any:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    names = [NAMES["eod"], "<unk>", *TOKENS.values()]
    options = {"special_tokens": names, "initial_alphabet": alphabet, "show_progress": False}
    trained.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=400, **options))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token=NAMES["eod"], unk_token="<unk>", additional_special_tokens=names[2:]
    ).save_pretrained(str(folder))
    return build_tokenizer("HuggingFaceTokenizer", str(folder), tokenizer_hf_no_include_special_tokens=True)


def tiktoken(folder: Path, _: list[str]) -> Any:
    pytest.importorskip("tiktoken")
    pieces = [*(bytes([value]) for value in range(256)), b"ab", b"abc", b"g a"]
    ranks = [{"rank": rank, "token_bytes": base64.b64encode(piece).decode()} for rank, piece in enumerate(pieces)]
    (folder / "vocabulary.json").write_text(json.dumps([{**rank, "token_str": None} for rank in ranks]))
    names = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>", *TOKENS.values()]
    options = {"vocab_size": len(pieces) + 20, "tiktoken_num_special_tokens": 20, "special_tokens": names}
    return build_tokenizer("TikTokenizer", str(folder / "vocabulary.json"), **options)


@pytest.mark.parametrize(("build", "end"), [(hugging_face, NAMES["eod"]), (tiktoken, "</s>")])
def test_tokenizers_of_files(build: Any, end: str, documents: list[str], tmp_path: Path) -> None:
    tokenizer = build(tmp_path, documents)
    fim.check(arguments(fim_eod_token=end), tokenizer)
    tokens = [[*tokenizer.tokenize(text), tokenizer.eod] for text in documents]
    train = dataset(write_dataset(tmp_path / "data", tokens), tokenizer, 0.0, fim_extra_tokens={**NAMES, "eod": end})
    marks = tokenizer._tokenizer.tokens_to_ids([NAMES["prefix"], NAMES["suffix"], NAMES["middle"]])
    seen = []
    for place in range(10):
        for part in whole_documents(train[place]["tokens"].tolist(), tokenizer.eod):
            first, second, third = (part.index(mark) for mark in marks)
            pieces = part[first + 1 : second], part[third + 1 :], part[second + 1 : third]
            seen.append("".join(tokenizer.detokenize(piece) for piece in pieces))
    assert len(seen) > 20 and set(seen) <= set(documents)


def arguments(**changes: Any) -> argparse.Namespace:
    given: dict[str, Any] = {f"fim_{part}_token": name for part, name in NAMES.items()}
    given |= {"fim_rate": 0.5, "fim_spm_rate": 0.5, "fim_split_sample": None, "fim_fragment_rate": None}
    given |= {"fim_no_prefix": None, "tokenizer_type": "X", "dataloader_defer_npy_index_mmap": False}
    return argparse.Namespace(**given | changes)


def test_checkpoints_say_how_documents_are_cut() -> None:
    assert fim.describe(arguments(fim_data=False)) == "off"
    assert fim.describe(arguments(fim_data=True)) == "--fim-rate 0.5, --fim-spm-rate 0.5"


def test_what_cannot_work_is_refused(tokenizer: Any) -> None:
    fim.check(arguments(), tokenizer)
    for changes, message in (
        ({"fim_prefix_token": "<other>"}, r"no token <other> \(--fim-prefix-token\): name one that it has"),
        ({"fim_eod_token": "<pad>"}, "--fim-eod-token <pad> is token 257, but documents end with 256"),
        ({"fim_middle_token": "<fim_suffix>"}, "must differ"),
        ({"fim_split_sample": "a b"}, r"no token a b \(--fim-split-sample\)"),
        ({"fim_split_sample": "<pad>"}, "--fim-split-sample has no effect without --fim-fragment-rate: add it"),
        ({"fim_spm_rate": 1.5}, "--fim-spm-rate 1.5 is not above 0 and at most 1"),
        ({"dataloader_defer_npy_index_mmap": True}, "cannot be combined with --dataloader-defer-npy-index-mmap"),
    ):
        with pytest.raises(UserError, match=message):
            fim.check(arguments(**changes), tokenizer)
    with pytest.raises(UserError, match="which --tokenizer-type NullTokenizer cannot: use ByteLevelTokenizer"):
        fim.check(arguments(tokenizer_type="NullTokenizer"), build_tokenizer("NullTokenizer", vocab_size=9))
