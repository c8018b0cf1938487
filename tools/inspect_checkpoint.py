"""What a checkpoint or a Hugging Face directory holds: python tools/inspect_checkpoint.py --help"""

import argparse

from megagate.checkpoint import inspect
from megagate.errors import run_command


def main() -> int:
    """Look into what the arguments name."""
    parser = argparse.ArgumentParser(prog="inspect_checkpoint.py", description=__doc__, allow_abbrev=False)
    inspect.add_arguments(parser)
    return inspect.run(parser.parse_args())


if __name__ == "__main__":
    run_command(main)
