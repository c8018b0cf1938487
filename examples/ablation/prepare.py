"""Make the data that the small grids train and measure on, from the source files of Python's standard library.

    python examples/ablation/prepare.py

Corpus and held-out files are those of examples/quickstart; the tokenizer has half as many tokens, which leaves more of
a CPU's time to the layers that the grids compare.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))

import run as quickstart
from steps import ROOT, Steps

from megagate.errors import UserError, run_command

VOCABULARY_SIZE = 2048


def main() -> int:
    """Make what is not there yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    default = ROOT / "runs" / "ablation"
    parser.add_argument("--output", type=Path, default=default, help="folder for data and tokenizer (runs/ablation)")
    options = parser.parse_args()
    try:
        steps = Steps(options.output.absolute(), total=4)
    except OSError as error:
        raise UserError(f"--output {options.output} cannot be used: {error.strerror}") from error
    quickstart.prepare_data(steps, short=False, vocabulary_size=VOCABULARY_SIZE)
    return 0


if __name__ == "__main__":
    run_command(main)
