"""Hugging Face models to Megatron's checkpoints and back: python tools/convert_checkpoint.py {import,export} --help"""

import argparse

from megagate.checkpoint import convert
from megagate.errors import run_command


def main() -> int:
    """Convert as the arguments say."""
    parser = argparse.ArgumentParser(prog="convert_checkpoint.py", description=__doc__, allow_abbrev=False)
    convert.add_arguments(parser)
    return convert.run(parser.parse_args())


if __name__ == "__main__":
    run_command(main)
