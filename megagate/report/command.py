"""Compare training runs on one page.

    python tools/report.py runs/baseline runs/gated --output runs/report
    python tools/report.py baseline=runs/a/tensorboard gated=runs/b/tensorboard

A run is the directory that training was given as --save or --tensorboard-dir, or one with a single such directory under
it.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megagate.errors import UserError
from megagate.report import page, sections, spikes, style, tables
from megagate.report.runs import read_runs

PAGE = "report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tools/report.py."""
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="report.py",
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="DIR, or NAME=DIR to call it NAME")
    parser.add_argument("--output", type=Path, default=Path("runs/report"), metavar="DIR", help="(runs/report)")
    parser.add_argument(
        "--spike-deviations",
        type=float,
        default=spikes.DEVIATIONS,
        metavar="K",
        help="a loss this many robust standard deviations above the running median is a spike (%(default)g)",
    )
    options = parser.parse_args(arguments)
    if not options.spike_deviations > 0:
        raise UserError(f"--spike-deviations {options.spike_deviations} must be positive: give more than 0")
    if options.output.exists() and not options.output.is_dir():
        raise UserError(f"--output {options.output} is not a directory: name one")
    runs = read_runs(options.runs)
    for run in runs:
        for note in run.notes:
            print(f"warning: {run.name}: {note}", file=sys.stderr, flush=True)
    parts = sections.build(runs, options.spike_deviations)
    summary = tables.summary(runs, options.spike_deviations)
    files = {PAGE: page.page(runs, summary, tables.differences(runs), parts).encode("utf-8")}
    for drawn in (drawn for part in parts for drawn in part.drawn):
        files[f"{drawn.name}.png"] = style.to_png(drawn.figure)
    _write(options.output, files)
    print(f"{options.output / PAGE}: {len(runs)} runs, {len(files) - 1} figures, each also as PNG beside it")
    return 0


def _write(directory: Path, files: dict[str, bytes]) -> None:
    """Write files, under their names once all are whole; the figures of an earlier report go."""
    whole = {name: directory / f"{name}.partial-{os.getpid()}" for name in files}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            for name, temporary in whole.items():
                temporary.write_bytes(files[name])
            for name, temporary in whole.items():
                temporary.replace(directory / name)
        finally:
            for temporary in whole.values():
                temporary.unlink(missing_ok=True)
        for name in sections.FIGURES:
            if f"{name}.png" not in files:
                (directory / f"{name}.png").unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to --output {directory}: {error.strerror}; choose another") from error
