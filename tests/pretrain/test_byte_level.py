"""From text to a perplexity without a tokenizer's file: a token is a byte."""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest

from megagate.checkpoint.side_files import _write_tokenizer
from megagate.data.preprocess import main as preprocess
from tests.distributed import run_distributed
from tests.evaluate.runs import run_tool
from tests.training import TINY, train


def test_from_text_to_perplexity(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    texts = ["".join(generator.choice(list("aab \u00e9"), size)) for size in generator.integers(1, 40, 100)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = ["--tokenizer-type", "ByteLevelTokenizer"]
    files = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "data")]
    assert preprocess([*files, *tokenizer, "--append-eod", "--workers", "1"]) == 0
    data = str(tmp_path / "data_text_document")
    argv = [flag for flag in TINY if flag != "--mock-data"]
    argv += [*tokenizer, "--data-path", data, "--split", "1,0,0", "--data-cache-path", str(tmp_path / "cache")]
    argv += ["--save", str(tmp_path / "run"), "--save-interval", "2", "--tensorboard-dir", str(tmp_path / "board")]
    run_distributed(train, 1, argv, timeout=100)
    words = ["--load", str(tmp_path / "run"), "--data-path", data, "--output", str(tmp_path / "result.json")]
    run_distributed(run_tool, 1, words, timeout=100)
    result = json.loads((tmp_path / "result.json").read_text())
    size = sum(len(text.encode()) for text in texts)
    assert result["tokens"] == size + len(texts) - 1
    nats = result["loss"] * result["tokens"]
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / size)


def test_an_export_says_that_it_has_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(tokenizer_type="ByteLevelTokenizer", tokenizer_model=None)
    assert _write_tokenizer(tmp_path, args, None, None) == {}
    assert "no tokenizer that AutoTokenizer can load: its tokens are bytes" in capsys.readouterr().err
