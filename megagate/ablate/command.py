"""Train and measure a grid of settings, each cell once, and tabulate what came of it.

    python tools/ablate.py examples/ablation/small_five.yaml --jobs 2
    python tools/ablate.py examples/ablation/table_4.yaml --slurm -- --data-path data/text_document ...

The same command goes on where it was: a finished cell is never run again, a broken one goes on from its checkpoint.
Words after -- are flags of the trainer for every cell. docs/ablation.md explains grids and tables.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megagate.errors import UserError, run_command
from megagate.parser import Parser

if TYPE_CHECKING:
    from megagate.ablate.grid import Grid
    from megagate.ablate.settings import Work

EXIT_UNFINISHED = 1
EXIT_INTERRUPTED = 130


def main() -> int:
    """Do what the command line says."""
    words, trainer = sys.argv[1:], []
    if "--" in words:
        separator = words.index("--")
        words, trainer = words[:separator], words[separator + 1 :]
    options = _parser().parse_args(words)
    from megagate.ablate.grid import read_grid
    from megagate.ablate.settings import works

    for flag, value in {
        "--jobs": options.jobs,
        "--progress": options.progress,
        "--at-a-time": options.at_a_time,
    }.items():
        if value is not None and value < 1:
            raise UserError(f"{flag} must be at least 1, not {value}")
    grid = read_grid(options.grid)
    if options.evaluate_on:
        grid.evaluation["data-path"] = options.evaluate_on
    output = options.output.absolute()
    found = works(grid, output, trainer)
    if options.cell is not None and not 0 <= options.cell < len(found):
        raise UserError(f"--cell {options.cell} is none of the grid's {len(found)} cells: give 0 to {len(found) - 1}")
    if options.slurm:
        from megagate.ablate.slurm import submit

        return submit(grid, found, options, trainer)
    if options.dry_run:
        from megagate.ablate.check import show

        return show(grid, found)
    if options.table:
        return _show_table(grid, found, output)
    return _run(grid, found, output, options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ablate.py", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("grid", type=Path, help="YAML file: base recipe, axes, evaluation")
    add("--output", type=Path, default=Path("runs/ablation"), help="folder for cells and tables (runs/ablation)")
    add("--evaluate-on", nargs="+", metavar="PREFIX", help="held-out .bin/.idx files, in place of the grid's")
    add("--jobs", type=int, default=1, metavar="N", help="cells at a time on this machine (1)")
    add("--progress", type=int, default=15, metavar="SECONDS", help="between lines of progress (15)")
    add("--cell", type=int, metavar="K", help="run this cell only, from 0")
    add("--table", action="store_true", help="show the table of what is finished, and run nothing")
    add("--dry-run", action="store_true", help="check every cell as the cluster would, show its command, run nothing")
    add("--launcher", help="what starts the trainer, as one word; processes on this machine if not given")
    add("--evaluator", help="what starts the measurement, as one word; a process on this machine if not given")
    slurm = parser.add_argument_group("Slurm")
    slurm.add_argument("--slurm", action="store_true", help="submit the cells as an array of jobs; --dry-run prints it")
    slurm.add_argument("--at-a-time", type=int, metavar="N", help="tasks of the array that run at a time (all)")
    from megagate.supervise.sbatch import add_arguments

    add_arguments(slurm)
    return parser


def _run(grid: "Grid", found: "Sequence[Work]", output: Path, options: argparse.Namespace) -> int:
    from megagate.ablate import cell, check
    from megagate.ablate.runner import run_all
    from megagate.supervise.arguments import words_of

    launcher = words_of(options.launcher) if options.launcher else None
    # launch/process.sh has its variables where the trainings are started here.
    evaluator = [sys.executable] if launcher else cell.local_evaluator(grid.world_size)
    if options.evaluator:
        evaluator = words_of(options.evaluator)
    chosen = found if options.cell is None else [found[options.cell]]
    unfinished = [work for work in chosen if work.result() is None]
    for work in chosen:
        if work not in unfinished:
            print(f"{work.cell.name}: finished before", file=sys.stderr)
    check.note_stale(unfinished)
    check.check_evaluation(grid)
    with check.writing(output):
        (output / "cells").mkdir(parents=True, exist_ok=True)
    if unfinished and options.cell is None:
        check.check_all(grid, unfinished)
    outcome = run_all(grid, unfinished, options.jobs, launcher, evaluator, options.progress)
    if options.cell is None:
        _show_table(grid, found, output)
    for name, failure in outcome.failures.items():
        print(f"failed: {name}: {failure}", file=sys.stderr)
    if outcome.stopped:
        print(f"{len(outcome.stopped)} cells are not finished: the same command goes on", file=sys.stderr)
    if outcome.failures:
        return EXIT_UNFINISHED
    if outcome.stopped:
        return EXIT_INTERRUPTED if options.cell is None else cell.EXIT_AGAIN
    return 0


def _show_table(grid: "Grid", found: "Sequence[Work]", output: Path) -> int:
    """Print the table and write it beside the cells, as text, Markdown and JSON."""
    from megagate.ablate.check import writing
    from megagate.ablate.table import rows_of, table
    from megagate.report.text import aligned, markdown
    from megagate.supervise.records import write_whole

    rows = rows_of(grid, found)
    shown = table(grid, rows)
    files = {
        ".txt": aligned(shown) + "\n",
        ".md": markdown(shown),
        ".json": json.dumps({"grid": str(grid.path), "definitions": shown.caption, "rows": rows}, indent=1) + "\n",
    }
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        for suffix, text in files.items():
            write_whole(output / f"{grid.name}{suffix}", text)
    print(aligned(shown))
    return 0 if all(row["finished"] == row["cells"] for row in rows) else EXIT_UNFINISHED


if __name__ == "__main__":
    run_command(main)
