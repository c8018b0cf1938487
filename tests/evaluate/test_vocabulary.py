"""The rows that pad a vocabulary have no probability, as in the export, which lacks them."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from megagate.evaluate.vocabulary import leave_out_padding, whole_vocabulary
from tests.distributed import run_distributed
from tests.evaluate import runs

TOKENS, ROWS = 10, 16
"""Of the vocabulary: on two ranks the second has 2 tokens, on four the last has none."""


def export(folder: Path, out: Path) -> None:
    from megagate.checkpoint.convert import export_checkpoint

    export_checkpoint(folder, out)


def of_transformers(directory: Path, stream: np.ndarray) -> float:
    """Return the mean loss of all tokens but the first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True).eval()
    total = 0.0
    for start in range(0, len(stream) - 1, runs.SEQ_LENGTH):
        window = torch.from_numpy(stream[start : start + runs.SEQ_LENGTH + 1].astype(np.int64))
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
    return total / (len(stream) - 1)


def test_a_checkpoint_and_its_export_have_one_perplexity(checkpoints, data, documents, tmp_path: Path) -> None:
    folder, exported, output = checkpoints("baseline"), tmp_path / "exported", tmp_path / "found.json"
    run_distributed(export, 1, folder, exported)
    expected = of_transformers(exported, np.concatenate(documents["many_documents"]))
    for directory in (folder, exported):
        words = ["--load", str(directory), "--data-path", data["many_documents"], "--output", str(output)]
        assert run_distributed(runs.run_tool, 1, words) == [0]
        assert json.loads(output.read_text())["loss"] == pytest.approx(expected, rel=1e-5)
    assert run_distributed(padding_of, 1, folder)[0] > 0.15, "what the rows give to a softmax would show"


def padding_of(folder: Path) -> float:
    """Return the standard deviation of the weights that pad the output layer."""
    from megagate.checkpoint.torch_dist import TensorReader
    from megagate.evaluate.load import find_checkpoint

    reader = TensorReader(find_checkpoint(folder))
    weight = reader.read("output_layer.weight")
    assert len(weight) == 128
    return float(weight[runs.VOCABULARY :].float().std())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_softmax_is_over_the_tokens(dtype: torch.dtype, ranks: int) -> None:
    """Also by Megatron's own cross entropy and ours, where a rank holds nothing but padding."""
    logits = 3 * torch.randn(5, 2, ROWS)
    logits[..., TOKENS:] += 9
    target = torch.randint(TOKENS, (5, 2))
    exact = logits.to(dtype).double()[..., :TOKENS]
    expected = torch.nn.functional.cross_entropy(exact.flatten(0, 1), target.flatten(), reduction="none").view(5, 2)
    for losses, whole in run_distributed(of_each_rank, ranks, logits.to(dtype), target):
        for loss in losses:
            torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
        probabilities = whole.softmax(dim=-1)
        assert probabilities[..., TOKENS:].count_nonzero() == 0
        torch.testing.assert_close(probabilities[..., :TOKENS].double(), exact.softmax(-1), rtol=1e-5, atol=1e-6)


class Head(nn.Module):
    """An output layer whose logits are given."""

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
        return logits.clone(), None


def of_each_rank(logits: torch.Tensor, target: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the losses, Megatron's and ours, and the logits of all ranks."""
    from megatron.core import mpu
    from megatron.core.tensor_parallel import cross_entropy as megatrons

    from megagate.model.backends import functions

    ranks = torch.distributed.get_world_size()
    mpu.initialize_model_parallel(tensor_model_parallel_size=ranks)
    group = mpu.get_tensor_model_parallel_group()
    model = nn.Module()
    model.output_layer = Head()
    leave_out_padding(model, argparse.Namespace(padded_vocab_size=ROWS, tokenizer_vocab_size=TOKENS))
    own, _ = model.output_layer(logits.chunk(ranks, dim=-1)[mpu.get_tensor_model_parallel_rank()])
    losses = [
        function(own.clone(), target, tp_group=group)
        for function in (functions.cross_entropy, megatrons.vocab_parallel_cross_entropy)
    ]
    return losses, whole_vocabulary(own).float()
