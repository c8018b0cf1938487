"""Loss, gate scores and counts of a checkpoint agree with what is computed anew, on any layout and batch size."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch

from megagate.errors import UserError
from megagate.evaluate import perplexity
from megagate.evaluate.load import find_checkpoint
from megagate.evaluate.perplexity import Unigram
from megagate.evaluate.report import DatasetResult
from megagate.evaluate.report import table as report_table
from tests import commands
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
    """Also of a model in whose training there was noise before the router."""
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


DIVIDED = {
    "data": (3, "--micro-batch-size 1"),
    "tensor": (2, "--tensor-model-parallel-size 2"),
    "expert": (2, "--expert-model-parallel-size 2 --micro-batch-size 3"),
    "context": (2, "--context-parallel-size 2"),
    "pipeline": (2, "--pipeline-model-parallel-size 2"),
}
"""Ranks and flags; the checkpoint is from one rank, its vocabulary padded by 32 rows to 96."""


@pytest.mark.parametrize("layout", DIVIDED)
@pytest.mark.parametrize("name", ["headwise", pytest.param("documents-apart", marks=pytest.mark.full)])
def test_any_layout_finds_what_one_process_finds(name, layout, checkpoints, data, tmp_path):
    """Windows overlap, the last one is shorter, and the ranks have different numbers of them."""
    words = ["--load", str(checkpoints(name)), "--stride", "10", "--data-path"]
    words += [f"many={data['many_documents']}", f"one={data['one_document']}", "--output"]
    ranks, flags = DIVIDED[layout]
    assert run_distributed(runs.run_tool, 1, [*words, str(tmp_path / "one.json")]) == [0]
    found = run_distributed(runs.run_tool, ranks, [*words, str(tmp_path / "many.json"), *flags.split()])
    assert found == [0] * ranks
    expected, report = (json.loads((tmp_path / f"{file}.json").read_text()) for file in ("one", "many"))
    assert [part["name"] for part in report["datasets"]] == ["many", "one"]
    assert report["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    for part, other in zip(report["datasets"], expected["datasets"], strict=True):
        assert part["tokens"] == other["tokens"]
        assert part["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert report["parameters"] == expected["parameters"]
    tolerance = 1e-6 if layout in ("data", "expert", "pipeline") else 0.05  # else the last window is left out
    assert report["gate_score"] == pytest.approx(expected["gate_score"], rel=tolerance)


def test_a_stride_gives_each_token_what_stands_before_it_in_its_window(checkpoints, data, documents):
    folder, stream = checkpoints("headwise"), np.concatenate(documents["many_documents"])
    (report,) = run_distributed(runs.report, 1, folder, [data["many_documents"]], stride=5)
    expected = run_distributed(runs.strided, 1, folder, stream, 5)[0]
    assert report["tokens"] == len(stream) - 1
    assert report["loss"] * report["tokens"] == pytest.approx(expected, rel=1e-6)


def test_a_hugging_face_directory_has_the_loss_that_transformers_computes(hugging_face, data, documents, tmp_path):
    from transformers import AutoModelForCausalLM

    output = tmp_path / "found.json"
    words = ["--load", str(hugging_face), "--data-path", data["many_documents"], "--output", str(output)]
    assert run_distributed(runs.run_tool, 1, [*words, "--stride", "7"], timeout=200) == [0]
    model = AutoModelForCausalLM.from_pretrained(hugging_face).eval()
    total, stream = 0.0, torch.tensor(np.concatenate(documents["many_documents"]).astype(np.int64))
    done = 0
    for begin in range(0, len(stream), 7):
        window = stream[begin : begin + runs.SEQ_LENGTH + 1]
        new = begin + len(window) - 1 - done
        if new <= 0:
            break
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits[-new:], window[-new:], reduction="sum"))
        done += new
    report = json.loads(output.read_text())
    assert report["tokens"] == done == len(stream) - 1
    assert report["perplexity"] == pytest.approx(math.exp(total / done), rel=1e-4)
    assert report["checkpoint"] == str(hugging_face)


@pytest.mark.parametrize("machines", [1, 2])
def test_several_ranks_find_the_loss_of_a_hugging_face_directory(machines, hugging_face, data, tmp_path):
    """The first rank of each machine converts it for the others there."""
    words = ["--load", str(hugging_face), "--data-path", data["many_documents"], "--output"]
    assert run_distributed(runs.run_tool, 1, [*words, str(tmp_path / "one.json")]) == [0]
    flags = ["--tensor-model-parallel-size", "2"] if machines == 2 else ["--micro-batch-size", "1"]
    found = run_distributed(runs.run_tool_as_started, 2, [*words, str(tmp_path / "two.json"), *flags], machines)
    assert sorted(found) == [machines - 1, 1]
    expected, report = (json.loads((tmp_path / f"{file}.json").read_text()) for file in ("one", "two"))
    assert report["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert report["tokens"] == expected["tokens"]


@pytest.mark.parametrize("machines", [1, 2])
def test_no_rank_waits_for_a_conversion_that_fails(machines, hugging_face, data, tmp_path):
    """Be it that of its own machine or that of another."""
    shutil.copytree(hugging_face, tmp_path / "broken")
    (tmp_path / "broken/model.safetensors").unlink()
    directories = [hugging_face if machines == 2 else tmp_path / "broken", tmp_path / "broken"]
    said = run_distributed(runs.refused, 2, directories, data["many_documents"], machines, timeout=60)
    assert "safetensors" in said.pop(machines - 1)
    assert said == [f"{directories[2 - machines]} is not evaluated: another process, which says why, cannot convert it"]


def test_names_of_datasets():
    assert perplexity.named_paths(["a=x/y", "z", "dir/c=d"]) == {"a": "x/y", "z": "z", "dir/c=d": "dir/c=d"}
    with pytest.raises(UserError, match="two datasets named a"):
        perplexity.named_paths(["a=x", "a=y"])
    with pytest.raises(UserError, match="lacks a name or a prefix"):
        perplexity.named_paths(["=x"])


def test_layouts_and_strides_that_cannot_be_are_refused(checkpoints, data):
    words = ["--load", str(checkpoints("headwise")), "--data-path", data["train"]]
    assert "1 processes cannot hold tensor parallel 2" in refusal([*words, "--tensor-model-parallel-size", "2"])
    assert "--stride must be positive" in refusal([*words, "--stride", "0"])
    assert "--stride 33 is more than the 32 tokens of a window" in refusal([*words, "--stride", "33"])


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
    words = ["perplexity", "--load", str(tmp_path / "missing"), "--data-path", "x"]
    finished = commands.run(ROOT / "tools" / "evaluate.py", words, directory=ROOT, timeout=120)
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
    """Which is said before any other is computed, here one that holds a token that the model does not know."""
    single = runs.write_dataset(tmp_path / "single", [np.array([1])])
    strange = runs.write_dataset(tmp_path / "strange", [np.array([1, 2, runs.VOCABULARY])])
    with pytest.raises(UserError, match=r"single holds fewer than two tokens, so that .*: leave it out"):
        run_distributed(runs.report, 1, checkpoints("tensor-expert"), [strange, single])


def test_the_table_has_what_the_json_has_of_each_set():
    few = DatasetResult("held", "few bytes", tokens=9000, total_loss=9000 * 5.0, bytes=4)
    text = DatasetResult("books", "books", tokens=100, total_loss=300.0, bytes=150)
    assert text.as_json()["bits_per_byte"] == pytest.approx(2 / math.log(2))
    assert text.as_json()["byte_perplexity"] == pytest.approx(math.exp(2))
    report = {"checkpoint": "c", "gate": "g", "parameters": {"total": 1, "active": 1}, "gate_scores": []}
    table = report_table(report | {"datasets": [text.as_json(), few.as_json()]} | text.as_json())
    heads, values = (re.split(r" {2,}", line) for line in table.splitlines()[1:3])
    assert heads == ["dataset", "tokens", "loss", "perplexity", "bits/byte", "ppl/byte", "unigram ppl"]
    assert values == ["books", "100", "3.0000", "20.09", "2.8854", "7.3891", "-"]
