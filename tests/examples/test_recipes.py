"""Each recipe is what it says: Megatron takes it for its number of GPUs, and its model has the parameters it states."""

import re
import shlex
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from megagate.gate import PRESETS
from megagate.plan.gpus import GIB
from tests.distributed import ROOT, run_distributed
from tests.gate.paper import ADDED
from tests.plan.test_command import numbers_of, plans

EXAMPLES = ROOT / "examples"
RECIPES = sorted(str(path.relative_to(ROOT)) for path in EXAMPLES.glob("*/recipe*.yaml"))
RUN = re.compile(r"#   (\d+) GPUs(?:, (--.*))?: ([\d,]+) parameters, ([\d,]+) active")
QUICKSTART = "examples/quickstart/recipe.yaml"

VOCABULARY = 151936


def stated_runs(recipe: str) -> list[tuple[int, list[str], int, int]]:
    """Return (GPUs, flags, parameters, active parameters) of each run that the head of a recipe lists."""
    head = (ROOT / recipe).read_text(encoding="utf-8").partition("\n# Runs:\n")[2].partition("\n#\n")[0]
    runs = []
    for line in head.splitlines():
        match = RUN.fullmatch(line)
        assert match is not None, line
        total, active = (int(number.replace(",", "")) for number in match.groups()[2:])
        runs.append((int(match[1]), shlex.split(match[2] or ""), total, active))
    return runs


def by_hand(recipe: str, baseline: bool) -> tuple[int, int]:
    """Return the parameters, and the active ones, of the models whose sizes the paper or the recipe prints."""
    layers, hidden, heads, groups, ffn, experts, top_k, embeddings = {
        "dense_1b7/recipe_28l.yaml": (28, 2048, 16, 8, 6144 if baseline else 5504, 0, 0, 1),
        "dense_1b7/recipe_48l.yaml": (48, 1536, 16, 8, 4608 if baseline else 3968, 0, 0, 1),
        "moe_15a2b/recipe.yaml": (24, 2048, 32, 4, 768, 128, 8, 2),
        "long_context/recipe_32k.yaml": (24, 2048, 32, 4, 768, 128, 8, 2),
        "long_context/recipe_128k.yaml": (24, 2048, 32, 4, 768, 128, 8, 2),
        "long_context/recipe_128k_yarn.yaml": (24, 2048, 32, 4, 768, 128, 8, 2),
        "moe_1t/recipe.yaml": (64, 6144, 64, 8, 2176, 384, 8, 2),
        "ablation/recipe_small.yaml": (4, 96, 8, 2, 96, 8, 2, 2),
    }[recipe.removeprefix("examples/").replace("_fp8", "")]
    channels, vocabulary = (16, 2048) if "ablation" in recipe else (128, VOCABULARY)
    width = channels * heads
    attention = hidden * (2 * width + 2 * channels * groups + (0 if baseline else width)) + 2 * channels
    norms, mlp = 2 * hidden, 3 * hidden * ffn
    outside = embeddings * vocabulary * hidden + hidden
    if not experts:
        total = layers * (attention + norms + mlp) + outside
        return total, total
    rest = layers * (attention + norms + experts * hidden) + outside
    return rest + layers * experts * mlp, rest + layers * top_k * mlp


@pytest.fixture(scope="module")
def built() -> dict[str, list[tuple[int, int]]]:
    return run_distributed(build_all, 1, timeout=280)[0]


def build_all() -> dict[str, list[tuple[int, int]]]:
    """Return for each run of each recipe what the plan counts: parameters, and active ones.

    The last rank of each run is built, and the first of the first run of each recipe; they hold the tensors that the
    plan says, and fit an H100.
    """
    from megagate.plan.gpus import gpu
    from megagate.plan.memory import rank_chunks, rank_memory
    from megagate.plan.parameters import count
    from tests.plan.cluster import rank_of

    counts: dict[str, list[tuple[int, int]]] = {}
    for recipe in RECIPES:
        # Without Transformer Engine FP8 models are built in bf16, whose parameters are the same.
        omit = ["--omit", *fp8_keys(recipe)] if fp8_keys(recipe) else []
        runs = [(gpus, [*flags, *omit]) for gpus, flags, *_ in stated_runs(recipe)]
        for index, (gpus, flags) in enumerate(runs or [(2, ["--vocab-size", "1000"])]):
            for rank in (gpus - 1,) if index else (0, gpus - 1):
                with rank_of(["--recipe", recipe, *flags], gpus, rank) as (real, layout):
                    chunks = rank_chunks(real.args, layout, layout.pipeline_rank(rank))
                    planned = [tensor for chunk in chunks for tensor in chunk]
                    held = real.parameters()
                    assert [tensor.shape for tensor in planned] == [tuple(value.shape) for value in held.values()]
                    for tensor, (name, value) in zip(planned, held.items(), strict=True):
                        assert name.endswith(tensor.name)
                        assert tensor.is_expert is not getattr(value, "allreduce", True), name
                        assert tensor.is_shared is getattr(value, "shared_embedding", False), name
                    needed = rank_memory(real.args, layout, layout.pipeline_rank(rank)).total
                    assert needed < gpu("h100").memory, (recipe, flags, needed)
            counts.setdefault(recipe, []).append(count(real.args))
    return counts


def fp8_keys(recipe: str) -> dict[str, Any]:
    """Return what a recipe says of FP8, without dashes in names."""
    content = yaml.safe_load((ROOT / recipe).read_text(encoding="utf-8"))
    return {key.replace("-", "_"): value for key, value in content.items() if "fp8" in key or "quantization" in key}


