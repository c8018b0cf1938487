"""Documents that share a sequence: with --reset-attention-mask each is computed as if it were alone."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.datasets import write_dataset
from tests.distributed import run_distributed
from tests.model.training import SEQUENCE, VOCABULARY, build, fill
from tests.pretrain.indexed import DataCase, whole_sequences

END = VOCABULARY - 2
"""The tokenizer's end-of-document token."""

MODEL = "--num-layers 2 --ffn-hidden-size 48 --num-query-groups 4 --micro-batch-size 8 --gate-preset sdpa-headwise"
STEPS = 3


def compare(flags: str) -> dict[str, Any]:
    """Return how a packed sequence's losses differ from those of its documents, and what of its loss mask is zero."""
    from megatron.training.training import build_train_valid_test_data_iterators

    from megagate.pretrain.batch import get_batch
    from megagate.pretrain.datasets import dataset_provider

    model, _, _ = build(DataCase(flags=flags, initial=True))
    fill(model)
    model[0].eval()
    iterator = build_train_valid_test_data_iterators(dataset_provider)[0]
    worst, documents, masked, ends = 0.0, 0, [], []
    with torch.no_grad():
        for _ in range(STEPS):
            batch: Any = get_batch(iterator, None)
            losses = model[0](batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
            for row, tokens in enumerate(batch["tokens"]):
                places = (tokens == END).nonzero().flatten().tolist()
                masked.append((batch["loss_mask"][row] == 0).nonzero().flatten().tolist())
                ends.append(places)
                bounds = sorted({0, *(place + 1 for place in places), SEQUENCE})
                for start, stop in itertools.pairwise(bounds):
                    alone = model[0](
                        tokens[None, start:stop],
                        torch.arange(stop - start)[None],
                        None,
                        labels=batch["labels"][None, row, start:stop],
                    )
                    worst = max(worst, float((alone[0] - losses[row, start:stop]).abs().max()))
                    documents += 1
    return {"difference": worst, "documents": documents, "masked": masked, "ends": ends}


def losses(flags: str) -> list[list[list[float]]]:
    """Return the losses of whole sequences, step by step, from the same weights on every layout."""
    from megatron.training.training import build_train_valid_test_data_iterators

    from megagate.pretrain.batch import get_batch
    from megagate.pretrain.datasets import dataset_provider

    model, _, _ = build(DataCase(flags=flags, initial=True))
    fill(model)
    model[0].eval()
    iterator = build_train_valid_test_data_iterators(dataset_provider)[0]
    result = []
    with torch.no_grad():
        for _ in range(STEPS):
            batch: Any = get_batch(iterator, None)
            part = model[0](batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
            result.append(whole_sequences(part).tolist())
    return result


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags for documents of 1 to 11 tokens and an end."""
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(3)
    lengths = generator.integers(1, 12, 150)
    documents = [[*generator.integers(1, END, length).tolist(), END] for length in lengths]
    flags = f"--data-path {write_dataset(folder / 'data', documents)} --split 1,0,0 --eval-iters 0 --num-workers 0"
    return f"{MODEL} {flags} --data-cache-path {folder / 'cache'} --train-iters {STEPS}"


def test_documents_do_not_see_each_other(data: str) -> None:
    (result,) = run_distributed(compare, 1, f"{data} --reset-attention-mask --eod-mask-loss")
    assert result["documents"] > 2 * 8 * STEPS
    assert result["difference"] < 1e-5
    assert result["masked"] == result["ends"]  # what follows an end is another document's business


def test_nor_under_context_parallelism(data: str) -> None:
    flags = f"{data} --reset-attention-mask --eod-mask-loss"
    (alone,) = run_distributed(losses, 1, flags)
    for parts in run_distributed(losses, 2, f"{flags} --context-parallel-size 2"):
        np.testing.assert_allclose(parts, alone, atol=1e-5)


def test_by_default_they_do(data: str) -> None:
    (result,) = run_distributed(compare, 1, data)
    assert result["difference"] > 1e-2
    assert not any(result["masked"])
