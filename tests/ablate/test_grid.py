"""Grids: what is read from them, what is refused, and that the shipped ones are taken by the trainer."""

import re
from pathlib import Path

import pytest
import yaml

from megagate.ablate import settings
from megagate.ablate.grid import read_grid
from megagate.ablate.settings import merged, works
from megagate.errors import UserError
from megagate.gate.config import ALL_PRESETS
from tests.distributed import ROOT, run_distributed

FOLDER = ROOT / "examples" / "ablation"
GRIDS = sorted(path for path in FOLDER.glob("*.yaml") if not path.name.startswith("recipe"))
RECIPE = {"num-layers": 2, "gate-preset": "sdpa-elementwise", "lr": 1e-3, "moe-z-loss-coeff": 0.1}


def write(folder: Path, **content: object) -> Path:
    """Write a grid and its recipe; of what is not given there is something that can be."""
    (folder / "base.yaml").write_text(yaml.safe_dump(RECIPE))
    grid = {"recipe": "base.yaml", "axes": {"seed": [1, 2]}} | {key.replace("_", "-"): v for key, v in content.items()}
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in grid.items() if value is not None}, sort_keys=False))
    return path


def test_cells_are_all_combinations(tmp_path: Path) -> None:
    axes = {
        "model": {"plain": {"gate-preset": "baseline", "moe-z-loss-coeff": None}, "gated": None},
        "lr": [0.1, 0.2],
        "seed": [1, 2],
    }
    grid = read_grid(write(tmp_path, axes=axes, flags={"train-iters": 7}, world_size=4))
    assert grid.world_size == 4
    assert [cell.name for cell in grid.cells][:3] == [
        "plain, lr 0.1, seed 1",
        "plain, lr 0.1, seed 2",
        "plain, lr 0.2, seed 1",
    ]
    assert len(grid.cells) == 8 and len({cell.key for cell in grid.cells}) == 4
    recipes = [work.recipe for work in works(grid, tmp_path, [])]
    assert recipes[0] == {"num-layers": 2, "gate-preset": "baseline", "train-iters": 7, "lr": 0.1, "seed": 1}
    assert recipes[7] == RECIPE | {"train-iters": 7, "lr": 0.2, "seed": 2}


def test_a_gate_flag_replaces_all_of_the_recipes() -> None:
    recipe = {"gate-position": "value", "gate-activation": "silu", "gate-lr-mult": 2, "lr": 1}
    assert merged(recipe, {"gate-preset": "baseline"}) == {"gate-preset": "baseline", "gate-lr-mult": 2, "lr": 1}
    assert merged(recipe, {"lr": 3}) == recipe | {"lr": 3}


def test_a_cell_is_another_one_when_anything_changes(tmp_path: Path) -> None:
    data = tmp_path / "data"

    def fingerprints(trainer: list[str], **content: object) -> list[str]:
        return [work.fingerprint for work in works(read_grid(write(tmp_path, **content)), tmp_path, trainer)]

    for suffix in (".bin", ".idx"):
        data.with_suffix(suffix).write_bytes(b"1" * 100)
    base = fingerprints([])
    assert len(set(base)) == 2
    assert fingerprints([]) == base
    # the same settings, however they are arranged: grids share cells
    assert fingerprints([], axes={"gate-preset": ["sdpa-elementwise"], "seed": [2, 1]}) == base[::-1]
    assert fingerprints([], axes={"named": {"one": {"seed": 1}, "two": {"seed": 2}}}) == base
    changed = [
        fingerprints(["--lr", "1"]),
        fingerprints([], flags={"lr": 1}),
        fingerprints([], world_size=2),
        fingerprints([], evaluation={"data-path": str(data)}),
        fingerprints(["--data-path", str(data)]),
    ]
    assert len({fingerprint for found in [base, *changed] for fingerprint in found}) == 12
    data.with_suffix(".bin").write_bytes(b"2" * 100)
    settings._digest.cache_clear()
    assert not set(fingerprints(["--data-path", str(data)])) & set(changed[-1])


