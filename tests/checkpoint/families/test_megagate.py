"""megagate's own export: the model that transformers loads from it computes what megagate's does.

Every weight is random. The real model on one process is the truth; its weights go through the rules, are written to a
directory with config.json and the modeling file, and come back through AutoModelForCausalLM.
"""

import argparse
import ast
import contextlib
import functools
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megagate.checkpoint.families.base import Rule, Weight
from megagate.checkpoint.families.megagate import FAMILY, MODELING_FILE
from megagate.errors import UserError
from megagate.gate import (
    PRESETS,
    GateActivation,
    GateCombine,
    GateConfig,
    GateGranularity,
    GateInput,
    GatePosition,
    GateSharing,
    QKVLayout,
    gate_config_from_args,
)
from megagate.gate.functional import AttentionWeights, reference_attention, rotary_tables
from tests.distributed import run_distributed
from tests.model import training
from tests.model.test_delta_net import DELTA_NET
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
    "YaRN on a part": f"{DENSE} --position-embedding-type yarn --rotary-scaling-factor 4 --kv-channels 16 "
    "--yarn-original-max-position-embeddings 8 --rotary-base 100 --rotary-percent 0.5 --gate-preset sdpa-headwise",
    "pattern": f"{PATTERN} --hybrid-layer-pattern=-**E-*E-E --gate-preset sdpa-headwise --window-size 3,0 "
    "--window-attn-skip-freq [0,0,1,0,0,0,0,0,0]",
    "delta net": f"{PATTERN} {DELTA_NET} --hybrid-layer-pattern GE*EG-G --gate-preset sdpa-headwise "
    "--apply-layernorm-1p",
    "delta net, LayerNorm": f"{DENSE} {DELTA_NET} --linear-attention-freq 2 --normalization LayerNorm",
}
"""Flags besides those of `tests.model.training`, of which the flag after `--without` is left out."""

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
    from megatron.training.argument_utils import ArgumentGroupFactory

    from megagate.pretrain.arguments import build_parser, parse
    from megagate.recipe import recipe_tokens

    run = "--mock-data --tokenizer-type NullTokenizer --seq-length 16 --micro-batch-size 2 --lr 1 --train-iters 1"
    # Megatron parses its own source for the help of its flags.
    with mock.patch.object(ArgumentGroupFactory, "_get_field_docstrings", lambda self, kind: {}):
        tokens = recipe_tokens({key.replace("_", "-"): value for key, value in flags.items()}, build_parser()[0], "")
        return argparse.Namespace(**vars(parse([*run.split(), "--logging-level", "40", *tokens])))


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


@dataclass(frozen=True)
class Exported:
    """A model as megagate has it, and the directory that it was written to."""

    folder: Path
    args: argparse.Namespace
    config: dict[str, Any]
    rules: list[Rule]
    state: dict[str, Tensor]
    hf: dict[str, Tensor]
    logits: Tensor
    """[b, s, vocabulary], of `TOKENS`."""

    def load(self, **settings: Any) -> Any:
        """Load it with transformers; nothing is missing and nothing is left over."""
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, trust_remote_code=True, output_loading_info=True, **settings
        )
        assert not any(info.values()), info
        return model.eval()


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Exported]]:
    """Write a model as the driver does; each once."""
    from safetensors.torch import save_file

    @functools.cache
    def write(name: str) -> Exported:
        args, state, logits = run_distributed(original, 1, name, timeout=120)[0]
        config = FAMILY.config(args)
        rules = list(FAMILY.rules(args, config))
        state = without_padding(state, config["vocab_size"])
        hf = to_hf(rules, state)
        folder = tmp_path_factory.mktemp("exported")
        save_file(hf, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        for file in FAMILY.files:
            (folder / file.name).write_bytes(file.read_bytes())
        return Exported(folder, args, config, rules, state, hf, logits[..., : config["vocab_size"]])

    # transformers copies a directory's code into a cache before importing it.
    with mock.patch("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules"))):
        yield write


Export = Callable[[str], Exported]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits(export: Export, name: str) -> None:
    """The logits of all tokens at once, and of tokens given in parts with a cache."""
    exported = export(name)
    model = exported.load()
    assert_close(model(TOKENS, use_cache=False).logits, exported.logits)

    cache, parts = None, []
    for tokens in TOKENS.split([5, 1, 1, 3, 6], dim=1):
        outputs = model(tokens, cache=cache, use_cache=True)
        cache = outputs.cache
        parts.append(outputs.logits)
    assert_close(torch.cat(parts, dim=1), exported.logits)


