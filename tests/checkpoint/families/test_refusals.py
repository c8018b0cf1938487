"""What a family takes for its own, what it refuses with the reason, and the forms in which a model can be on disk."""

import argparse
import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig
from transformers.models.afmoe.configuration_afmoe import AfmoeConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from megagate.checkpoint.families.afmoe import Afmoe
from megagate.checkpoint.families.official import Official
from megagate.checkpoint.families.qwen3 import Qwen3, Qwen3Moe
from megagate.checkpoint.families.qwen3_next import Qwen3Next, Qwen35Moe
from megagate.checkpoint.families.settings import READ, WITHOUT_COUNTERPART, WITHOUT_EFFECT, ignored_keys
from megagate.checkpoint.families.step import Step
from megagate.errors import UserError
from tests.checkpoint.families.conversion import apply
from tests.checkpoint.families.official_reference import official_config
from tests.checkpoint.families.step_reference import CONFIG as STEP

FAMILIES = [Qwen3(), Qwen3Moe(), Official(), Qwen3Next(), Qwen35Moe(), Step(), Afmoe()]
ELEMENTWISE = official_config(elementwise_attn_output_gate=True)


def default(kind: type) -> dict[str, Any]:
    return json.loads(kind().to_json_string(use_diff=False))


KINDS = {
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen3_next": Qwen3NextConfig,
    "qwen3_5_moe": Qwen3_5MoeTextConfig,
}
CONFIGS = {
    **{name: default(kind) for name, kind in KINDS.items()},
    "official": ELEMENTWISE,
    "step3p5": STEP,
    "afmoe": default(AfmoeConfig),
}
BY_NAME = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_config_is_of_one_family(family: Any, name: str) -> None:
    assert family.recognises(CONFIGS[name]) == (family.name == name)
    if family.name != name:
        with pytest.raises(UserError, match=r"config\.json has model_type .* which is not of the family"):
            family.arguments(CONFIGS[name])


def test_an_official_model_is_not_taken_for_qwen3_next() -> None:
    """The message names the key that decides; a config with the marks of both is nobody's."""
    with pytest.raises(UserError, match="'qwen3' and headwise_attn_output_gate and elementwise_attn_output_gate"):
        Qwen3Next().arguments(ELEMENTWISE)
    both = {**CONFIGS["qwen3_next"], "elementwise_attn_output_gate": True}
    assert not any(family.recognises(both) for family in FAMILIES)


def args_of(**changes: Any) -> argparse.Namespace:
    """Return the arguments of an ungated dense model, as a checkpoint has them, as far as families read them."""
    values = {
        "hybrid_layer_pattern": "*-|*-",
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 8,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 8,
        "tokenizer_vocab_size": 60,
        "max_position_embeddings": 64,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-5,
        "layernorm_zero_centered_gamma": False,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "position_embedding_type": "rope",
        "rotary_base": 1000,
        "rotary_percent": 1.0,
        "untie_embeddings_and_output_weights": True,
        "attention_dropout": 0.0,
        "num_experts": None,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24,
        "moe_router_pre_softmax": False,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
        "moe_router_topk_scaling_factor": None,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,
        "linear_conv_kernel_dim": 4,
        "gate_preset": "baseline",
    }
    return argparse.Namespace(**values | changes)


EXPERTS = {"hybrid_layer_pattern": "*E*E", "num_experts": 4}
NEXT = {
    **EXPERTS,
    "layernorm_zero_centered_gamma": True,
    "rotary_percent": 0.25,
    "gate_preset": "sdpa-elementwise",
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
}


