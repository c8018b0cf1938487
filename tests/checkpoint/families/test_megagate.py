"""megagate's own export: the model that transformers loads from it computes what megagate's does.

Every weight is random. The real model on one process is the truth; its weights go through the rules, are written to a
directory with config.json and the modeling file, and come back through AutoModelForCausalLM.
"""

import argparse
import ast
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megagate.checkpoint.families.base import Rule, Weight
from megagate.checkpoint.families.megagate import FAMILY, MODELING_FILE
from megagate.errors import UserError
from megagate.gate import PRESETS, QKVLayout, gate_config_from_args
from megagate.gate.functional import AttentionWeights, reference_attention, rotary_tables
from tests.distributed import run_distributed
from tests.model.test_delta_net import DELTA_NET
from tests.model import training
from tests.model.training import VOCABULARY

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
"""Of the largest logit, in fp32."""

TOKENS = torch.randint(VOCABULARY - 1, (2, 16), generator=torch.Generator().manual_seed(1))

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24"
SIZES = "--num-layers 2 --ffn-hidden-size 48 --micro-batch-size 2"
DENSE = f"{SIZES} --num-query-groups 4"
MIXED = (
    f"{SIZES} {EXPERTS} --num-query-groups 2 --moe-layer-freq [1,0] --disable-bias-linear --add-qkv-bias "
    "--untie-embeddings-and-output-weights --apply-layernorm-1p --rotary-percent 0.5"
)
PATTERN = f"{EXPERTS} --ffn-hidden-size 48 --micro-batch-size 2 --num-query-groups 2 --disable-bias-linear"

MODELS = {preset: f"{MIXED} --gate-preset {preset}" for preset in PRESETS}
MODELS |= {
    flags: f"{MIXED} {flags}"
    for flags in (
        "--gate-position query --gate-sharing head-shared --gate-activation silu",
        "--gate-position key --gate-combine add --gate-granularity headwise",
        "--gate-position value --gate-sharing head-shared --gate-granularity headwise --gate-activation ns-sigmoid",
        "--gate-position output --gate-combine add --gate-activation identity",
        "--gate-position sdpa --gate-input constant --gate-granularity headwise --gate-sharing head-shared",
        "--gate-position sdpa --gate-granularity headwise --gate-row-alignment 5 --gate-sharing head-shared",
    )
}
MODELS |= {
    "dense, biases": f"{DENSE} --gate-preset output-elementwise",
    "LayerNorm": f"{DENSE} --normalization LayerNorm --gate-preset sdpa-rmsnorm --apply-layernorm-1p",
    "no QK-norm": f"{DENSE} --normalization LayerNorm --gate-preset value-headwise --without --qk-layernorm",
    "no groups": f"{SIZES} --gate-preset sdpa-headwise --without --group-query-attention",
    "shared experts": f"{MIXED} --moe-shared-expert-intermediate-size 16 --gate-preset sdpa-elementwise",
    "gated shared experts": f"{MIXED} --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate",
    "softmax before top-k": f"{MIXED} --moe-router-pre-softmax --moe-router-topk-scaling-factor 2.5",
    "sigmoid router": f"{MIXED} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-topk-scaling-factor 2.5 --gate-preset sdpa-elementwise",
    "softplus router": f"{MIXED} --moe-router-score-function sqrtsoftplus",
    "one expert": f"{MIXED} --moe-router-topk 1 --moe-router-pre-softmax --moe-router-dtype fp64",
    "experts with biases": f"{DENSE} {EXPERTS} --gate-preset sdpa-headwise --no-bias-gelu-fusion --without --swiglu",
    "gelu": f"{DENSE} --disable-bias-linear --without --swiglu",
    "fused gelu": f"{DENSE} --without --swiglu",
    "squared ReLU": f"{DENSE} --squared-relu --no-bias-gelu-fusion {EXPERTS} --moe-layer-freq [0,1] --without --swiglu",
    "quick GEGLU": f"{DENSE} --quick-geglu --no-bias-gelu-fusion --without --swiglu",
    "some windows": f"{DENSE} --window-size 4,0 --window-attn-skip-freq 2 --gate-preset sdpa-headwise",
    "windows": f"{DENSE} --window-size 4,0",
    "some without rope": f"{DENSE} --no-rope-freq [0,1] --gate-preset sdpa-headwise",
    "learned positions": f"{DENSE} --position-embedding-type learned_absolute --gate-preset sdpa-headwise",
    "no positions": f"{DENSE} --position-embedding-type none",
    "interpolated positions": f"{DENSE} --rotary-seq-len-interpolation-factor 4 --rotary-base 500000",
    "YaRN": f"{DENSE} --position-embedding-type yarn --rotary-scaling-factor 4 --kv-channels 16 --mscale 0.7 "
    "--yarn-original-max-position-embeddings 8 --rotary-base 100",
    "pattern": f"{PATTERN} --hybrid-layer-pattern=-**E-*E-E --gate-preset sdpa-headwise --window-size 3,0 "
    "--window-attn-skip-freq [0,0,1,0,0,0,0,0,0]",
    "delta net": f"{PATTERN} {DELTA_NET} --hybrid-layer-pattern GE*EG-G --gate-preset sdpa-headwise "
    "--apply-layernorm-1p",
    "delta net, LayerNorm": f"{DENSE} {DELTA_NET} --linear-attention-freq 2 --normalization LayerNorm",
}
"""Flags besides those of `tests.model.training`, of which the flag after `--without` is left out."""