@pytest.mark.parametrize("name", MODELS)
def test_the_way_back(export: Export, name: str) -> None:
    """The weights bit for bit, and the flags of the same model."""
    exported = export(name)
    for rule in exported.rules:
        outputs = rule.to_megatron([exported.hf[weight.name] for weight in rule.hf])
        for weight, value in zip(rule.megatron, outputs, strict=True):
            assert torch.equal(value, of(exported.state, weight)), weight

    assert FAMILY.recognises(exported.config)
    args = run_distributed(arguments_of, 1, FAMILY.arguments(exported.config), timeout=120)[0]
    assert FAMILY.config(args) == exported.config
    assert args.padded_vocab_size == args.tokenizer_vocab_size


# ---------------------------------------------------------------------------------------------------------------------
# What transformers does with it

LIVELY = ["sdpa-headwise", "sdpa-constant", "some windows", "learned positions", "pattern", "delta net"]
"""One for each kind of cache and mask."""


@pytest.mark.parametrize("name", LIVELY)
@torch.no_grad()
def test_generation(export: Export, name: str) -> None:
    """With a cache it is what the whole sequence gives, and padding on the left changes nothing."""
    model = export(name).load()
    prompt = TOKENS[:, :6]
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    generated = model.generate(prompt, **settings)
    tokens = prompt
    for _ in range(8):
        tokens = torch.cat((tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generated, tokens)
    assert len(set(generated[:, 6:].flatten().tolist())) > 3
    assert torch.equal(model.generate(prompt, use_cache=False, **settings), tokens)

    assert torch.equal(model.generate(prompt, cache_implementation="static", **settings), tokens)

    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), prompt), dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    assert torch.equal(model.generate(padded, attention_mask=mask, **settings)[:, 3:], tokens)


@pytest.mark.parametrize("name", ["some windows", "delta net"])
@torch.no_grad()
def test_speculation_is_exact_or_refused(export: Export, name: str) -> None:
    """Rejected tokens leave the cache, which that of a recurrence cannot do."""
    model = export(name).load()
    prompt = TOKENS[:1, :6].repeat(1, 2)  # whose repetitions are what is speculated on
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    if name == "delta net":
        with pytest.raises(ValueError, match="requires a cache that can be cropped"):
            model.generate(prompt, prompt_lookup_num_tokens=3, **settings)
        return
    found = model.generate(prompt, prompt_lookup_num_tokens=3, **settings)
    assert torch.equal(found, model.generate(prompt, **settings))


@pytest.mark.parametrize("name", ["value-elementwise", "some windows", "delta net"])
@torch.no_grad()
def test_attention_implementations(export: Export, name: str) -> None:
    exported = export(name)
    model = exported.load(attn_implementation="eager")
    outputs = model(TOKENS, output_attentions=True, output_hidden_states=True)
    assert_close(outputs.logits, exported.logits)
    attention = [block for block in exported.config["hybrid_layer_pattern"] if block == "*"]
    assert len(outputs.attentions) == len(attention)
    for probabilities in outputs.attentions:
        assert_close(probabilities.sum(-1), torch.ones_like(probabilities[..., 0]))
    assert len(outputs.hidden_states) == model.config.num_hidden_layers + 1


@pytest.mark.parametrize("name", ["key-elementwise", "sdpa-elementwise-shared", "delta net"])
def test_training(export: Export, name: str) -> None:
    """The loss is the mean cross entropy of the next token; gradients reach every weight, checkpointed or not."""
    exported = export(name)
    gradients = []
    for checkpointed in (False, True):
        model = exported.load().train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        gradients.append({key: parameter.grad for key, parameter in model.named_parameters()})
    logits = exported.logits[:, :-1].flatten(0, 1)
    assert_close(loss.detach(), torch.nn.functional.cross_entropy(logits, TOKENS[:, 1:].flatten()))
    for key, gradient in gradients[0].items():
        assert gradient is not None and gradient.abs().max() > 0, key
        assert_close(gradients[1][key], gradient)


@torch.no_grad()
def test_the_old_name_of_the_cache(export: Export) -> None:
    """It must not be ignored, which would give other logits without an error."""
    exported = export("sdpa-headwise")
    model = exported.load()
    first = model(TOKENS[:, :9], use_cache=True)
    assert_close(model(TOKENS[:, 9:], past_key_values=first.cache).logits, exported.logits[:, 9:])


@torch.no_grad()
def test_the_decoder_alone(export: Export) -> None:
    exported = export("sdpa-headwise")
    decoder = transformers.AutoModel.from_pretrained(exported.folder, trust_remote_code=True).eval()
    hidden = decoder(TOKENS).last_hidden_state
    assert_close(hidden @ exported.hf["lm_head.weight"].T, exported.logits)


