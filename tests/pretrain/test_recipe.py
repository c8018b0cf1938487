"""Recipes: flags from YAML, overridden by the command line, with an error for whatever would be ignored."""

import os
from pathlib import Path

import pytest

from megagate.errors import UserError
from megagate.pretrain.arguments import build_parser, read
from megagate.recipe import merge_recipe
from tests.training import EXPERTS, MODEL, RUN

MODEL_YAML = """\
num-layers: 2
hidden-size: 32
num_attention_heads: 8      # underscores are the same
ffn-hidden-size: 64
swiglu: true
qk-layernorm: false
seq-length: 32
max-position-embeddings: 32
micro-batch-size: 1
data-path: [0.3, a, 0.7, b]
lr: 1.0e-3
tokenizer-type: NullTokenizer
gate-preset: sdpa-headwise
"""


def write(directory: Path, text: str) -> str:
    path = directory / "recipe.yaml"
    path.write_text(text)
    return str(path)


def test_flags_of_every_kind(tmp_path: Path) -> None:
    args = read(["--recipe", write(tmp_path, MODEL_YAML)])
    assert (args.hidden_size, args.num_attention_heads, args.lr) == (32, 8, 1e-3)
    assert args.swiglu is True
    assert args.qk_layernorm is False
    assert args.data_path == ["0.3", "a", "0.7", "b"]
    assert args.gate_preset == "sdpa-headwise"


def test_command_line_wins(tmp_path: Path) -> None:
    recipe = write(tmp_path, MODEL_YAML)
    args = read(["--hidden-size", "64", "--recipe", recipe, "--lr=5e-4", "--data-path", "c"])
    assert (args.hidden_size, args.lr, args.data_path) == (64, 5e-4, ["c"])
    assert read(["--recipe", recipe, "--omit", "swiglu", "gate-preset"]).swiglu is False
    assert read(["--recipe", recipe, "--omit", "gate_preset"]).gate_preset is None


@pytest.mark.parametrize(
    "flags", [["--gate-preset", "baseline"], ["--gate-position=none"], ["--attention-output-gate"]]
)
def test_gate_flags_are_one_setting(tmp_path: Path, flags: list[str]) -> None:
    recipe = write(tmp_path, MODEL_YAML + "gate-row-alignment: 32\n")
    args = read(["--recipe", recipe, *flags])
    assert args.gate_preset in (None, "baseline")
    assert args.gate_row_alignment is None


def test_environment_is_set_unless_it_is_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAGATE_TEST_KEPT", "outside")
    monkeypatch.delenv("MEGAGATE_TEST_SET", raising=False)
    parser, gate_flags = build_parser()
    recipe = write(tmp_path, "environment:\n  MEGAGATE_TEST_KEPT: recipe\n  MEGAGATE_TEST_SET: 1\n")
    merge_recipe(["--recipe", recipe], parser, gate_flags)
    assert (os.environ["MEGAGATE_TEST_KEPT"], os.environ.pop("MEGAGATE_TEST_SET")) == ("outside", "1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("swiglu: true\nswiglu: false\n", r"the key swiglu is in line 1 and again in line 2; mend it"),
        ("hiden-size: 3\n", r"'hiden-size' in the recipe .*recipe.yaml is no flag; did you mean hidden-size"),
        ("swiglu: 3\n", r"swiglu in the recipe .* is a flag without a value: write true or false, not 3"),
        ("lr:\n", r"lr in the recipe .* needs a value, not None"),
        ("lr: {a: 1}\n", r"lr in the recipe .* needs a value"),
        ("- a\n- b\n", r"must be a mapping of flag names to values"),
        ("a: [1\n", r"is not valid YAML"),
        ("num-layers: 2\nnum_layers: 3\n", r"has the key num-layers twice"),
        ("verbose: true\n", r"verbose in the recipe .* belongs on the command line"),
        ("environment:\n  A:\n", r"the variable A under environment in the recipe .* has no value"),
        ("environment: 3\n", r"environment in the recipe .* must be a mapping"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(["--recipe", write(tmp_path, text)])


def test_missing_recipe_and_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the recipe nowhere.yaml: No such file"):
        read(["--recipe", "nowhere.yaml"])
    with pytest.raises(UserError, match=r"--omit swiglo: the recipe .* has no such key; did you mean swiglu"):
        read(["--recipe", write(tmp_path, MODEL_YAML), "--omit", "swiglo"])


def test_a_list_for_a_flag_with_one_value_keeps_megatrons_syntax(tmp_path: Path) -> None:
    recipe = write(tmp_path, "moe-layer-freq: [0, 1]\n")
    args = read([*MODEL, *EXPERTS, *RUN, "--recipe", recipe])
    assert args.hybrid_layer_pattern == "*-*E"