def random_tensors(rules: list, seed: int = 0) -> dict[str, Tensor]:
    """Draw the tensors of the rules' Hugging Face side."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in [weight for rule in rules for weight in rule.hf]:
        count = () if weight.index is None else (1 + max(weight.index, shapes.get(weight.name, (1,))[0] - 1),)
        shapes[weight.name] = (*count, *weight.shape)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_what_the_wrong_family_would_do() -> None:
    """q_proj has one shape in both and another order, so only the recognition stands between them."""
    args = args_of(gate_preset="sdpa-elementwise")
    (official, *_), (other, *_) = (
        [rule for rule in family.rules(args, {}) if rule.hf[0].name.endswith("q_proj.weight")]
        for family in (Official(), Qwen3Next())
    )
    assert official.hf == other.hf
    tensors = [torch.randn(weight.shape) for weight in official.hf]
    assert not torch.equal(official.to_megatron(tensors)[0], other.to_megatron(tensors)[0])


IMPORTS = [
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("qwen3", {"attention_bias": True}, "attention_bias True"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window True"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 32}, "'sliding_attention'"),
    ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "rope_type 'dynamic'"),
    ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn' without a factor"),
    (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 2.0}},
        "attention_factor 2.0, but YaRN with these values has 1.13",
    ),
    ("qwen3", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type 'linear'"),
    ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.5}}, "rope_theta 1000.5"),
    ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by layer"),
    ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
    ("qwen3", {"rope_scaling": {"factor": 4.0}}, "a factor for the rotary embedding"),
    ("qwen3", {"vocab_size": None}, "no vocab_size"),
    ("qwen3", {"layer_types": ["chunked_attention"] * 32}, "'chunked_attention', which cannot be represented"),
    ("qwen3", {"rope_parameters": [1]}, "for the rotary embedding, which must be a JSON object"),
    ("qwen3", {"layer_types": ["linear_attention"] * 32}, "'linear_attention'"),
    ("qwen3", {"layer_types": ["full_attention"] * 31}, "31 layer_types for 32"),
    *[
        ("qwen3", {key: value}, f"{key} ")
        for key, value in {"final_logit_softcapping": 30.0, "mlp_bias": True, "logits_scaling": 8.0}.items()
    ],
    ("qwen3_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5"),
    ("qwen3_moe", {"num_experts": 0, "num_local_experts": 0}, "num_experts 0"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step 0"),
    ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 1}, "one expert per token"),
    ("qwen3_moe", {"mlp_only_layers": list(range(24))}, "leave no layer"),
    ("official", {"headwise_attn_output_gate": True}, "both headwise_attn_output_gate and elementwise"),
    ("official", {"qkv_bias": True}, "qkv_bias True"),
    ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate False"),
    ("qwen3_next", {"layer_types": ["mamba"] * 48}, "layer_types"),
    ("qwen3_next", {"layer_types": ["full_attention"]}, "give 48"),
    ("qwen3_5_moe", {"text_config": CONFIGS["qwen3_5_moe"], "quantization_config": {"a": 1}}, "quantised weights"),
    ("qwen3_5_moe", {"attention_bias": True}, "attention_bias True"),
    ("step3p5", {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
    ("step3p5", {"swiglu_limits": [0.0, 7.0]}, "swiglu_limits"),
    ("step3p5", {"swiglu_limits_shared": [16.0, 0.0]}, "swiglu_limits_shared"),
    ("step3p5", {"rope_theta": [1000.0, 10000.0]}, "rope_theta that differs"),
    ("step3p5", {"partial_rotary_factors": [1.0, 0.5]}, "partial_rotary_factors that differs"),
    ("step3p5", {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling"),
    ("step3p5", {"num_nextn_predict_layers": 3}, "multi-token prediction"),
    ("step3p5", {"use_head_wise_attn_gate": None}, "use_head_wise_attn_gate False"),
    ("step3p5", {"moe_router_activation": "softmax"}, "moe_router_activation 'softmax'"),
    ("step3p5", {"norm_expert_weight": False}, "norm_expert_weight False"),
    ("step3p5", {"use_rope_layers": [True, False]}, "use_rope_layers"),
    ("afmoe", {}, "no norm"),
]


@pytest.mark.parametrize(("name", "changes", "match"), IMPORTS, ids=[f"{name}: {text}" for name, _, text in IMPORTS])
def test_imports_that_are_refused(name: str, changes: dict[str, Any], match: str) -> None:
    if name != "afmoe":
        assert BY_NAME[name].arguments(CONFIGS[name])["gate_preset"]
    with pytest.raises(UserError, match=match):
        BY_NAME[name].arguments({**CONFIGS[name], **changes})


HOLDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "official": {"gate_preset": "sdpa-headwise"},
    "qwen3_next": NEXT,
    "qwen3_5_moe": NEXT,
    "step3p5": NEXT
    | {
        "gate_preset": "sdpa-headwise",
        "moe_shared_expert_gate": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
}
EXPORTS = [
    *[
        ("qwen3", {name: value}, name)
        for name, value in {
            "normalization": "LayerNorm",
            "layernorm_zero_centered_gamma": True,
            "position_embedding_type": "learned_absolute",
            "rotary_percent": 0.5,
            "rotary_interleaved": True,
            "rotary_seq_len_interpolation_factor": 2,
            "use_rope_scaling": True,
            "no_rope_freq": [0, 0, 1, 1],
            "window_size": (16, 0),
            "softmax_type": "off-by-one",
            "qk_layernorm": False,
            "swiglu": False,
            "activation_func_clamp_value": 7.0,
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "mtp_num_layers": 1,
        }.items()
    ],
    ("qwen3", {"gate_preset": "sdpa-elementwise"}, "gate sdpa-elementwise"),
    ("qwen3", EXPERTS, "num_experts"),
    ("qwen3", {"hybrid_layer_pattern": "*-**"}, "not blocks"),
    ("qwen3", {"hybrid_layer_pattern": "G-*-"}, "Gated DeltaNet"),
    ("qwen3_moe", {"num_experts": None, "hybrid_layer_pattern": "*-*-"}, "without experts"),
    ("qwen3_moe", {"moe_router_score_function": "sigmoid"}, "moe_router_score_function"),
    ("qwen3_moe", {"moe_shared_expert_intermediate_size": 16}, "moe_shared_expert_intermediate_size"),
    ("qwen3_moe", {"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor"),
    ("qwen3_moe", {"moe_router_group_topk": 2}, "moe_router_group_topk"),
    ("qwen3_moe", {"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type"),
    ("official", {"gate_preset": "value-headwise"}, "gate value-headwise"),
    ("official", {"hybrid_layer_pattern": "G-*-"}, "Gated DeltaNet"),
    ("qwen3_next", {"layernorm_zero_centered_gamma": False}, "layernorm_zero_centered_gamma"),
    ("qwen3_next", {"gate_preset": "sdpa-headwise"}, "gate sdpa-headwise"),
    ("qwen3_next", {"moe_shared_expert_gate": False}, "moe_shared_expert_gate"),
    ("qwen3_next", {"moe_shared_expert_intermediate_size": None}, "without a shared expert"),
    ("qwen3_5_moe", {"hybrid_layer_pattern": "*-*E"}, "dense feed-forward"),
    ("qwen3_5_moe", {"moe_router_pre_softmax": True}, "moe_router_pre_softmax"),
    ("step3p5", {"moe_router_score_function": "softmax"}, "moe_router_score_function"),
    ("step3p5", {"num_experts": None}, "without experts"),
]


@pytest.mark.parametrize(
    ("name", "changes", "match"), EXPORTS, ids=[f"{name}: {changes}" for name, changes, _ in EXPORTS]
)
def test_exports_that_are_refused(name: str, changes: dict[str, Any], match: str) -> None:
    assert BY_NAME[name].config(args_of(**HOLDS[name]))["model_type"]
    with pytest.raises(UserError, match=match):
        BY_NAME[name].config(args_of(**HOLDS[name] | changes))


@pytest.mark.parametrize("preset", ["baseline", "sdpa-elementwise", "sdpa-headwise"])
@pytest.mark.parametrize("norms", [True, False])
def test_the_config_of_an_official_model(preset: str, norms: bool) -> None:
    config = Official().config(args_of(gate_preset=preset, qk_layernorm=norms))
    arguments = Official().arguments(config)
    assert (arguments["gate_preset"], arguments["qk_layernorm"]) == (preset, norms)


# The keys without which no model can be made; any other may be missing, and then has transformers' default.
NEEDED = {"model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"}
NEEDED |= {"num_attention_heads", "num_key_value_heads"}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_moe"])
def test_defaults_are_those_of_transformers(name: str) -> None:
    config = CONFIGS[name]
    expected = BY_NAME[name].arguments(config)
    for key in config.keys() - NEEDED:
        rest = {other: value for other, value in config.items() if other != key}
        assert BY_NAME[name].arguments(rest) == expected, key


class Recorded(dict):
    """A config that remembers which of its keys are asked for."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "afmoe"])
