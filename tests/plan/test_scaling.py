"""tools/plan.py --scaling: each row is what the plan says of that many GPUs, and changes with them as it must."""

from pathlib import Path
from typing import Any

import pytest

from megagate.errors import UserError
from megagate.plan.scaling import SIZES
from tests.distributed import run_distributed
from tests.plan.test_command import numbers_of, plans

MIXTURE, TRILLION = "examples/moe_15a2b/recipe.yaml", "examples/moe_1t/recipe.yaml"
SINGLE = {
    (MIXTURE, 64): "",
    (MIXTURE, 4096): "--global-batch-size 4096",
    (TRILLION, 128): "--pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 8",
    (TRILLION, 2048): "",
}
"""Recipe and GPUs -> what the scaling study has to change about the recipe there."""


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[tuple[str, int], Any], Path]:
    """Return the rows of both recipes by GPUs, plans of single numbers of GPUs, and where a figure was drawn."""
    figure = tmp_path_factory.mktemp("figures") / "scaling.png"
    commands = [[recipe, "--scaling", "--json", "-"] for recipe in (MIXTURE, TRILLION)]
    commands[1] += ["--figure", str(figure)]
    commands += [
        [recipe, "--gpus", str(gpus), *flags.split(), "--json", "-"] for (recipe, gpus), flags in SINGLE.items()
    ]
    texts = [text for _, text in run_distributed(plans, 1, commands, timeout=280)[0]]
    found = [numbers_of(text) for text in texts]
    rows = {
        recipe: {row["GPUs"]: row for row in numbers["rows"]}
        for recipe, numbers in zip((MIXTURE, TRILLION), found, strict=False)
    }
    return rows, dict(zip(SINGLE, found[2:], strict=True)), figure


@pytest.mark.parametrize("run", list(SINGLE))
def test_a_row_is_the_plan_of_so_many_gpus(run: tuple[str, int], studied: tuple[Any, ...]) -> None:
    rows, single, _ = studied
    recipe, gpus = run
    row, planned = rows[recipe][gpus], single[run]
    rank = planned["memory"]["by pipeline rank"][planned["memory"]["fullest pipeline rank"]]
    assert row["memory"]["total"] == rank["total"]
    assert row["memory"]["optimizer"] == rank["main weights"] + rank["Adam's moments"]
    assert row["memory"]["weights"] == rank["weights"]
    assert row["fits"] is planned["memory"]["fits"]
    assert row["layout"]["pipeline"] == planned["layout"]["pipeline"]
    assert row["layout"]["virtual"] == planned["layout"]["virtual stages"]
    assert row["tokens"] == planned["layout"]["tokens per step"]
    sent: dict[str, float] = {}
    for entry in planned["communication"]:
        sent[entry["kind"]] = sent.get(entry["kind"], 0.0) + entry["bytes sent"]
    assert row["bytes sent"] == pytest.approx(sent)
    assert row["seconds"] == pytest.approx(planned["step"]["seconds"])
    assert row["MFU"] == pytest.approx(planned["step"]["MFU"])


def test_what_grows_and_what_does_not(studied: tuple[Any, ...]) -> None:
    rows, _, figure = studied
    for recipe, found in rows.items():
        assert list(found) == list(SIZES), recipe
        for few, many in ((2048, 4096), (8192, 16384)):
            weights = [found[gpus]["memory"]["weights"] for gpus in (few, many)]
            assert weights[0] == pytest.approx(weights[1], rel=1e-4)  # buckets are padded to divide over the ranks
            assert found[many]["memory"]["optimizer"] < 0.51 * found[few]["memory"]["optimizer"]
            assert found[many]["bytes sent"]["expert data"] > found[few]["bytes sent"]["expert data"]
    trillion, mixture = rows[TRILLION], rows[MIXTURE]
    assert [gpus for gpus, row in trillion.items() if row["fits"]] == [size for size in SIZES if size >= 512]
    assert trillion[16384]["tokens"] == trillion[8]["tokens"]
    # The batch grows as soon as each data-parallel rank has one micro batch, and with it nothing of a rank's own.
    assert mixture[1024]["tokens"] * 16 == mixture[16384]["tokens"]
    assert mixture[1024]["operations"] == mixture[16384]["operations"]
    assert mixture[64]["operations"] == 16 * mixture[1024]["operations"]
    # The 8 GPUs of a node hold all experts, and only data-parallel bytes leave it: those of dense weights,
    # which all 8 hold, once for all of them.
    assert mixture[8]["bytes sent to other nodes"] == 0
    for gpus, row in mixture.items():
        data, experts = (row["bytes sent"].get(kind, 0) for kind in ("data", "expert data"))
        assert row["bytes sent to other nodes"] == (pytest.approx(data / 8 + experts) if gpus > 8 else 0)
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([MIXTURE, "--gpus", "8", "--figure", "x.png"], "--figure has no effect without --scaling: add it"),
        ([MIXTURE, "--scaling", "--figure", "nowhere/x.png"], "cannot write nowhere/x.png"),
        (["examples/dense_1b7/recipe_28l.yaml", "--scaling", "--tensor-model-parallel-size", "3"], "does not divide"),
    ],
)
def test_mistakes(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_distributed(plans, 1, [argv], timeout=200)
