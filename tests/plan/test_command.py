"""tools/plan.py: tables and JSON that agree, a search whose layouts are what it says, and one sentence for mistakes."""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megagate.errors import UserError
from megagate.plan.command import main
from tests.distributed import run_distributed
from tests.plan.cluster import without_help

QUICKSTART = ["examples/quickstart/recipe.yaml", "--vocab-size", "4096", "--bf16"]
SEARCHED = [*QUICKSTART, "--gpus", "8", "--global-batch-size", "16"]
SMALL = [*SEARCHED, "--micro-batch-size", "1"]
SELECTIVE = ["--recompute-granularity", "selective", "--recompute-modules", "gate", "moe"]
FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
MIXTURE = ["examples/moe_15a2b/recipe.yaml", "--gpus", "64", "--gpu", "h100"]


def plan(*argv: str) -> tuple[int, str]:
    """Run the command in this process, a rank of its own, and return its status and output."""
    output, before = io.StringIO(), sys.argv
    sys.argv = ["plan.py", *argv]
    try:
        with contextlib.redirect_stdout(output), without_help():
            return main(), output.getvalue()
    finally:
        sys.argv = before


def plans(commands: list[list[str]]) -> list[tuple[int, str]]:
    return [plan(*command) for command in commands]


def numbers_of(output: str) -> Any:
    """Return the JSON in the output; what Megatron prints before it, the real command keeps back by its descriptor."""
    return json.loads(output[output.index("{\n") :])


@pytest.fixture(scope="module")
def planned() -> list[tuple[int, Any]]:
    """Return what several commands say: JSON, the same run on a smaller GPU's memory, and a search."""
    commands = [
        [*MIXTURE, "--json", "-", "--price-per-gpu-hour", "2"],
        [*MIXTURE, "--json", "-", "--network", "100"],
        [*MIXTURE, "--json", "-", "--gpu", "b200", "--tokens", "1e12"],
        [*MIXTURE, "--json", "-", "--micro-batch-size", "4"],
        [*SEARCHED, "--search", "--top", "3", "--json", "-"],
        *([*SMALL, *recompute, "--json", "-"] for recompute in ([], SELECTIVE, FULL)),
    ]
    results = run_distributed(plans, 1, commands, timeout=250)[0]
    return [(status, numbers_of(text)) for status, text in results]


def test_numbers_are_consistent(planned: list[tuple[int, Any]]) -> None:
    status, numbers = planned[0]
    assert status == 0
    model, memory, step, run = (numbers[key] for key in ("model", "memory", "step", "run"))
    assert model["parameters"] == 15_778_553_856
    assert sum(model["operations by part"].values()) == pytest.approx(1)
    assert step["seconds"] == pytest.approx(sum(step["by cause"].values()))
    (rank,) = memory["by pipeline rank"]
    kinds = ("weights", "gradients", "main weights", "Adam's moments", "activations", "temporary", "reserve")
    assert rank["total"] == sum(rank[kind] for kind in kinds)
    assert rank["activations"] == sum(rank["activations of a micro batch"].values())  # one micro batch in flight
    assert run["tokens"] == 100_000 * 1024 * 4096
    assert run["GPU-hours"] == pytest.approx(run["days"] * 24 * 64)
    assert run["GPU cost"] == pytest.approx(2 * run["GPU-hours"])
    # bf16 weights, and an fp32 copy and two moments of each
    assert run["checkpoint bytes"] == 14 * model["parameters"]
    useful = model["operations per token"] * numbers["layout"]["tokens per step"] / step["seconds"] / 64
    assert step["MFU"] == pytest.approx(useful / 989e12)


def test_machines_differ_as_they_should(planned: list[tuple[int, Any]]) -> None:
    h100, faster_network, b200 = (numbers for _, numbers in planned[:3])
    assert faster_network["step"]["seconds"] < h100["step"]["seconds"]
    assert b200["step"]["seconds"] < h100["step"]["seconds"]
    assert b200["step"]["MFU"] < h100["step"]["MFU"]
    assert b200["run"]["tokens"] == 1e12
    assert b200["memory"]["by pipeline rank"] == h100["memory"]["by pipeline rank"]


