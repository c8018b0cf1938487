"""What would fail is found before anything runs: the trainer's own checks of every cell, by its dry run."""

import contextlib
import multiprocessing
import shlex
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from megagate.ablate import cell
from megagate.ablate.grid import Grid
from megagate.ablate.settings import Work
from megagate.data.validate import check_indexed_dataset
from megagate.errors import UserError


def check_evaluation(grid: Grid) -> None:
    """Raise UserError if there is nothing to measure on."""
    paths = grid.evaluation.get("data-path")
    if not paths:
        raise UserError(f"the grid {grid.path} names no data to measure on: give --evaluate-on, or data-path in it")
    for path in paths if isinstance(paths, list) else [paths]:
        check_indexed_dataset(str(path))


@contextlib.contextmanager
def writing(output: Path) -> Iterator[None]:
    """Raise UserError in the place of an OSError inside: `output` cannot be written to."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to --output {output}: {error.strerror}; choose another") from error


def note_stale(works: Sequence[Work]) -> None:
    """Say which cells have results of other settings, which are left alone."""
    for work in works:
        others = sorted(work.folder.parent.glob(f"{work.folder.name.rpartition('-')[0]}-*"))
        stale = [other.name for other in others if other != work.folder]
        if stale:
            print(f"{work.cell.name}: {', '.join(stale)} is of other settings and not used", file=sys.stderr)


def check_all(grid: Grid, works: Sequence[Work], build: bool = False) -> None:
    """Have the trainer check the arguments of every cell, in one process of its own.

    Args:
        grid: whose cells they are.
        works: the cells; of those that differ in the seed alone, the first is looked at.
        build: build the first rank of each on the meta device too.

    Raises:
        UserError: a cell would be refused; names it.
    """
    different: dict[tuple[str, ...], Work] = {}
    for work in works:
        different.setdefault(work.cell.key, work)
    jobs = [(work.cell.name, work.recipe, work.trainer) for work in different.values()]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        refused = pool.submit(refusal, jobs, grid.world_size, build).result()
    if refused:
        raise UserError(refused)


def refusal(jobs: Sequence[tuple[str, dict[str, Any], list[str]]], world_size: int, build: bool) -> str | None:
    """Return why the first of the cells that the trainer refuses is refused, or None.

    Args:
        jobs: name, recipe and more flags of each cell.
        world_size: processes of each.
        build: build the first rank of each.
    """
    import contextlib
    import os
    import tempfile

    from megagate.data.tokenizer import quiet
    from megagate.evaluate.load import hidden_output

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(hidden_output())
        from megagate.plan import dry_run

        for name, recipe, trainer in jobs:
            path = Path(folder, "recipe.yaml")
            path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
            try:
                args, _ = dry_run.arguments_for(["--recipe", str(path), *trainer], world_size)
                if build:
                    with dry_run.build(args):
                        pass
                else:
                    dry_run.forget()
            except UserError as error:
                text = str(error).replace(f"the recipe {path}", "its recipe").replace(str(path), "its recipe")
                return f"the cell {name} would be refused: {text}"
    return None


def show(grid: Grid, works: Sequence[Work]) -> int:
    """Check every cell as the cluster would, and print the commands of each."""
    check_all(grid, works, build=True)
    launcher, evaluator = cell.local_launcher(grid.world_size), cell.local_evaluator(grid.world_size)
    for work in works:
        state = "finished" if work.result() else "to be run"
        print(f"# {work.cell.number}: {work.cell.name}: {state}")
        print(shlex.join(cell.train_command(work, launcher)))
        print(shlex.join(cell.evaluate_command(work, evaluator)))
    return 0
