"""Models of transformers and megagate's, converted into each other: the same logits on each layout, the same bits."""

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

from megagate.checkpoint.families.base import Family
from megagate.checkpoint.families.official import Official
from megagate.checkpoint.families.qwen3 import Qwen3, Qwen3Moe
from megagate.checkpoint.families.qwen3_next import Qwen3Next, Qwen35Moe
from megagate.checkpoint.families.step import Step
from tests.checkpoint.families.conversion import (
    Converted,
    PlainCase,
    apply,
    batch,
    convert,
    error_of,
    load_and_save,
    logits_of,
    randomize,
    saved,
    tokens,
)
from tests.checkpoint.families.official_reference import Reference, official_config
from tests.checkpoint.families.step_reference import Reference as StepReference
from tests.distributed import run_distributed
from tests.model.test_layouts import Layout
from tests.model.training import VOCABULARY, assemble, train_all

TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-5

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
NEXT = {
    **EXPERTS,
    "head_dim": 16,  # of which a quarter is turned
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 3,
}
PARTIAL_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "partial_rotary_factor": 0.5,
    }
}


@dataclass(frozen=True)
class Model:
    """A kind of model to test."""

    family: Family
    make: Callable[[], Any]
    """Makes the model of transformers, whose weights are then drawn."""
    layouts: tuple[Layout, ...] = field(default=())


TP2, TP4, EP2, PP2 = (
    Layout(ranks=2, tp=2, sp=True),
    Layout(ranks=4, tp=4, sp=True),  # the models have two groups, so two ranks share one
    Layout(ranks=2, ep=2),
    Layout(ranks=2, pp=2),
)

MODELS = {
    "qwen3": Model(Qwen3(), lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)), (TP4,)),
    "qwen3-tied": Model(Qwen3(), lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)), (PP2,)),
    "qwen3_moe": Model(
        Qwen3Moe(),
        lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True)),
        (TP2, TP4, EP2, PP2),
    ),
    "qwen3_moe-mixed": Model(
        Qwen3Moe(), lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=2)), (TP2,)
    ),
    "official": Model(Official(), lambda: Reference(official_config(use_qk_norm=False, tie_word_embeddings=True))),
    "official-headwise": Model(
        Official(), lambda: Reference(official_config(headwise_attn_output_gate=True)), (TP2, TP4, PP2)
    ),
    "official-elementwise": Model(
        Official(),
        lambda: Reference(official_config(elementwise_attn_output_gate=True, model_type="qwen2")),
        (TP2, TP4),
    ),
    "qwen3_next": Model(
        Qwen3Next(), lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES | NEXT)), (TP2, TP4, EP2, PP2)
    ),
    "qwen3_next-mixed": Model(
        Qwen3Next(),
        lambda: Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **SIZES | NEXT | PARTIAL_YARN, mlp_only_layers=[1], norm_topk_prob=False, tie_word_embeddings=True
            )
        ),
    ),
    "qwen3_5_moe": Model(
        Qwen35Moe(), lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**qwen3_5_sizes())), (TP2, TP4)
    ),
    "step3p5": Model(Step(), StepReference, (TP2, TP4, EP2)),
}


def qwen3_5_sizes() -> dict[str, Any]:
    """Return the sizes of a model without dense layers."""
    return {name: size for name, size in (SIZES | NEXT).items() if name != "intermediate_size"}


@functools.cache
def reference(name: str) -> Any:
    """Return the model of transformers."""
    SIZES["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000.0}  # Qwen3-Next's config adds to it
    return randomize(MODELS[name].make())


@functools.cache
def converted(name: str) -> Converted:
    with tempfile.TemporaryDirectory() as directory:
        config, tensors = saved(reference(name), Path(directory))
    return convert(MODELS[name].family, config, tensors)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the directory of a model's checkpoint in Megatron's format."""
    made: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            model = converted(name)
            run_distributed(load_and_save, 1, model.flags, model.weights, str(made[name]))
        return made[name]

    return write


@torch.no_grad()
def expected_logits(name: str) -> torch.Tensor:
    output = reference(name)(tokens())
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, checkpoint: Callable[[str], Path]) -> None:
    expected = expected_logits(name)
    assert expected.std(dim=(0, 1)).min() > 0.1, "logits that say nothing"
    assert error_of(logits_of(converted(name).flags, checkpoint(name)), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(name, layout, id=f"{name}-{layout}") for name in MODELS for layout in MODELS[name].layouts],
)
def test_layouts(name: str, layout: Layout, checkpoint: Callable[[str], Path]) -> None:
    flags = f"{converted(name).flags} {layout.flags}"
    assert error_of(logits_of(flags, checkpoint(name), layout.ranks), expected_logits(name)) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_loss_of_the_first_step(name: str, checkpoint: Callable[[str], Path]) -> None:
    case = PlainCase(flags=converted(name).flags, load=str(checkpoint(name)))
    loss = assemble([run_distributed(train_all, 1, [case])[0][0]]).losses["lm loss"]
    expected = functional.cross_entropy(expected_logits(name).flatten(0, 1), batch()[:, 1:].flatten())
    assert loss == pytest.approx(float(expected), rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_round_trips_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    """There and back from what transformers has written, and from there once more."""
    model = converted(name)
    tensors = {key: tensor.to(dtype) for key, tensor in model.tensors.items()}
    weights = apply(model.rules, tensors)
    assert all(tensor.dtype == dtype for tensor in weights.values())
    back = apply(model.rules, weights, to_hf=True)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in tensors.items())
    again = apply(model.rules, back)
    assert all(torch.equal(again[key], weight) for key, weight in weights.items())


@pytest.mark.parametrize("name", MODELS)
def test_an_export_describes_the_imported_model(name: str) -> None:
    """It knows nothing of the import but Megatron's arguments."""
    model = converted(name)
    config = json.loads(json.dumps(model.family.config(model.args)))
    assert model.family.recognises(config)
    assert model.family.arguments(config) == model.family.arguments(model.config)
    back = apply(list(model.family.rules(model.args, config)), model.weights, to_hf=True)
    assert back.keys() == model.tensors.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in model.tensors.items())


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("qwen")])
def test_export_loads_in_transformers(name: str, tmp_path: Path) -> None:
    model = converted(name)
    (tmp_path / "config.json").write_text(json.dumps(model.family.config(model.args)))
    save_file(apply(model.rules, model.weights, to_hf=True), tmp_path / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(reference(name))
    ours, theirs = loaded.state_dict(), reference(name).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens()).logits, expected_logits(name))
