"""Datasets and trained checkpoints, made once per session."""

from pathlib import Path

import numpy as np
import pytest

from tests.distributed import run_distributed
from tests.evaluate import runs

LAYOUTS = {
    "tensor-expert": (2, "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"),
    "pipeline": (2, "--pipeline-model-parallel-size 2"),
    "bf16": (1, "--bf16"),
    "documents-apart": (
        1,
        "--reset-attention-mask --reset-position-ids --position-embedding-type learned_absolute "
        "--null-tokenizer-eod-id 3",
    ),
    "headwise": (1, "--gate-preset sdpa-headwise --make-vocab-size-divisible-by 96"),
    "delta-net": (
        2,
        "--pipeline-model-parallel-size 2 --hybrid-layer-pattern GE|*E --linear-num-key-heads 2 "
        "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8",
    ),
    "baseline": (1, "--gate-preset baseline --make-vocab-size-divisible-by 128 --moe-input-jitter-eps 0.3"),
}
"""Name -> ranks, and flags beside those of `runs`; unless they say otherwise, the gate is elementwise, and the
vocabulary not padded."""


@pytest.fixture(scope="session")
def documents() -> dict[str, list[np.ndarray]]:
    return {
        "train": runs.random_documents([400, 300, 500], seed=1),
        "one_document": runs.random_documents([runs.WINDOWS * runs.SEQ_LENGTH + 1], seed=2),
        "many_documents": runs.random_documents([50, 1, 31, 33, 70, 17], seed=3),
    }


@pytest.fixture(scope="session")
def data(documents, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    return {name: runs.write_dataset(folder / name, content) for name, content in documents.items()}


@pytest.fixture(scope="session")
def checkpoints(data, tmp_path_factory):
    """Return a function that gives the directory of a layout's checkpoint, trained when first asked for."""
    made: dict[str, Path] = {}

    def checkpoint(name: str) -> Path:
        if name not in made:
            ranks, flags = LAYOUTS[name]
            words = flags.split()
            if "--gate-preset" not in words:
                words += ["--gate-preset", "sdpa-elementwise"]
            made[name] = tmp_path_factory.mktemp(name)
            run_distributed(runs.pretrain, ranks, made[name], data, words)
        return made[name]

    return checkpoint


@pytest.fixture(scope="session")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that transformers wrote, of a random model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.checkpoint.families.conversion import randomize

    config = Qwen3Config(
        vocab_size=runs.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=runs.SEQ_LENGTH,
        tie_word_embeddings=False,
    )
    model = randomize(Qwen3ForCausalLM(config))
    directory = tmp_path_factory.mktemp("hugging_face") / "model"
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a random gated model with experts and a tokenizer of text."""
    from megagate.data.train_tokenizer import main as train_tokenizer

    folder = tmp_path_factory.mktemp("text")
    (folder / "corpus.txt").write_text("\n".join(runs.sentences(400, seed=4)), encoding="utf-8")
    words = ["--input", str(folder / "corpus.txt"), "--output-prefix", str(folder / "tokenizer"), "--vocab-size", "340"]
    assert train_tokenizer(words) == 0
    run_distributed(runs.pretrain_on_text, 1, folder / "checkpoints", folder / "tokenizer.model")
    return folder / "checkpoints"
