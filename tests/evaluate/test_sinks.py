"""`tools/evaluate.py sinks` against attention that transformers itself returns, for both forms of a checkpoint."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megagate.errors import UserError
from megagate.evaluate import sinks
from tests.distributed import run_distributed
from tests.evaluate import runs
from tests.evaluate.runs import SEQ_LENGTH

FIRST = SEQ_LENGTH // 16
LAYERS = 3


def options_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sinks.add_arguments(parser)
    return parser.parse_args(words)


def run_tool(words: list[str]) -> int:
    """Run the tool on this rank."""
    return sinks.run(options_of(words))


def measured(words: list[str], output: Path) -> list[dict[str, Any]]:
    """Run the tool and return what it says of each checkpoint."""
    assert run_distributed(run_tool, 1, [*words, "--output", str(output)], timeout=200) == [0]
    return json.loads(output.read_text())["checkpoints"]


def of_transformers(directory: Path, document: np.ndarray) -> dict[str, Any]:
    """Return the same numbers from the attention probabilities and hidden states that transformers returns."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    outputs: dict[int, list[torch.Tensor]] = {}
    for index, layer in enumerate(model.model.layers, 1):
        layer.register_forward_hook(
            lambda _, __, output, index=index: outputs.setdefault(index, []).append(
                (output[0] if isinstance(output, tuple) else output).abs()
            )
        )
    shares: dict[int, list[torch.Tensor]] = {}
    everything: list[torch.Tensor] = []
    entropies: dict[int, list[torch.Tensor]] = {}
    total = 0.0
    windows = [document[start : start + SEQ_LENGTH + 1] for start in range(0, len(document) - 1, SEQ_LENGTH)]
    for window in windows:
        tokens = torch.tensor(window[None].astype(np.int64))
        with torch.no_grad():
            result = model(tokens[:, :-1], output_attentions=True)
        total += float(torch.nn.functional.cross_entropy(result.logits[0], tokens[0, 1:], reduction="sum"))
        for block, probability in enumerate(result.attentions, 1):
            first = max(1, min(16, probability.shape[-1] // 16))
            shares.setdefault(block, []).append(probability[0, :, first:, 0].double())
            everything.append(probability[0, :, :, 0].double())
            entropies.setdefault(block, []).append(torch.special.entr(probability[0, :, first:].double()).sum(-1))
    return {
        "perplexity": float(np.exp(total / (len(document) - 1))),
        "first token": {block: float(torch.cat(parts, dim=1).mean()) for block, parts in shares.items()},
        "all rows": float(torch.cat(everything, dim=1).mean()),
        "entropy": {block: float(torch.cat(parts, dim=1).mean()) for block, parts in entropies.items()},
        "activation": {block: max(float(part.max()) for part in parts) for block, parts in outputs.items()},
    }


def test_a_model_of_transformers(hugging_face: Path, documents, tmp_path: Path) -> None:
    """The last window is shorter than the others, and counts for its rows only."""
    document = documents["many_documents"][0]
    path = runs.write_dataset(tmp_path / "data", [document])
    words = ["--load", str(hugging_face), "--data-path", path]
    (found,) = measured(words, tmp_path / "found.json")
    expected = of_transformers(hugging_face, document)
    assert len(document) % SEQ_LENGTH != 1
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-5)
    scalars = found["scalars"]
    for tag, key in (
        ("attention/first-token-share", "first token"),
        ("attention/entropy", "entropy"),
        ("activation/max", "activation"),
    ):
        by_block = {int(block): value for block, value in found["by_block"][tag].items()}
        assert by_block == pytest.approx(expected[key], rel=1e-4), tag
        assert scalars[tag] == pytest.approx(np.mean(list(expected[key].values())), rel=1e-4)
    assert scalars["attention/first-token-share-all-rows"] == pytest.approx(expected["all rows"], rel=1e-4)
    assert "gate/mean-score" not in scalars
    assert found["checkpoint"] == str(hugging_face)


def test_side_by_side_with_figures(checkpoints, data, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    gated, baseline = checkpoints("headwise"), checkpoints("baseline")
    words = ["--load", str(gated), str(baseline), "--data-path", data["many_documents"], "--figures", str(tmp_path)]
    words += ["--attention-blocks", "2", "--attention-heads", "0", "5"]
    reports = measured(words, tmp_path / "found.json")
    for report, folder in zip(reports, (gated, baseline), strict=True):
        (alone,) = run_distributed(runs.report, 1, folder, [data["many_documents"]])
        assert report["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert report["scalars"].get("gate/mean-score") == (
            None if alone["gate_score"] is None else pytest.approx(alone["gate_score"], rel=1e-9)
        )
    assert reports[0]["gate_histograms"].keys() == {"gate/scores/layer-01", "gate/scores/layer-02"}
    for name in ("by_block", "gate_scores", "attention_maps"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    text = sinks.table(reports)
    assert text.count("sdpa-headwise") == 1
    assert f"{reports[1]['perplexity']:.3f}" in text


def test_an_attention_map_is_what_the_shares_are_made_of(checkpoints, tmp_path: Path) -> None:
    """Of all heads, on a dataset of one window."""
    path = runs.write_dataset(tmp_path / "window", runs.random_documents([SEQ_LENGTH + 1], seed=4))
    words = ["--load", str(checkpoints("headwise")), "--data-path", path, "--figures", str(tmp_path)]
    words += ["--attention-heads", *map(str, range(8))]
    ((maps, by_block),) = run_distributed(maps_of, 1, words)
    for block in (1, 2):
        rows = np.stack([maps[f"block {block}, head {head}"] for head in range(8)])
        assert np.allclose(rows.sum(-1), 1, atol=1e-5)
        assert by_block[block] == pytest.approx(rows[:, FIRST:, 0].mean(), rel=1e-5)


def maps_of(words: list[str]) -> tuple[dict[str, np.ndarray], dict[int, float]]:
    """Return the attention maps without the checkpoint's name, and the shares of the first token by block."""
    (report,), maps = sinks._measure(options_of(words))
    named = {name.split(", ", 1)[1]: image for name, image in maps.items()}
    return named, report["by_block"]["attention/first-token-share"]


def test_refused(checkpoints, data, hugging_face: Path, tmp_path: Path) -> None:
    load = ["--load", str(checkpoints("headwise"))]
    for words, message in (
        ([*load, "--data-path", data["train"] + "_typo"], "there is no dataset"),
        ([*load, "--data-path", data["train"], "--telemetry-rows", "0"], "--telemetry-rows must be positive, not 0"),
        ([*load, "--data-path", data["train"], "--seq-length", "64"], "--seq-length 64 is more than the 32 positions"),
        ([*load, load[1], "--data-path", data["train"]], "--load names the same directory twice"),
        (["--load", str(tmp_path), "--data-path", data["train"]], "holds no checkpoint"),
        ([*load, "--data-path", data["train"], "--output", str(tmp_path)], "is a directory: name a file in it"),
        ([*load, "--data-path", data["train"], "--figures", __file__], "is not a directory: name one"),
        (["--load", str(hugging_face), "--data-path", data["train"], "--family", "gpt"], "--family gpt is not one of"),
        (["--load", str(hugging_face), "--data-path", data["train"], "--ckpt-step", "5"], "--ckpt-step has no effect"),
        ([*load, "--data-path", data["train"], "--family", "qwen3"], "--family has no effect"),
    ):
        with pytest.raises(UserError, match=message):
            sinks.run(options_of(words))
    words = [*load, "--data-path", data["train"], "--figures", str(tmp_path)]
    with pytest.raises(UserError, match="--attention-heads 8 is none of the model's heads, 0 to 7"):
        run_distributed(run_tool, 1, [*words, "--attention-heads", "8"])
    with pytest.raises(UserError, match=r"--attention-blocks 3 has no softmax attention: choose from \[1, 2\]"):
        run_distributed(run_tool, 1, [*words, "--attention-blocks", "3"])
