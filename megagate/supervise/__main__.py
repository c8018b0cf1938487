"""Keep a run alive, show how it is, or simulate one: `python -m megagate.supervise {run,status,simulate} ...`."""

import argparse
import shlex
import sys
from pathlib import Path

from megagate.errors import UserError, run_command
from megagate.pretrain.parser import Parser
from megagate.supervise import simulate, slurm
from megagate.supervise.decide import Policy
from megagate.supervise.status import screen
from megagate.supervise.supervisor import TRAINER, Settings, Supervisor

RUN = """Start the ranks by COMMAND, which ends with `-m megagate.pretrain FLAGS`, and bring the run back until it is
done. Exit status: 0 done, 2 a mistake in what was given, 3 given up, 75 saved and ended early (start it again)."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line up to `--`."""
    parser = Parser(prog="python -m megagate.supervise", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{run,status,simulate}")
    run = commands.add_parser("run", description=RUN, help="run COMMAND until training is done: run [flags] -- COMMAND")
    policy = Policy()
    run.add_argument(
        "--same-step", type=int, default=policy.same_step, help="failures in a row at one step after which to give up"
    )
    run.add_argument(
        "--without-progress",
        type=int,
        default=policy.without_progress,
        help="failures in a row without a new checkpoint after which to give up",
    )
    run.add_argument(
        "--back-off",
        type=float,
        default=policy.back_off,
        metavar="SECONDS",
        help="wait before the second restart without a new checkpoint; doubled for each further one",
    )
    run.add_argument(
        "--hang-after",
        type=float,
        default=1800,
        metavar="SECONDS",
        help="time without a step after which the run hangs; must be longer than an evaluation and a save",
    )
    run.add_argument(
        "--start-limit", type=float, default=3600, metavar="SECONDS", help="the same for the time to the first step"
    )
    run.add_argument(
        "--save-margin",
        type=float,
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
        "--preflight-flags", default="", help="as one word; python -m megagate.supervise.preflight --help lists them"
    )
    run.add_argument("--no-requeue", action="store_true", help="never put a Slurm job back into the queue")
    status = commands.add_parser("status", help="show a run on one screen: status SAVE")
    status.add_argument("save", type=Path, help="the folder that --save names")
    simulation = commands.add_parser(
        "simulate", help="how often to save on 1,024 to 16,384 nodes", description=simulate.__doc__
    )
    simulate.add_arguments(simulation)
    return parser


def main() -> int:
    """Do what the command line says."""
    words, command = sys.argv[1:], []
    if "--" in words:
        separator = words.index("--")
        words, command = words[:separator], words[separator + 1 :]
    args = build_parser().parse_args(words)
    if args.command == "status":
        print(screen(args.save))
        return 0
    if args.command == "simulate":
        return simulate.run(args)
    if TRAINER not in command:
        raise UserError(f"the command after -- does not start the trainer: it must end with -m {TRAINER} FLAGS")
    flags = command[command.index(TRAINER) + 1 :]
    policy = Policy(
        can_requeue=slurm.job() is not None and not args.no_requeue,
        same_step=args.same_step,
        without_progress=args.without_progress,
        back_off=args.back_off,
    )
    checks = args.preflight == "on" or (args.preflight == "auto" and slurm.job() is not None)
    preflight = tuple(shlex.split(args.preflight_flags)) if checks else None
    settings = Settings(policy, args.hang_after, args.start_limit, args.save_margin, preflight)
    return Supervisor(command, save_folder(flags), settings).run()


def save_folder(flags: list[str]) -> Path:
    """Return the folder that --save names, on the command line or in its recipe.

    Raises:
        UserError: there is none.
    """
    save = last_value(flags, "--save")
    recipe = last_value(flags, "--recipe")
    if save is None and recipe is not None:
        from megagate.pretrain.recipe import read_recipe

        save = read_recipe(recipe)[0].get("save")
    if save is None:
        raise UserError("a supervised run needs --save, where its checkpoints and its history go: add it")
    return Path(save)


def last_value(flags: list[str], name: str) -> str | None:
    """Return the value of the last `--name VALUE` or `--name=VALUE`."""
    value = None
    for position, word in enumerate(flags):
        if word == name and position + 1 < len(flags):
            value = flags[position + 1]
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


if __name__ == "__main__":
    run_command(main)
