"""Loss, gate scores and counts of a checkpoint agree with what is computed anew, on any layout and batch size."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from megagate.errors import UserError
from megagate.evaluate import perplexity
from megagate.evaluate.load import find_checkpoint
from megagate.evaluate.perplexity import Unigram
from tests.distributed import ROOT, run_distributed
from tests.evaluate import runs
from tests.training import scalars


@pytest.mark.parametrize("layout", ["tensor-expert", "pipeline", "bf16", "documents-apart", "delta-net"])
def test_one_process_finds_the_loss_of_the_trainers_own_validation(layout, checkpoints, data, tmp_path):
    folder, output = checkpoints(layout), tmp_path / "result.json"
    words = ["--load", str(folder), "--data-path", data["one_document"], "--output", str(output)]
    assert run_distributed(runs.run_tool, 1, words) == [0]
    report = json.loads(output.read_text())
    (validation,) = scalars(folder / "tensorboard")["lm loss validation"].values()
    assert report["tokens"] == runs.WINDOWS * runs.SEQ_LENGTH
    assert report["loss"] == pytest.approx(validation, rel=2e-6)
    assert report["loss"] < math.log(runs.VOCABULARY) - 0.5, "six steps have taught something"


@pytest.mark.parametrize("name", ["tensor-expert", "headwise", "baseline"])
def test_loss_and_gate_scores_are_those_computed_token_by_token(name, checkpoints, data, documents):
    folder = checkpoints(name)
    (report,) = run_distributed(runs.report, 1, folder, [data["many_documents"]])
    (anew,) = run_distributed(runs.recompute, 1, folder, documents["many_documents"])
    assert report["tokens"] == sum(map(len, documents["many_documents"])) - 1
    assert report["loss"] * report["tokens"] == pytest.approx(anew["loss"], rel=1e-6)
    assert report["perplexity"] == pytest.approx(math.exp(report["loss"]))
    assert [layer["score"] for layer in report["gate_scores"]] == pytest.approx(anew["scores"], rel=1e-6)
    assert len(report["gate_scores"]) == (0 if name == "baseline" else 2)
    assert report["gate_score"] == (None if name == "baseline" else pytest.approx(np.mean(anew["scores"]), rel=1e-6))
    assert anew["untouched"]


def test_parameters_of_experts_count_by_the_share_that_a_token_uses(checkpoints, data, documents):
    folder = checkpoints("headwise")
    (report,) = run_distributed(runs.report, 1, folder, [data["many_documents"]])
    (anew,) = run_distributed(runs.recompute, 1, folder, documents["many_documents"])
    counts = {name: math.prod(shape) for name, shape in anew["parameters"].items()}
    experts = sum(count for name, count in counts.items() if "local_experts" in name)
    assert experts == 2 * 4 * (3 * 32 * 32), "2 layers of 4 experts, gate and up 64 x 32, down 32 x 32"
    assert report["parameters"] == {"total": sum(counts.values()), "active": sum(counts.values()) - experts // 2}


def test_the_batch_size_changes_nothing(checkpoints, data):
    folder, paths = checkpoints("tensor-expert"), [data["many_documents"], data["one_document"]]
    (one,) = run_distributed(runs.report, 1, folder, paths, micro_batch_size=1)
    (many,) = run_distributed(runs.report, 1, folder, paths, micro_batch_size=5)
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert many["gate_score"] == pytest.approx(one["gate_score"], rel=1e-6)
    assert many["tokens"] == one["tokens"]


def test_several_datasets_are_weighted_by_their_tokens(checkpoints, data):
    folder, paths = checkpoints("tensor-expert"), [data["many_documents"], data["one_document"]]
    (report,) = run_distributed(runs.report, 1, folder, paths)
    parts = report["datasets"]
    assert [part["data_path"] for part in parts] == paths
    assert report["tokens"] == sum(part["tokens"] for part in parts)
    assert report["loss"] == pytest.approx(sum(part["tokens"] * part["loss"] for part in parts) / report["tokens"])


def test_a_shorter_context_changes_the_loss_but_not_the_tokens(checkpoints, data):
    folder, paths = checkpoints("tensor-expert"), [data["many_documents"]]
    (long,) = run_distributed(runs.report, 1, folder, paths)
    (short,) = run_distributed(runs.report, 1, folder, paths, seq_length=4)
    assert short["tokens"] == long["tokens"]
    assert short["loss"] != pytest.approx(long["loss"], rel=1e-6)


def test_the_tool_writes_what_it_measured(checkpoints, data, documents, tmp_path):
    folder, output = checkpoints("tensor-expert"), tmp_path / "result.json"
    words = ["--load", str(folder), "--data-path", data["many_documents"], "--unigram-data-path", data["train"]]
    assert run_distributed(runs.run_tool, 1, [*words, "--ckpt-step", "6", "--output", str(output)]) == [0]
    report = json.loads(output.read_text())
    (expected,) = run_distributed(runs.report, 1, folder, [data["many_documents"]])
    assert report["loss"] == expected["loss"]
    assert report["iteration"] == 6
    assert report["gate"] == "sdpa-elementwise"
    assert report["bytes"] is None, "the tokens of NullTokenizer are no text"
    # The unigram model by hand, over the same tokens.
    seen = np.bincount(np.concatenate(documents["train"]), minlength=runs.VOCABULARY)
    probability = (seen + 1) / (seen.sum() + runs.VOCABULARY)
    held_out = np.concatenate(documents["many_documents"])[1:]
    assert report["unigram_loss"] == pytest.approx(-np.log(probability[held_out]).mean())
    assert report["unigram_perplexity"] == pytest.approx(math.exp(report["unigram_loss"]))


def test_a_unigram_model_is_smoothed_by_one():
    unigram = Unigram(np.array([3, 0, 1]))
    assert np.exp(unigram.log_probabilities) == pytest.approx([4 / 7, 1 / 7, 2 / 7])
    assert unigram.loss(np.array([0, 0, 1])) == pytest.approx(-(2 * math.log(4 / 7) + math.log(1 / 7)))


def test_a_checkpoint_that_is_not_there_is_one_sentence_and_status_2(tmp_path):
    tool = [sys.executable, str(ROOT / "tools" / "evaluate.py"), "perplexity"]
    command = [*tool, "--load", str(tmp_path / "missing"), "--data-path", "x"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 2
    assert finished.stderr == (
        f"error: --load {tmp_path / 'missing'} does not exist: give the directory that training saved to\n"
    )
    assert not finished.stdout


def refusal(words):
    with pytest.raises(UserError) as refused:
        perplexity.run(runs.options_of(words))
    return str(refused.value)


def test_a_directory_without_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)


def test_missing_data_are_refused_before_the_model_is_loaded(checkpoints, data):
    load = ["--load", str(checkpoints("tensor-expert"))]
    assert "there is no dataset" in refusal([*load, "--data-path", data["train"] + "_typo"])
    found = refusal([*load, "--data-path", data["train"], "--unigram-data-path", "nowhere"])
    assert "there is no dataset nowhere" in found


def test_another_step_another_context_and_another_output_are_refused(checkpoints, data, tmp_path):
    words = ["--load", str(checkpoints("tensor-expert")), "--data-path", data["train"]]
    assert "iter_0000007 does not exist" in refusal([*words, "--ckpt-step", "7"])
    assert "must lie between 1 and 32" in refusal([*words, "--seq-length", "33"])
    assert "must be positive" in refusal([*words, "--micro-batch-size", "0"])
    assert "does not exist: make it first" in refusal([*words, "--output", str(tmp_path / "no" / "result.json")])


def test_another_vocabulary_is_refused(checkpoints, data, tmp_path):
    folder = str(checkpoints("tensor-expert"))
    strange = runs.write_dataset(tmp_path / "strange", [np.array([1, 2, 3, runs.VOCABULARY])])
    with pytest.raises(UserError, match=f"holds the token {runs.VOCABULARY}, but .* has {runs.VOCABULARY} tokens"):
        run_distributed(runs.run_tool, 1, ["--load", folder, "--data-path", strange])
    words = ["--load", folder, "--data-path", data["train"]]
    assert "holds the token" in refusal([*words, "--unigram-data-path", strange])


def test_a_dataset_of_one_token_has_nothing_to_predict(checkpoints, tmp_path):
    single = runs.write_dataset(tmp_path / "single", [np.array([1])])
    with pytest.raises(UserError, match="fewer than two tokens"):
        run_distributed(runs.report, 1, checkpoints("tensor-expert"), [single])