def test_saving_and_precision(export: Export, tmp_path: Path) -> None:
    """transformers saves what it has loaded, code and all; in bf16 the choice of experts stays in fp32."""
    exported = export("sigmoid router")
    exported.load().save_pretrained(tmp_path)
    again = Exported(**(vars(exported) | {"folder": tmp_path}))
    with torch.no_grad():
        assert torch.equal(again.load()(TOKENS).logits, exported.load()(TOKENS).logits)
    assert (tmp_path / MODELING_FILE.name).read_bytes() == MODELING_FILE.read_bytes()

    narrow = exported.load(dtype=torch.bfloat16)
    dtypes = {name: value.dtype for name, value in narrow.state_dict().items()}
    assert {name for name, dtype in dtypes.items() if dtype != torch.bfloat16} == {
        "model.layers.0.mlp.router.expert_bias"
    }
    with torch.no_grad():
        assert_close(narrow(TOKENS).logits.float(), exported.logits, 0.1)


def test_new_models_start_sensibly(export: Export) -> None:
    """Without weights: norms are 1, the constant gate and biases 0, all else is drawn."""
    for name in ("sdpa-constant", "delta net", "sigmoid router", "LayerNorm"):
        config = transformers.AutoConfig.from_pretrained(export(name).folder, trust_remote_code=True)
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        for key, value in model.named_parameters():
            if "norm" in key and key.endswith("weight"):
                zero_centered = config.zero_centered_norms and "linear_attn" not in key
                assert (value == (0 if zero_centered else 1)).all(), key
            elif key.endswith(("gate_constant", "bias")) and not key.endswith("dt_bias"):
                assert (value == 0).all(), key
            elif value.dim() > 1:
                assert float(value.std()) == pytest.approx(config.initializer_range, rel=0.3), key
            else:
                assert value.isfinite().all(), key


# ---------------------------------------------------------------------------------------------------------------------
# The modeling file


def test_the_file_needs_torch_and_transformers_only() -> None:
    imported = set()
    for node in ast.walk(ast.parse(MODELING_FILE.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module or "")
    packages = {name.partition(".")[0] for name in imported}
    assert packages - sys.stdlib_module_names == {"torch", "transformers"}


@functools.cache
def modeling() -> Any:
    """Return the file as a module."""
    spec = importlib.util.spec_from_file_location("modeling_megagate_under_test", MODELING_FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def all_gates() -> Iterator[GateConfig]:
    """Yield every combination of axes that there is."""
    yield from (PRESETS[name] for name in ("baseline", "sdpa-rmsnorm", "sdpa-silu"))
    axes = (GatePosition, GateGranularity, GateSharing, GateCombine, GateActivation, GateInput)
    names = ("position", "granularity", "sharing", "combine", "activation", "input")
    for values in itertools.product(*axes):
        with contextlib.suppress(UserError):
            gate = GateConfig(**dict(zip(names, values, strict=True)))
            if gate.has_gate:
                yield gate


@torch.no_grad()
def test_every_gate_is_the_reference(export: Export) -> None:
    """The attention layer in float64 against the plain-torch reference, for every gate that can be configured."""
    file = modeling()
    gates = list(all_gates())
    assert len(gates) == 3 + 4 * 2 * 2 * 2 * 4 + 2 * 2 * 2 * 4 + 2 * 4  # fused, constant, output, and no gate
    heads, groups, channels, hidden = 4, 2, 6, 10
    x = torch.randn(2, 7, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(7, dtype=torch.float64)
    for seed, gate in enumerate(gates):
        config = file.MegagateConfig(
            hybrid_layer_pattern="*",
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=channels,
            qk_norm=True,
            gate={axis: value for axis, value in json.loads(json.dumps(asdict(gate))).items() if axis in file.GATE},
            rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.7},
        )
        config._attn_implementation = "sdpa"
        attention = file.GatedAttention(config, 0).double()
        generator = torch.Generator().manual_seed(seed)
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        weights = {name.removesuffix(".weight"): value for name, value in attention.named_parameters()}
        reference = AttentionWeights(
            weights["q_proj"],
            weights.get("gate_proj") if gate.is_fused else None,
            weights["k_proj"],
            weights["v_proj"],
            weights["o_proj"],
            weights["q_norm"],
            weights["k_norm"],
            gate_constant=weights.get("gate_constant"),
            gate_output=None if gate.is_fused else weights.get("gate_proj"),
            sdpa_norm=weights.get("sdpa_norm"),
        )
        expected = reference_attention(
            x.transpose(0, 1),
            reference,
            gate,
            num_attention_heads=heads,
            num_query_groups=groups,
            rotary=rotary_tables(positions, 4, 100.0),
            norm_epsilon=config.norm_eps,
        )
        actual, _ = attention(x, file.rotary_tables(positions[None], config), None)
        # Angles are in fp32, as in the trainer.
        assert_close(actual.transpose(0, 1), expected, 1e-6)


@torch.no_grad()
def test_norms_in_bf16_are_the_trainers() -> None:
    """Bit for bit: 1 is added to a weight in fp32, since bf16 would round a small one away."""
    from megagate.model.backends.norm import build_norm

    file = modeling()
    x, weights = torch.randn(4, 64).bfloat16(), {"weight": torch.randn(64) / 20, "bias": torch.randn(64)}
    for kind, zero_centered in itertools.product(("RMSNorm", "LayerNorm"), (False, True)):
        config = argparse.Namespace(
            normalization=kind,
            layernorm_zero_centered_gamma=zero_centered,
            params_dtype=torch.bfloat16,
            use_cpu_initialization=True,
            sequence_parallel=False,
        )
        norms = build_norm(config, 64, 1e-5), file.make_norm(file.MegagateConfig(norm=kind), 64, zero_centered)
        for norm in norms:
            norm.bfloat16().load_state_dict({name: weights[name] for name in norm.state_dict()})
        trainers, ours = (norm(x) for norm in norms)
        assert torch.equal(ours, trainers), (kind, zero_centered)


@torch.no_grad()
def test_the_choice_of_experts_keeps_its_precision_under_autocast() -> None:
    file = modeling()
    router = file.Router(file.MegagateConfig(num_experts=16))
    router.weight.copy_(torch.randn(router.weight.shape))
    x = torch.randn(50, router.weight.shape[1])
    weights, chosen = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        narrow_weights, narrow_chosen = router(x)
    assert torch.equal(narrow_chosen, chosen) and torch.equal(narrow_weights, weights)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    "changed",
    [
        {"gate": {"position": "spda"}},
        {"gate": {"granularty": "headwise"}},
        {"hybrid_layer_pattern": "*-M-"},
        {"position_embedding": "alibi"},
        {"router_score_function": "tanh"},
    ],
    ids=str,
)
def test_the_file_refuses_what_it_does_not_know(changed: dict[str, Any]) -> None:
    """It would be ignored otherwise, and the logits be other ones without a word."""
    with pytest.raises(
        ValueError, match=r"(is not known to modeling_megagate\.py|letters other than .*): correct config"
    ):
        modeling().MegagateConfig(**changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"norm_eps": 2e-5},
        {"gated_mlp": "other"},
        {"gate": {}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.5, "partial_rotary_factor": 1.0}},
        {"sliding_window": 3},
    ],
    ids=str,
)
def test_a_config_that_was_changed_by_hand(export: Export, changed: dict[str, Any]) -> None:
    """The arguments that were made of it must be those of the same model."""
    exported = export("baseline")
    FAMILY.check_understood(exported.config, exported.args)
    (key,) = changed
    with pytest.raises(UserError, match=f"config.json has {key} .*, but what can be represented is "):
        FAMILY.check_understood({**exported.config, **changed}, exported.args)
    del (rest := dict(exported.config))["norm_eps"]
    with pytest.raises(UserError, match="lacks 'norm_eps'"):
        FAMILY.arguments(rest)


