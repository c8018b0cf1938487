"""The cells of a grid as an array of Slurm jobs, each with the nodes, the supervisor and the life of a single run.

Tasks know their cell by its number, and may wait for days. So they read a copy of the grid, made when it is submitted:

    OUTPUT/submitted/GRID-DIGEST/
        GRID.yaml         with what --evaluate-on says
        base/RECIPE.yaml
"""

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from megagate.ablate import check
from megagate.ablate.grid import Grid, read_grid
from megagate.ablate.settings import Work, works
from megagate.errors import UserError
from megagate.processes import ROOT
from megagate.supervise import sbatch
from megagate.supervise.records import write_whole
from megagate.yaml_file import read_yaml


def frozen(grid: Grid, output: Path) -> tuple[Path, dict[Path, str]]:
    """Return where the copy of a grid lies, and the content of each of its files; nothing is written."""
    recipe = Path("base", grid.recipe.name)
    content = read_yaml(grid.path, "the grid") | {"recipe": str(recipe), "evaluation": grid.evaluation}
    texts = {
        Path(grid.path.name): yaml.safe_dump(content, sort_keys=False),
        recipe: grid.recipe.read_text(encoding="utf-8"),
    }
    digest = hashlib.sha256("\0".join(texts.values()).encode()).hexdigest()[:10]
    folder = output / "submitted" / f"{grid.name}-{digest}"
    return folder / grid.path.name, {folder / path: text for path, text in texts.items()}


def freeze(copy: Path, texts: Mapping[Path, str], cells: Sequence[Work], output: Path, trainer: Sequence[str]) -> None:
    """Write the copy of a grid, and read it as a task will.

    Raises:
        UserError: it cannot be written, or has other cells: the grid was edited in the meantime.
    """
    with check.writing(output):
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
    again = works(read_grid(copy), output, trainer)
    if [work.fingerprint for work in again] != [work.fingerprint for work in cells]:
        raise UserError(f"the grid {copy.name} or its recipe changed while it was being submitted: submit it again")


def script(grid: Grid, copy: Path, numbers: Sequence[int], options: argparse.Namespace, trainer: Sequence[str]) -> str:
    """Return the script of the array.

    Args:
        grid: what is run.
        copy: of the grid, which tasks read.
        numbers: of the cells to run.
        options: of the command.
        trainer: flags of the trainer for every cell.

    Raises:
        UserError: the nodes do not have as many processes as a cell.
    """
    ranks = sbatch.ranks_per_node(options)
    if grid.world_size % ranks:
        raise UserError(
            f"a cell of {grid.path} has {grid.world_size} processes, and a node {ranks}: give another --ranks-per-node"
        )
    output = options.output.absolute()
    words = ["--output", str(output), "--", *trainer]
    at_a_time = f"%{options.at_a_time}" if options.at_a_time else ""
    return sbatch.fill(
        options,
        grid.world_size // ranks,
        words,
        {
            "--job-name": grid.name,
            "--array": ",".join(map(str, numbers)) + at_a_time,
            "--output": f"{sbatch.log_file(output / grid.name)}_%a.log",
            "--dependency": None,  # tasks have one name, and run beside each other
        },
        [output],
        {"MEGAGATE_GRID": str(copy)},
    )


def submit(grid: Grid, cells: Sequence[Work], options: argparse.Namespace, trainer: Sequence[str]) -> int:
    """Submit the cells that are not finished, or print the script.

    Raises:
        UserError: a cell would be refused, or the script is.
    """
    unfinished = [work for work in cells if work.result() is None]
    if options.cell is not None:
        unfinished = [work for work in unfinished if work.cell.number == options.cell]
    if not unfinished:
        print("every cell is finished: there is nothing to submit")
        return 0
    near = next((name for work in unfinished for name in work.files if not Path(name).is_absolute()), None)
    if near is not None and Path.cwd() != ROOT:
        raise UserError(f"tasks look for {near} in {ROOT}: submit from there, or write the path from / on")
    output = options.output.absolute()
    copy, texts = frozen(grid, output)
    text = script(grid, copy, [work.cell.number for work in unfinished], options, trainer)
    if options.dry_run:
        print(text, end="")
        return 0
    sbatch.require()
    check.check_evaluation(grid)
    check.check_all(grid, unfinished)
    freeze(copy, texts, cells, output, trainer)
    print(f"{sbatch.submit(output / f'{grid.name}.sbatch', text, '--output')}; its logs are {output / grid.name}_*.log")
    print(f"its tasks read the grid as it is now, {copy}")
    print("when it is done: the same command with --table in place of --slurm")
    return 0