def test_what_does_not_fit_is_a_failure(planned: list[tuple[int, Any]]) -> None:
    status, numbers = planned[3]
    (rank,) = numbers["memory"]["by pipeline rank"]
    assert rank["total"] > 80 * 2**30
    assert status == 1
    assert numbers["memory"]["fits"] is False


def test_recomputation_takes_less_memory_and_more_time(planned: list[tuple[int, Any]]) -> None:
    runs = [numbers for _, numbers in planned[5:]]
    memory = [max(rank["activations"] for rank in run["memory"]["by pipeline rank"]) for run in runs]
    assert memory[0] > memory[1] > memory[2]
    for cause in ("memory traffic", "experts"):
        seconds = [run["step"]["by cause"][cause] for run in runs]
        assert seconds[0] < seconds[1] <= seconds[2], cause
    assert runs[0]["step"]["seconds"] < runs[1]["step"]["seconds"] < runs[2]["step"]["seconds"]


def test_flags_that_megatron_completes_or_the_plan_does_not_count() -> None:
    selective = SELECTIVE[:3]
    aware = ["--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
    engine = ["--transformer-impl", "transformer_engine", *selective, "layernorm", "moe_act", "--window-size", "64,0"]
    engine += ["--moe-latent-size", "32", "--moe-token-dispatcher-type", "flex", "--cuda-graph-impl", "local"]
    overlap = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--tp-comm-overlap"]
    flags = [
        *([], ["--recompute-activations"], [*selective, "core_attn"]),
        *(["--moe-layer-recompute"], [*selective, "core_attn", "moe"]),
        *(aware, [*engine, "--moe-expert-capacity-factor", "1"]),
        [*overlap, "--omit", "train-iters", "lr-warmup-iters", "--train-samples", "1000"],
    ]
    results = run_distributed(plans, 1, [[*SMALL, *more, "--json", "-"] for more in flags], timeout=100)[0]
    found = [numbers_of(text) for _, text in results]
    plain, default, core, moe_layer, moe, aware_plan, uncounted, samples = found
    assert default == core and moe_layer == moe
    memory = [run["memory"]["by pipeline rank"][0] for run in found]
    assert memory[4]["activations"] < memory[2]["activations"] < memory[0]["activations"] == memory[6]["activations"]
    # The halves of an fp32 copy that a bf16 weight lacks, and moments of two bytes.
    assert memory[5]["main weights"] == memory[0]["main weights"] / 2
    assert memory[5]["Adam's moments"] == memory[0]["Adam's moments"] / 2
    assert all(run["assumptions"]["not counted"] == [] for run in (plain, moe, aware_plan))
    skipped = ["--recompute-modules layernorm moe_act", "--moe-expert-capacity-factor", "--moe-latent-size"]
    skipped += ["--moe-token-dispatcher-type flex (as alltoall)", "--cuda-graph-impl"]
    skipped.append("--window-size (as attention to all tokens before)")
    assert uncounted["assumptions"]["not counted"] == skipped
    assert samples["assumptions"]["not counted"] == ["--tp-comm-overlap"]
    assert (plain["run"]["tokens"], samples["run"]["tokens"]) == (240 * 16 * 256, 1000 * 256)


def test_search_finds_layouts_that_are_as_it_says(planned: list[tuple[int, Any]]) -> None:
    status, numbers = planned[4]
    assert status == 0
    best = numbers["best"]
    assert len(best) == 3
    assert [layout["seconds"] for layout in best] == sorted(layout["seconds"] for layout in best)
    assert any("--global-batch-size 16 is not a multiple" in row["example"] for row in numbers["rejected"])
    commands = [[*SEARCHED, *layout["flags"].split(), "--json", "-"] for layout in best]
    for layout, (_, text) in zip(best, run_distributed(plans, 1, commands, timeout=100)[0], strict=True):
        again = numbers_of(text)
        assert again["step"]["seconds"] == pytest.approx(layout["seconds"])
        assert max(rank["total"] for rank in again["memory"]["by pipeline rank"]) == layout["memory"]


def test_search_looks_beyond_the_recipes_layout() -> None:
    """Which needs 8 GPUs, for its experts."""
    command = ["examples/moe_15a2b/recipe.yaml", "--gpus", "4", "--gpu", "b200", "--search", "--json", "-"]
    ((status, text),) = run_distributed(plans, 1, [command], timeout=100)[0]
    numbers = numbers_of(text)
    assert status == 0
    assert numbers["fitting"] and all(layout["memory"] < 178.3 * 2**30 for layout in numbers["best"])
    flags = numbers["best"][0]["flags"].split()
    ((_, text),) = run_distributed(plans, 1, [[*command[:5], *flags, "--json", "-"]], timeout=100)[0]
    again = numbers_of(text)
    assert again["step"]["seconds"] == pytest.approx(numbers["best"][0]["seconds"])
    assert again["layout"]["GPUs"] == 4


def test_tables(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    command = ["examples/moe_1t/recipe.yaml", "--gpus", "2048", "--gpu", "h200", "--json", str(target)]
    ((status, text),) = run_distributed(plans, 1, [command], timeout=100)[0]
    assert status == 0
    for assumed in ("experts used alike", "assumed for bf16: matrix share 0.68", "power overhead 1.6", "watts 700"):
        assert assumed in text
    for part in ("998,182,770,688 parameters", "pipeline rank", "all-to-all", "MFU", "GPU-hours", "assumed", "fits"):
        assert part in text
    assert json.loads(target.read_text(encoding="utf-8"))["layout"]["expert"] == 16


def test_published_figures_are_met_to_a_third(capsys: pytest.CaptureFixture[str]) -> None:
    ((status, text),) = run_distributed(plans, 1, [["--published"]], timeout=100)[0]
    assert status == 0
    rows = [line for line in text.splitlines() if "%" in line]
    assert len(rows) == 6
    with capsys.disabled():
        print("\n" + text)
    for row in rows:
        (error,) = (word for word in row.split()[:6] if word.endswith("%"))
        assert abs(int(error.rstrip("%"))) <= 33, row


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give a recipe and --gpus, for example"),
        (["--scaling"], "give a recipe and --scaling, for example"),
        (["--gpus", "x"], "argument --gpus: invalid int value: 'x'"),
        (["--published", *SMALL, "--storage", "20"], "--published has no use for a recipe, --gpus, --storage, --vocab"),
        (["--published", "--gpu", "h100"], "--published has no use for --gpu: leave it out"),
        (["--published", "--search"], "--published has no use for --search: leave it out"),
        ([*MIXTURE, "--scaling", "--tokens", "1e12"], "--scaling has no use for --gpus, --tokens: leave them out"),
        ([*SMALL, "--search", "--price-per-kwh", "0"], "--search has no use for --price-per-kwh: leave it out"),
        (
            [*SMALL, "--search", "--sequence-parallel"],
            "--search has no use for --micro-batch-size, --seq",
        ),
        ([*SMALL, "--top", "5"], "--top has no effect without --search: add it"),
        ([*SMALL, "--gpu", "h1000"], "--gpu h1000 is not known; did you mean h100.*known are a100, h100, h200, b200"),
        ([*QUICKSTART, "--gpus", "0"], "--gpus must be at least 1, not 0"),
        ([*SMALL, "--top", "-1"], "--top must be at least 1, not -1"),
        ([*SMALL, "--node", "0"], "--node must be at least 1, not 0"),
        ([*SMALL, "--network", "0"], "--network must be a number above 0, not 0"),
        ([*SMALL, "--storage", "0"], "--storage must be a number above 0, not 0"),
        ([*SMALL, "--tokens", "-5"], "--tokens must be a number above 0, not -5"),
        ([*SMALL, "--price-per-kwh", "nan"], "--price-per-kwh must be a number above 0, not nan"),
        ([*SMALL, "--gpu", "a100", "--precision", "fp8"], "a100 has no units for FP8: add --precision bf16"),
        ([*QUICKSTART, "--gpus", "3"], "3 processes cannot hold tensor parallel 2"),
        ([*QUICKSTART, "--gpus", "64"], "--global-batch-size 8 is not a multiple of --micro-batch-size 8 x data"),
        ([*SMALL, "--tokenz", "3"], "--tokenz is no flag"),
        (["nowhere.yaml", "--gpus", "8"], "cannot read the recipe nowhere.yaml"),
        ([*SMALL, "--rampup-batch-size", "8", "8", "64"], "--rampup-batch-size changes what a step is"),
        ([*SMALL, "--json", "nowhere/plan.json"], "cannot write nowhere/plan.json"),
    ],
)
def test_mistakes(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_distributed(plans, 1, [argv], timeout=100)