def test_other_models_are_not_recognised() -> None:
    for config in ({}, {"model_type": "qwen3"}, {"model_type": "qwen3", "gate": {}}):
        assert not FAMILY.recognises(config)
        with pytest.raises(UserError, match="not 'megagate'"):
            FAMILY.arguments(config)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"apply_residual_connection_post_layernorm": True}, "--apply-residual-connection-post-layernorm"),
        ({"glu_linear_offset": 1.0}, "--glu-linear-offset"),
        ({"moe_router_group_topk": 2}, "--moe-router-group-topk"),
        ({"hybrid_layer_pattern": "*-M-"}, "layers M"),
        ({"hybrid_layer_pattern": "GE|-"}, "needs an attention layer"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"]}, "quantile_balancing"),
        ({"position_embedding_type": "mrope"}, "mrope"),
        ({"gate_preset": "switch-head-v-8-top-2"}, "Switch-Head, which the model has"),
    ],
    ids=str,
)
def test_what_the_file_does_not_know_is_refused(export: Export, changed: dict[str, Any], named: str) -> None:
    args = argparse.Namespace(**(vars(export("baseline").args) | changed))
    with pytest.raises(UserError, match=named):
        FAMILY.config(args)


def test_padding_that_is_not_zero_is_refused(export: Export) -> None:
    """It would be lost; shapes alone, which the driver asks for first, are no reason."""
    exported = export("sdpa-headwise")
    (rule,) = [
        rule for rule in exported.rules if rule.megatron[0].name == "decoder.layers.0.self_attention.linear_qkv.weight"
    ]
    weight = exported.state[rule.megatron[0].name].clone()
    layout = QKVLayout(8, 2, 8, gate_config_from_args(exported.args))
    assert rule.to_hf([weight.to("meta")])[0].shape == rule.hf[0].shape
    weight[layout.padding_row_mask().nonzero()[-1], 3] = 1e-30
    with pytest.raises(UserError, match="not zero"):
        rule.to_hf([weight])
