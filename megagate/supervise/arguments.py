"""The flags of `python -m megagate.supervise`: its own command line, and what a job's script will give it."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

from megagate.errors import UserError
from megagate.parser import Parser
from megagate.supervise import simulate
from megagate.supervise.decide import Policy

RUN = """Start the ranks by COMMAND, which ends with `-m megagate.pretrain FLAGS`, and bring the run back until it is
done. Exit status: 0 done, 2 a mistake in what was given, 3 given up, 75 saved and ended early (start it again). The
environment variable MEGAGATE_SUPERVISOR holds more flags; those given here win."""
FLAGS_VARIABLE = "MEGAGATE_SUPERVISOR"


def at_least(smallest: float, kind: type = float) -> Callable[[str], float]:
    """Return a type for argparse: a number that is not smaller."""

    def number(text: str) -> float:
        value = kind(text)
        if not value >= smallest:  # nan too
            raise argparse.ArgumentTypeError(f"must be at least {smallest:g}, not {text}")
        return value

    number.__name__ = "number"
    return number


def words_of(text: str) -> list[str]:
    """Return the words of a line, as a shell would.

    Raises:
        UserError: a quotation has no end.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"cannot read the flags {text!r}: {error}; correct the quotes") from error


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line up to `--`."""
    parser = Parser(
        prog="python -m megagate.supervise", description="Keep a run alive, show how it is, or simulate one."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{run,status,simulate}")
    run = commands.add_parser("run", description=RUN, help="run COMMAND until training is done: run [flags] -- COMMAND")
    policy = Policy()
    run.add_argument(
        "--same-step",
        type=at_least(1, int),
        default=policy.same_step,
        help="failures in a row at one step after which to give up; one more after many elsewhere",
    )
    run.add_argument(
        "--without-progress",
        type=at_least(1, int),
        default=policy.without_progress,
        help="failures in a row without a new checkpoint after which to give up; thrice as many if machines are at "
        "fault and Slurm has others",
    )
    run.add_argument(
        "--back-off",
        type=at_least(0),
        default=policy.back_off,
        metavar="SECONDS",
        help="wait before the second restart without a new checkpoint; doubled for each further one",
    )
    run.add_argument(
        "--hang-after",
        type=at_least(1),
        default=1800,
        metavar="SECONDS",
        help="time without a step after which the run hangs; must be longer than an evaluation and a save",
    )
    run.add_argument(
        "--start-limit",
        type=at_least(1),
        default=3600,
        metavar="SECONDS",
        help="the same for the time to the first step",
    )
    run.add_argument(
        "--save-margin",
        type=at_least(0),
        default=300,
        metavar="SECONDS",
        help="how long before the job's time limit the last save begins",
    )
    run.add_argument(
        "--preflight",
        choices=("auto", "on", "off"),
        default="auto",
        help="check every node before each start; auto: under Slurm (default)",
    )
    run.add_argument(
        "--preflight-flags",
        type=words_of,
        default=[],
        help="as one word; python -m megagate.supervise.preflight --help lists them",
    )
    run.add_argument("--no-requeue", action="store_true", help="never put a Slurm job back into the queue")
    status = commands.add_parser("status", help="show a run on one screen: status SAVE")
    status.add_argument("save", type=Path, help="the folder that --save names")
    simulation = commands.add_parser(
        "simulate", help="how often to save on 1,024 to 16,384 nodes", description=simulate.__doc__
    )
    simulate.add_arguments(simulation)
    return parser