def test_each_key_is_read_or_without_effect(name: str) -> None:
    """Whatever transformers or the released files may say of a model; and what is known is really looked at."""
    config = Recorded(CONFIGS[name])
    BY_NAME[name].arguments(config)
    assert config.read <= READ | WITHOUT_EFFECT | set(WITHOUT_COUNTERPART)
    assert config.keys() <= config.read | WITHOUT_EFFECT
    assert not ignored_keys(config)


def test_unknown_keys_are_named() -> None:
    assert ignored_keys({**CONFIGS["qwen3"], "auto_map": {"AutoModel": "a.B"}, "surprise": 1, "empty": None}) == [
        "auto_map",
        "surprise",
    ]
    assert ignored_keys({"model_type": "qwen3_5_moe", "text_config": {"surprise": 1}}) == ["surprise"]


# config.json of the released files, with fewer and smaller layers.
RELEASED_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 96,
}
RELEASED_MOE = {
    **RELEASED_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
RELEASED_NEXT = {
    **{key: value for key, value in RELEASED_MOE.items() if key not in ("sliding_window", "max_window_layers")},
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 8,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 16,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    "config", [RELEASED_QWEN3, RELEASED_MOE, RELEASED_NEXT], ids=lambda config: config["model_type"]
)
def test_released_configs(config: dict[str, Any]) -> None:
    """They are in the form of transformers 4, and mean what transformers 5 makes of them."""
    family, kind = BY_NAME[config["model_type"]], KINDS[config["model_type"]]
    understood = json.loads(kind.from_dict(config).to_json_string(use_diff=False))
    arguments = family.arguments(config)
    assert arguments == family.arguments(understood)
    assert arguments["rotary_base"] == config["rope_theta"]
    assert not ignored_keys(config)


# ---------------------------------------------------------------------------------------------------------------------
# Forms on disk


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_experts_stored_together(prefix: str) -> None:
    """Qwen3.5's released files have all experts of a layer in one tensor, and may have vision beside the text."""
    args, family = args_of(**NEXT | {"hybrid_layer_pattern": "GE*E"}), Qwen35Moe()
    apart = list(family.rules(args, {}))
    tensors = random_tensors(apart)
    together: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            together[name.replace("model.", prefix, 1)] = tensor
    for layer in range(2):
        experts = [f"model.layers.{layer}.mlp.experts.{expert}." for expert in range(4)]
        halves = [torch.cat([tensors[f"{e}gate_proj.weight"], tensors[f"{e}up_proj.weight"]]) for e in experts]
        together[f"{prefix}layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(halves)
        downs = [tensors[f"{e}down_proj.weight"] for e in experts]
        together[f"{prefix}layers.{layer}.mlp.experts.down_proj"] = torch.stack(downs)
    expected = apply(apart, tensors)
    actual = apply(list(family.rules(args, {}, together.keys())), together)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], value) for key, value in expected.items())


