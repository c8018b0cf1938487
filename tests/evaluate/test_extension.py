"""A longer context: RoPE with another base and YaRN, in megagate, in training and in transformers, are the same."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megagate.errors import UserError
from megagate.evaluate.extension import Extension
from tests.distributed import run_distributed
from tests.evaluate import runs

LONG = 4 * runs.SEQ_LENGTH
EXTENSIONS = {
    "yarn": Extension(rotary_scaling_factor=4.0),
    "base, yarn, scaling": Extension(
        rotary_base=100000, rotary_scaling_factor=3.0, mscale=0.5, max_position_embeddings=LONG
    ),
    "base": Extension(rotary_base=100000, max_position_embeddings=LONG),
}
TOKENS = torch.randint(runs.VOCABULARY, (2, LONG), generator=torch.Generator().manual_seed(3))


def logits(directory: Path, extensions: dict[str, Extension | None]) -> dict[str, torch.Tensor]:
    """Return the logits of `TOKENS` under each extension; on this rank."""
    from megagate.evaluate.directories import as_checkpoint
    from megagate.evaluate.load import load_model

    found = {}
    with as_checkpoint(directory) as checkpoint:
        for name, extension in extensions.items():
            with load_model(checkpoint, extension=extension) as loaded:
                positions = torch.arange(LONG).expand_as(TOKENS).contiguous()
                found[name] = loaded.model(TOKENS, positions, None)[..., : runs.VOCABULARY]
    return found


def export(directory: Path, out: Path) -> None:
    """Export a model, imported first if it is a Hugging Face one, with each of the extensions; on this rank."""
    from megagate.checkpoint.convert import export_checkpoint
    from megagate.evaluate.directories import as_checkpoint

    with as_checkpoint(directory) as checkpoint:
        for name, extension in EXTENSIONS.items():
            export_checkpoint(checkpoint, out / name, extension=extension)


def of_transformers(directory: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("kind", ["ours", "hugging_face"])
def test_an_export_computes_the_same_beyond_the_trained_length(kind, checkpoints, hugging_face, tmp_path) -> None:
    directory = checkpoints("headwise") if kind == "ours" else hugging_face
    run_distributed(export, 1, directory, tmp_path, timeout=200)
    ours = run_distributed(logits, 1, directory, EXTENSIONS | {"none": None}, timeout=200)[0]
    for name in EXTENSIONS:
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["max_position_embeddings"] == LONG
        assert config["model_type"] == ("megagate" if kind == "ours" else "qwen3")
        theirs = of_transformers(tmp_path / name)
        scale = theirs.abs().max()
        assert (ours[name] - theirs).abs().max() / scale < 1e-4, name
        assert (ours[name] - ours["none"]).abs().max() / scale > 1e-3, "the extension changes the model"


@pytest.mark.full
def test_an_extended_export_comes_back_as_it_was(hugging_face, tmp_path) -> None:
    """Its import has the positions that its config.json says."""
    run_distributed(export, 1, hugging_face, tmp_path, timeout=200)
    for name in ("yarn", "base, yarn, scaling"):
        expected = run_distributed(logits, 1, hugging_face, {name: EXTENSIONS[name]})[0][name]
        found = run_distributed(logits, 1, tmp_path / name, {name: None})[0][name]
        assert torch.equal(found, expected)


def continued(folder: Path, data: dict[str, str], out: Path, flags: list[str]) -> None:
    runs.pretrain(out, data, ["--gate-preset", "sdpa-headwise", "--load", str(folder), *flags])


def test_training_goes_on_with_yarn_at_a_longer_sequence(checkpoints, data, tmp_path) -> None:
    folder = checkpoints("headwise")
    longer = f"--seq-length {LONG} --max-position-embeddings {LONG} --position-embedding-type yarn"
    yarn = f"{longer} --rotary-scaling-factor 4 --yarn-original-max-position-embeddings {runs.SEQ_LENGTH}".split()
    with pytest.raises(UserError, match=r"--position-embedding-type rope, but this run has yarn: .* add --finetune"):
        run_distributed(continued, 1, folder, data, tmp_path / "refused", yarn)
    flags = [*yarn, "--finetune", "--lr", "0", "--train-iters", "1"]
    run_distributed(continued, 1, folder, data, tmp_path / "long", flags)
    trained = run_distributed(logits, 1, tmp_path / "long", {"as it is": None})[0]["as it is"]
    extended = run_distributed(logits, 1, folder, {"yarn": EXTENSIONS["yarn"]})[0]["yarn"]
    assert torch.equal(trained, extended), "without a learning rate, training has the model of the extension"


def model(**values: Any) -> argparse.Namespace:
    plain = {
        "position_embedding_type": "rope",
        "rotary_seq_len_interpolation_factor": None,
        "max_position_embeddings": 32,
        "yarn_original_max_position_embeddings": None,
    }
    return argparse.Namespace(**plain | values)


@pytest.mark.parametrize(
    ("extension", "args", "sentence"),
    [
        ({"rotary_base": 0}, {}, "--rotary-base must be positive"),
        ({"rotary_scaling_factor": 0.5}, {}, "makes no context longer"),
        ({"mscale": 1.0}, {}, "--mscale has no effect without --rotary-scaling-factor"),
        ({"rotary_base": 9}, {"position_embedding_type": "none"}, "but the model has --position-embedding-type none"),
        ({"rotary_scaling_factor": 2.0}, {"rotary_seq_len_interpolation_factor": 2}, "both scale the positions"),
    ],
)
def test_what_has_no_effect_is_refused(extension, args, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        Extension(**extension).apply(model(**args))


def test_a_factor_starts_from_the_models_positions_or_from_those_of_its_own_yarn() -> None:
    args = model()
    Extension(rotary_scaling_factor=2.0).apply(args)
    assert (args.position_embedding_type, args.max_position_embeddings) == ("yarn", 64)
    assert args.yarn_original_max_position_embeddings == 32
    Extension(rotary_scaling_factor=4.0).apply(args)
    assert (args.yarn_original_max_position_embeddings, args.max_position_embeddings) == (32, 128)
    Extension().apply(args)
    assert args.max_position_embeddings == 128