def test_megatron_takes_the_fp8_recipes() -> None:
    found = run_distributed(fp8_settings, 1, timeout=100)[0]
    assert found == {recipe: ("e4m3", "blockwise", True) for recipe in RECIPES if "fp8" in recipe}
    assert len(found) == 2


def fp8_settings() -> dict[str, tuple[str, str, bool]]:
    """Return what of FP8 is in Megatron's own configuration of each recipe's layers, which checks it."""
    from megatron.core.transformer import transformer_config
    from megatron.training.arguments import core_transformer_config_from_args

    from megagate.plan.dry_run import arguments_for, forget
    from tests.plan.cluster import without_help

    torch.distributed.destroy_process_group()  # the test's own, of one rank
    found = {}
    for recipe in RECIPES:
        keys = fp8_keys(recipe)
        if keys:
            gpus = stated_runs(recipe)[0][0]
            with without_help():
                args, _ = arguments_for(["--recipe", recipe, "--omit", *keys], gpus)
            names = {"fp8_format": "fp8"}  # Megatron's
            vars(args).update({names.get(key, key): value for key, value in keys.items()})
            args.transformer_impl = "transformer_engine"
            # As if Transformer Engine were installed.
            with mock.patch.object(transformer_config, "is_te_min_version", lambda *version, **how: True):
                config = core_transformer_config_from_args(args)
            found[recipe] = config.fp8, config.fp8_recipe, config.moe_router_padding_for_quantization
            forget()
    return found


def test_there_are_recipes_for_all_that_the_documentation_names() -> None:
    assert len(RECIPES) == 12  # the quickstart's among them


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != QUICKSTART])
def test_parameters_are_as_stated(recipe: str, built: dict[str, list[tuple[int, int]]]) -> None:
    runs = stated_runs(recipe)
    assert runs
    stated = [(total, active) for _, _, total, active in runs]
    assert built[recipe] == stated


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if "qwen3" not in recipe and recipe != QUICKSTART])
def test_stated_parameters_are_right(recipe: str) -> None:
    for _, flags, *stated in stated_runs(recipe):
        if "sdpa-headwise" not in flags:  # whose padding is below
            assert tuple(stated) == by_hand(recipe, "baseline" in flags)


def test_qwen3_next_is_the_published_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig()  # its defaults are those of Qwen3-Next-80B-A3B
    with torch.device("meta"):
        model = transformers.Qwen3NextForCausalLM(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    expert = 3 * config.hidden_size * config.moe_intermediate_size * config.num_hidden_layers
    active = total - (config.num_experts - config.num_experts_per_tok) * expert
    for _, _, *stated in stated_runs("examples/qwen3_next_80b_a3b/recipe.yaml"):
        assert stated == [total, active]


def test_quickstart_builds(built: dict[str, list[tuple[int, int]]]) -> None:
    assert built[QUICKSTART]


def test_every_preset_adds_the_papers_parameters() -> None:
    added = run_distributed(added_by_presets, 1, timeout=280)[0]
    assert added == ADDED
    assert list(ADDED) == list(PRESETS)


def added_by_presets() -> dict[str, int]:
    """Return how many parameters the 15A2B model of each preset has more than the baseline, without padding."""
    from megagate.model.attention import GatedSelfAttention
    from tests.plan.cluster import rank_of

    totals = {}
    few_experts = ["--recipe", "examples/moe_15a2b/recipe.yaml", "--expert-model-parallel-size", "64"]
    for preset in PRESETS:
        with rank_of([*few_experts, "--gate-preset", preset], 64, 0) as (rank, _):
            total = sum(parameter.numel() for parameter in rank.parameters().values())
            for module in rank.chunks[0].modules():
                if isinstance(module, GatedSelfAttention):
                    with torch.device("cpu"):
                        total -= int(module.layout.padding_row_mask().sum()) * rank.args.hidden_size
            totals[preset] = total
    return {preset: total - totals["baseline"] for preset, total in totals.items()}


def test_numbers_in_comments_are_the_plans() -> None:
    """Why the experts of a trillion parameters lie on two machines: what they would cost on eight, two and one."""
    recipes = ["examples/moe_1t/recipe.yaml", "examples/moe_1t/recipe_fp8.yaml"]
    commands = [
        [recipe, "--gpus", "2048", "--expert-model-parallel-size", str(size), "--json", "-"]
        for recipe in recipes
        for size in (64, 16, 8)
    ]
    found = [numbers_of(text) for _, text in run_distributed(plans, 1, commands, timeout=200)[0]]
    for recipe, eight, two, one in zip(recipes, found[::3], found[1::3], found[2::3], strict=True):
        shares = [run["step"]["by cause"]["expert communication"] / run["step"]["seconds"] for run in (eight, two)]
        assert two["memory"]["fits"]
        memory = one["memory"]
        needed = max(rank["total"] for rank in memory["by pipeline rank"])
        text = " ".join((ROOT / recipe).read_text(encoding="utf-8").replace("#", "").split())
        assert f"all-to-all would take {shares[0]:.0%}".replace("%", " %") in text
        assert f"over two it takes {shares[1]:.0%}".replace("%", " %") in text
        assert f"would need {needed / GIB:.1f} of {memory['available'] / GIB:.1f} GiB" in text


def test_recipes_say_why_in_lines_that_fit() -> None:
    for recipe in RECIPES:
        for line in (ROOT / recipe).read_text(encoding="ascii").splitlines():
            assert len(line) <= 120, (recipe, line)