def test_a_model_with_vision_has_its_text_in_a_part_of_the_config() -> None:
    text = CONFIGS["qwen3_5_moe"]
    config = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    assert Qwen35Moe().recognises(config)
    expected = Qwen35Moe().arguments({**text, "tie_word_embeddings": True})
    assert Qwen35Moe().arguments(config) == expected
    assert set(Qwen35Moe().dropped) == {"mtp.", "model.visual."}


def test_a_tied_head_that_is_stored_all_the_same() -> None:
    args = args_of(untie_embeddings_and_output_weights=False)
    tensors = random_tensors(list(Qwen3().rules(args, {})))
    assert "lm_head.weight" not in tensors
    expected = apply(list(Qwen3().rules(args, {}, tensors.keys())), tensors)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rules = list(Qwen3().rules(args, {}, tensors.keys()))
    actual = apply(rules, tensors)
    assert all(torch.equal(actual[key], value) for key, value in expected.items())
    assert apply(rules, actual, to_hf=True).keys() == tensors.keys()
    tensors["lm_head.weight"][3, 5] += 1
    with pytest.raises(UserError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"):
        apply(rules, tensors)


@pytest.mark.parametrize("name", HOLDS)
def test_rules_work_on_shapes_alone(name: str) -> None:
    """On tensors without numbers, by which a conversion can be checked before it starts."""
    for rule in BY_NAME[name].rules(args_of(**HOLDS[name]), {}):
        empty = [torch.empty(weight.shape, device="meta") for weight in rule.hf]
        outputs = rule.to_megatron(empty)
        assert [tuple(output.shape) for output in outputs] == [weight.shape for weight in rule.megatron]
        assert [tuple(output.shape) for output in rule.to_hf(outputs)] == [weight.shape for weight in rule.hf]
