"""The cells of a grid as an array of Slurm jobs, each with the nodes, the supervisor and the life of a single run."""

import argparse
from collections.abc import Sequence

from megagate.ablate import check
from megagate.ablate.grid import Grid
from megagate.ablate.settings import Work
from megagate.errors import UserError
from megagate.supervise import sbatch


def script(grid: Grid, numbers: Sequence[int], options: argparse.Namespace, trainer: Sequence[str]) -> str:
    """Return the script of the array.

    Args:
        grid: what is run.
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
    words = ["--output", str(output)]
    if options.evaluate_on:
        words += ["--evaluate-on", *options.evaluate_on]
    words += ["--", *trainer]
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
        [output, grid.path.resolve().parent],
        {"MEGAGATE_GRID": str(grid.path.resolve())},
    )


def submit(grid: Grid, works: Sequence[Work], options: argparse.Namespace, trainer: Sequence[str]) -> int:
    """Submit the cells that are not finished, or print the script.

    Raises:
        UserError: a cell would be refused, or the script is.
    """
    unfinished = [work for work in works if work.result() is None]
    if options.cell is not None:
        unfinished = [work for work in unfinished if work.cell.number == options.cell]
    if not unfinished:
        print("every cell is finished: there is nothing to submit")
        return 0
    text = script(grid, [work.cell.number for work in unfinished], options, trainer)
    if options.dry_run:
        print(text, end="")
        return 0
    check.check_evaluation(grid)
    check.check_all(grid, unfinished)
    output = options.output.absolute()
    print(f"{sbatch.submit(output / f'{grid.name}.sbatch', text, '--output')}; its logs are {output / grid.name}_*.log")
    print("when it is done: the same command with --table in place of --slurm")
    return 0
