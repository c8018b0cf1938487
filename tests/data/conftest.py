"""A small real corpus (source files of the running Python) and a tokenizer trained on it, made once per session."""

import json
import os
from pathlib import Path

import pytest

from megagate.data.tokenizer import build_tokenizer
from megagate.data.train_tokenizer import main as train_tokenizer

VOCAB_SIZE = 800


@pytest.fixture(scope="session")
def documents() -> list[str]:
    folder = Path(os.__file__).parent
    return [(folder / name).read_text(encoding="utf-8") for name in ("abc.py", "bisect.py", "token.py", "this.py")]


@pytest.fixture(scope="session")
def corpus(documents, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def model_path(corpus, tmp_path_factory) -> str:
    prefix = str(tmp_path_factory.mktemp("tokenizer") / "python")
    assert train_tokenizer(["--input", corpus, "--output-prefix", prefix, "--vocab-size", str(VOCAB_SIZE)]) == 0
    return prefix + ".model"


@pytest.fixture(scope="session")
def tokenizer(model_path):
    return build_tokenizer("SentencePieceTokenizer", model_path)
