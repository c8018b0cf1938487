"""What Transformer Engine and FP8 do not go with is refused in one sentence, on a machine that has neither."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from megagate.errors import UserError
from megagate.gate.config import ALL_PRESETS, gate_config_from_args
from megagate.plan.dry_run import arguments_for, build, forget
from megagate.pretrain.arguments import build_parser
from megagate.pretrain.backend import WITHOUT_FP8, choose_backend
from megagate.pretrain.refusals import RECIPES, REFUSALS, alignment, check_backend, misaligned

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 32 --group-query-attention --num-query-groups 4 "
    "--kv-channels 32 --ffn-hidden-size 512 --swiglu --disable-bias-linear --normalization RMSNorm --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 511 --num-experts 8 --moe-ffn-hidden-size 256 --moe-router-topk 2 "
    "--use-distributed-optimizer --position-embedding-type rope "
)
GATED = "--transformer-impl transformer_engine --gate-preset sdpa-elementwise "


@pytest.fixture(scope="module")
def parse() -> Callable[[str], argparse.Namespace]:
    """What reads a command line for a cluster; a parser takes a second to build."""
    parser, _ = build_parser()

    def parse_command_line(flags: str) -> argparse.Namespace:
        args = parser.parse_args((MODEL + flags).split())
        args.rank, args.hybrid_layer_pattern = 0, args.hybrid_layer_pattern or "*-*E"
        choose_backend(args, elsewhere=True)
        return args

    return parse_command_line


def check(args: argparse.Namespace) -> None:
    check_backend(args, gate_config_from_args(args))


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.combination)
def test_refused(refusal, parse: Callable[[str], argparse.Namespace]) -> None:
    with pytest.raises(UserError) as error:
        check(parse(GATED + refusal.example))
    assert str(error.value) == refusal.sentence
    assert "\n" not in refusal.sentence


def test_the_table_of_the_docs_is_this_list() -> None:
    page = (ROOT / "docs" / "transformer_engine.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    expected = [f"| {row.combination.rstrip(',')} | {row.why} | {row.instead} |" for row in REFUSALS]
    assert [row for row in rows if row in expected] == expected
    start = rows.index(expected[0])
    assert rows[start : start + len(expected)] == expected


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("preset", ALL_PRESETS)
def test_presets_and_recipes_that_go_together(
    recipe: str, preset: str, parse: Callable[[str], argparse.Namespace]
) -> None:
    flags = f"{GATED} --gate-preset {preset} --fp8-format e4m3 --fp8-recipe {recipe} --gate-row-alignment 32 "
    check(parse(flags))
    check(parse(f"{flags} --sequence-parallel --tensor-model-parallel-size 2"))
    if recipe != "blockwise":
        check(parse(f"{flags} --fp8-dot-product-attention"))
    if ALL_PRESETS[preset].is_fused:
        check(parse(f"{flags} --gate-precision fp8"))
        check(parse(f"{flags} --gate-precision fp32"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # r = 8 heads, padded to 16: a group's block is 8*32 + 16 + 2*32 = 336 = 21*16 rows.
        (
            "--gate-preset sdpa-headwise --tensor-model-parallel-size 8",
            r"linear_qkv is 168 x 256 on each rank, .* delayed needs multiples of 16: --gate-row-alignment 32 fits",
        ),
        (
            "--gate-preset sdpa-headwise --tensor-model-parallel-size 4 --fp8-recipe mxfp8",
            r"linear_qkv is 336 x 256 on each rank, .* mxfp8 needs multiples of 32: --gate-row-alignment 32 fits",
        ),
        ("--hidden-size 264", r"linear_proj is 264 x 1024 on each rank.*another parallel size or width"),
        ("--moe-ffn-hidden-size 24", r"local_experts.0.linear_fc2 is 256 x 24 on each rank.*another parallel size"),
        ("--ffn-hidden-size 520", r"mlp.linear_fc2 is 256 x 520 on each rank"),
        ("--seq-length 40", r"a rank has 40 tokens of a micro batch, and .* delayed needs a multiple of 16"),
        (
            "--sequence-parallel --tensor-model-parallel-size 4 --fp8-recipe mxfp8",
            r"a rank has 16 tokens of a micro batch, and --fp8-recipe mxfp8 needs a multiple of 32",
        ),
    ],
)
def test_sizes_that_no_kernel_takes(flags: str, message: str, parse: Callable[[str], argparse.Namespace]) -> None:
    with pytest.raises(UserError, match=message):
        check(parse(f"{GATED} --fp8-format hybrid {flags}"))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_the_row_alignment_that_a_refusal_names_fits(
    recipe: str, tensor: int, parse: Callable[[str], argparse.Namespace]
) -> None:
    flags = f"{GATED} --gate-preset sdpa-headwise --fp8-format e4m3 --fp8-recipe {recipe} --gate-row-alignment 8 "
    args = parse(f"{flags} --tensor-model-parallel-size {tensor}")
    problems = [problem for problem in misaligned(args) if problem.startswith("linear_qkv")]
    if problems:
        args.gate_row_alignment = int(problems[0].partition("--gate-row-alignment ")[2].split()[0])
        assert args.gate_row_alignment % alignment(recipe) == 0
    assert not list(misaligned(args))


def test_a_dry_run_checks_and_builds_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # so that they are put back
    flags = (MODEL + GATED).split()
    with pytest.raises(UserError, match="with a gate, norm or activation on the attention output cannot be right"):
        arguments_for([*flags, "--fp8-format", "hybrid", "--fp8-multi-head-attention"], 8)
    recompute = "--recompute-granularity selective --recompute-modules layernorm".split()
    args, notes = arguments_for([*flags, "--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8", *recompute], 8)
    forget()
    assert args.transformer_impl == "local"
    assert all(getattr(args, name) == value for name, value in WITHOUT_FP8.items())
    assert any("the flags for Transformer Engine are checked" in note for note in notes)


def test_a_gpt_model_is_checked_and_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # so that they are put back
    flags = [*(MODEL + GATED).split(), "--bf16", "--model-impl", "gpt", "--fp8-format", "e4m3"]
    with pytest.raises(UserError, match=r"linear_fc2 is 256 x 24 on each rank"):
        arguments_for([*flags, "--moe-ffn-hidden-size", "24"], 8)
    # Nor does a rank that is built here need DeepEP, or a network that reduces.
    flags += "--expert-model-parallel-size 2 --moe-token-dispatcher-type flex --moe-enable-deepep --use-sharp".split()
    args, _ = arguments_for(flags, 8)
    assert args.moe_token_dispatcher_type == "flex"
    with build(args) as rank:
        assert "0.module.decoder.layers.1.self_attention.linear_qkv.weight" in rank.parameters()