def test_a_tokenizer_may_be_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "unrelated.txt").write_text("a")
    assert settings._digest(str(folder)) is None
    digests = []
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "latest_checkpointed_iteration.txt"):
        for text in ("a", "b"):
            (folder / name).write_text(text)
            settings._digest.cache_clear()
            digests.append(settings._digest(str(folder)))
    assert None not in digests and len(set(digests)) == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"axis": {}}, r"'axis' in the grid .* is not known; did you mean axes\?"),
        ({"axes": None}, r"the grid .* has no axes"),
        ({"recipe": "nowhere.yaml"}, r"cannot read the recipe .*nowhere.yaml"),
        ({"axes": {"lr": []}}, r"the axis lr in the grid .* needs a list of values"),
        ({"axes": {"lr": [1, 1]}}, r"the axis lr in the grid .* has a value twice"),
        ({"axes": {"lr": [1], "run": {"a": {"lr": 2}}}}, r"the axes lr and run in the grid .* both set lr"),
        ({"axes": {"run": {"a": [1]}}}, r"a on the axis run in the grid .* must be a mapping"),
        ({"flags": {"train-iters": 1, "train_iters": 2}}, r"flags in the grid .* has train-iters twice: write it once"),
        ({"flags": {"save": "x"}}, r"flags in the grid .* sets save, which each cell has of its own"),
        ({"evaluation": {"data": "x"}}, r"'data' under evaluation in the grid .* did you mean data-path\?"),
        ({"evaluation": {3: "x"}}, r"3 under evaluation in the grid .* is not known"),
        ({"world_size": 0}, r"world-size in the grid .* must be a positive number, not 0"),
        ({"world_size": 1.5}, r"world-size in the grid .* must be a positive number, not 1.5"),
    ],
)
def test_what_cannot_be_is_refused(content: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_grid(write(tmp_path, **content))


def test_a_cell_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    axes = {"model": {"a": {"lr": 1}, "b": {"lr": 1}, "c": {"lr": 2}}}
    with pytest.raises(UserError, match=r"the cells a and b of the grid .* have the same settings: leave one out"):
        works(read_grid(write(tmp_path, axes=axes)), tmp_path, [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr=3"], r"--lr after -- would overrule the axis lr of the grid .*grid.yaml, and make its cells alike"),
        (["--gate-activation", "silu"], r"--gate-activation after -- would overrule the axis gate-preset"),
        (["--train-iters", "3", "--save", "x"], r"--save after -- is what each cell has of its own: leave it out"),
        (["--no-rope-fusion"], r"--no-rope-fusion after -- would overrule the axis fusion"),
        (["--disable-rope-fusion"], r"--disable-rope-fusion after -- would overrule the axis fusion"),
        (["--swiglu"], r"--swiglu after -- would overrule the axis swiglu"),
        (["--omit", "lr"], r"--omit after -- is what each cell has of its own"),
    ],
)
def test_words_that_would_make_cells_alike_are_refused(words: list[str], message: str, tmp_path: Path) -> None:
    fusion = {"fused": {}, "not": {"no-rope-fusion": True}}
    axes = {"lr": [1, 2], "gate-preset": ["baseline", "sdpa-headwise"], "fusion": fusion, "swiglu": [True, False]}
    grid = read_grid(write(tmp_path, axes=axes))
    assert len(works(grid, tmp_path, ["--train-iters", "3", "--gate-lr-mult", "2"])) == 16
    with pytest.raises(UserError, match=message):
        works(grid, tmp_path, words)


def test_the_trainer_takes_every_cell_of_the_shipped_grids() -> None:
    refused = run_distributed(refusals, 1, [str(path) for path in GRIDS], timeout=200)[0]
    assert refused == dict.fromkeys(map(str, GRIDS))


def refusals(paths: list[str]) -> dict[str, str | None]:
    """Return why the first cell of each grid is refused that is, and build those that no other test builds."""
    import torch

    from megagate.ablate.check import refusal
    from tests.plan.cluster import without_help

    torch.distributed.destroy_process_group()  # the test's own, of one rank
    found = {}
    for path in paths:
        grid = read_grid(Path(path))
        different = {work.cell.key: work for work in works(grid, Path("nowhere"), [])}
        # Their data and tokenizer are not here.
        own = ("data-path", "tokenizer-type", "tokenizer-model")
        jobs = {
            key: (
                work.cell.name,
                {"vocab-size": 2048} | {name: value for name, value in work.recipe.items() if name not in own},
                work.trainer,
            )
            for key, work in different.items()
        }
        with without_help():
            found[path] = refusal(list(jobs.values()), grid.world_size, build=False)
            larger = [job for key, job in jobs.items() if any(" heads" in label or "experts" in label for label in key)]
            found[path] = found[path] or refusal(larger, grid.world_size, build=True)
    return found


def test_there_are_the_papers_tables() -> None:
    assert {path.stem for path in GRIDS} >= {f"table_{n}{size}" for n in (1, 2, 3, 4, 6) for size in ("", "_small")}
    for name, rows in (("table_1", 15), ("table_2", 12), ("table_3", 7), ("table_4", 7), ("table_6", 6)):
        full, small = (read_grid(FOLDER / f"{name}{size}.yaml") for size in ("", "_small"))
        assert len({cell.key for cell in full.cells}) == rows
        presets = [{cell.flags["gate-preset"] for cell in grid.cells} for grid in (full, small)]
        assert presets[0] >= presets[1] and presets[0] <= set(ALL_PRESETS)
    everything = {cell.flags["gate-preset"] for path in GRIDS for cell in read_grid(path).cells}
    assert everything == set(ALL_PRESETS)


def test_a_mistake_in_a_cell_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        recipe=str(FOLDER / "recipe_small.yaml"),
        axes={"gate-preset": ["baseline", "sdpa-elementwize"]},
    )
    refused = run_distributed(refusals, 1, [str(path)], timeout=100)[0][str(path)]
    assert refused is not None
    assert re.match(r"the cell sdpa-elementwize would be refused: .*sdpa-elementwise", refused), refused
    path = write(tmp_path, recipe=str(FOLDER / "recipe_small.yaml"), axes={"gate-prest": ["baseline"]})
    refused = run_distributed(refusals, 1, [str(path)], timeout=100)[0][str(path)]
    assert refused is not None
    assert refused.startswith("the cell baseline would be refused: 'gate-prest' in its recipe is no flag; did"), refused
