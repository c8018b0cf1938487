"""Continue texts with a checkpoint: python tools/generate.py --help"""

import argparse

from megagate.errors import run_command
from megagate.evaluate import generate


def main() -> int:
    """Generate as the arguments say."""
    parser = argparse.ArgumentParser(prog="generate.py", description=__doc__, allow_abbrev=False)
    generate.add_arguments(parser)
    return generate.run(parser.parse_args())


if __name__ == "__main__":
    run_command(main, once=True)
