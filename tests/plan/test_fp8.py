"""Memory of FP8 runs: bf16 weights with copies, or weights in FP8 alone, whose bytes are counted by hand here."""

from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.plan.test_command import MIXTURE, numbers_of, plans

FP8 = ["examples/moe_15a2b/recipe_fp8.yaml", *MIXTURE[1:]]
ALONE = ["--fp8-param-gather"]
ENDS = ["--fp8-recipe", "tensorwise", "--first-last-layers-bf16", "--num-layers-at-start-in-bf16", "2"]
MXFP8 = ["--fp8-recipe", "mxfp8"]
LAYERS, HIDDEN, CHANNELS, HEADS, GROUPS, EXPERTS, FFN = 24, 2048, 128, 32, 4, 128 // 8, 768
ATTENTION = HIDDEN * CHANNELS * (2 * HEADS + 2 * GROUPS) + CHANNELS * HEADS * HIDDEN
BLOCK = ATTENTION + EXPERTS * 3 * HIDDEN * FFN


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    """Return the plan of each run."""
    commands = {
        "bf16": [*MIXTURE, "--precision", "fp8"],
        "copies": FP8,
        "alone": [*FP8, *ALONE],
        "ends": [*FP8, *ENDS],
        "aware": [*FP8, "--use-precision-aware-optimizer"],
        "mxfp8": [*FP8, *MXFP8],
        "mxfp8 alone": [*FP8, *MXFP8, *ALONE, "--reuse-grad-buf-for-mxfp8-param-ag"],
    }
    results = run_distributed(plans, 1, [[*command, "--json", "-"] for command in commands.values()], timeout=200)[0]
    return {name: numbers_of(text) for name, (_, text) in zip(commands, results, strict=True)}


def memory(plan: dict[str, Any]) -> dict[str, int]:
    (rank,) = plan["memory"]["by pipeline rank"]
    return rank


def gathered(plan: dict[str, Any], kind: str) -> int:
    """Return the bytes of new weights that a rank hands over for each time that it gathers them."""
    (row,) = (row for row in plan["communication"] if row["kind"] == kind and row["operation"] == "all-gather")
    return row["bytes given"] // row["calls"]


def test_copies_come_on_top_of_bf16_weights(planned: dict[str, Any]) -> None:
    bf16, copies = memory(planned["bf16"]), memory(planned["copies"])
    assert bf16["FP8 copies"] == 0
    assert copies["FP8 copies"] == 2 * LAYERS * BLOCK
    assert copies["weights"] == bf16["weights"]
    assert copies["total"] == bf16["total"] + copies["FP8 copies"]
    assert memory(planned["aware"]) == copies, "with this recipe Megatron keeps whole copies in fp32 itself"
    assert memory(planned["ends"])["FP8 copies"] == 2 * (LAYERS - 2 - 1) * BLOCK
    assert memory(planned["mxfp8"])["FP8 copies"] == 2 * LAYERS * BLOCK * 33 // 32
    assert "weights stay in bf16, since --fp8-param-gather is not given" in planned["copies"]["memory"]["note"]
    assert "--precision fp8 is for the time alone" in planned["bf16"]["memory"]["note"]


def test_weights_in_fp8_alone(planned: dict[str, Any]) -> None:
    copies, alone, mxfp8 = (memory(planned[name]) for name in ("copies", "alone", "mxfp8 alone"))
    assert alone["FP8 copies"] == mxfp8["FP8 copies"] == 0
    assert alone["weights"] == copies["weights"], "a byte by row and one by column are the two of bf16"
    assert mxfp8["weights"] - alone["weights"] == 2 * LAYERS * BLOCK // 32
    assert "in FP8 only" in planned["alone"]["memory"]["note"]


def test_weights_are_handed_over_in_fp8(planned: dict[str, Any]) -> None:
    copies, alone, mxfp8 = (planned[name] for name in ("copies", "alone", "mxfp8 alone"))
    assert gathered(alone, "expert data") == gathered(copies, "expert data") / 2, "all of the experts'"
    saved = gathered(copies, "data") - gathered(alone, "data")
    assert saved == pytest.approx(LAYERS * ATTENTION / 64, abs=1), "of the rest, what attention multiplies"
    assert gathered(mxfp8, "data") == gathered(copies, "data"), "mxfp8 has to be made anew from bf16"