MODEL_FLAGS = "--swiglu --qk-layernorm --group-query-attention"
"""Flags there that say what the model is and cannot be taken back."""


# ---------------------------------------------------------------------------------------------------------------------
# In the rank


def original(name: str) -> tuple[argparse.Namespace, dict[str, Tensor], Tensor]:
    """Return a model's arguments, its global parameters and buffers, and its logits [b, s, vocabulary]."""
    from megatron.training import get_args

    flags, _, left_out = MODELS[name].partition(" --without ")
    with mock.patch.object(training, "BASE", training.BASE.replace(left_out, "") if left_out else training.BASE):
        model = training.build(training.Case(flags=flags))[0][0].module.eval()
    state = training.join(list(training.pieces(model)))
    for key, buffer in model.named_buffers():
        if key.endswith("expert_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(2)) / 2)
            state[key] = buffer.clone()
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad():
        return argparse.Namespace(**vars(get_args())), state, model(TOKENS, positions, None)


def arguments_of(flags: dict[str, Any]) -> argparse.Namespace:
    """Return the arguments that the trainer parses of a recipe's flags."""
    from megagate.pretrain.arguments import build_parser, parse
    from megagate.pretrain.recipe import recipe_tokens

    tokens = recipe_tokens({name.replace("_", "-"): value for name, value in flags.items()}, build_parser()[0], "flags")
    run = (
        "--mock-data --tokenizer-type NullTokenizer --seq-length 16 --micro-batch-size 2 --lr 1 --train-iters 1 "
        "--logging-level 40"
    )
    return argparse.Namespace(**vars(parse([*run.split(), *tokens])))


# ---------------------------------------------------------------------------------------------------------------------
# In this process


def of(state: dict[str, Tensor], weight: Weight) -> Tensor:
    value = state[weight.name] if weight.index is None else state[weight.name][weight.index]
    return value


def without_padding(state: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Drop the padding of the vocabulary, as the driver does."""
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {name: value[:rows] if name in names else value for name, value in state.items()}


def to_hf(rules: list[Rule], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Apply the rules; every weight of both sides is used once and has its shape."""
    result: dict[str, Tensor] = {}
    used: dict[str, list[int | None]] = {}
    for rule in rules:
        inputs = [of(state, weight) for weight in rule.megatron]
        for weight, value in zip(rule.megatron, inputs, strict=True):
            assert value.shape == weight.shape, weight
            used.setdefault(weight.name, []).append(weight.index)
        for weight, value in zip(rule.hf, rule.to_hf(inputs), strict=True):
            assert value.shape == weight.shape, weight
            assert weight.name not in result
            result[weight.name] = value.contiguous()
    assert used.keys() == state.keys()
    for name, indices in used.items():
        assert indices in ([None], list(range(len(state[name])))), name
    return result


def assert_inverse(rules: list[Rule], state: dict[str, Tensor], hf: dict[str, Tensor]) -> None:
    """The way back gives the very numbers."""
    for rule in rules:
        outputs = rule.to_megatron([hf[weight.name] for weight in rule.hf])
        for weight, value in zip(rule.megatron, outputs, strict=True):
            assert torch.equal(value, of(state, weight)), weight


@pytest.fixture(autouse=True)
def remote_code_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """transformers copies a directory's code into its cache before importing it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def export(name: str, folder: Path, **loading: Any) -> tuple[Any, dict[str, Tensor], dict[str, Any], Tensor]:
    """Write the model as the driver does and load it; returns it, its weights, its config.json and megagate's logits."""
    from safetensors.torch import save_file

    args, state, logits = run_distributed(original, 1, name, timeout=120)[0]
    config = FAMILY.config(args)
    rules = list(FAMILY.rules(args, config))
    state = without_padding(state, config["vocab_size"])
    hf = to_hf(rules, state)
    assert_inverse(rules, state, hf)
    folder.mkdir(exist_ok=True)
    save_file(hf, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for file in FAMILY.files:
        (folder / file.name).write_bytes(file.read_bytes())
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **loading
    )
    assert not any(info.values()), info
    return model.eval(), hf, config, logits[..., : config["vocab_size"]]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_and_round_trip(name: str, tmp_path: Path) -> None:
    """The logits, those of tokens given one after another, and the weights on the way back."""
    model, _, _, expected = export(name, tmp_path / "model")
    assert_close(model(TOKENS).logits, expected)

    cache, steps = None, []
    for part in TOKENS.split([5, 1, 1, 3, 6], dim=1):
        outputs = model(part, cache=cache, use_cache=True)
        cache = outputs.cache
        steps.append(outputs.logits)
    assert_close(torch.cat(steps, dim=1), expected)
