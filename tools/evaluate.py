"""Measure a checkpoint: python tools/evaluate.py perplexity --help"""

import argparse

from megagate.errors import run_command
from megagate.evaluate import harness, perplexity, sinks
from megagate.evaluate.ruler import command as ruler

MEASUREMENTS = {"perplexity": perplexity, "sinks": sinks, "harness": harness, "ruler": ruler}


def main() -> int:
    """Run the measurement that the first argument names."""
    parser = argparse.ArgumentParser(prog="evaluate.py", description="Measure a checkpoint.", allow_abbrev=False)
    subparsers = parser.add_subparsers(dest="measurement", required=True, metavar="MEASUREMENT")
    for name, module in MEASUREMENTS.items():
        summary = (module.__doc__ or "").split("\n")[0]
        subparser = subparsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(subparser)
    options = parser.parse_args()
    return MEASUREMENTS[options.measurement].run(options)


if __name__ == "__main__":
    run_command(main, once=True)
