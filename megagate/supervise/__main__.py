"""Keep a run alive, show how it is, or simulate one: `python -m megagate.supervise {run,status,simulate} ...`."""

import os
import sys

from megagate.errors import UserError, run_command
from megagate.supervise import preflight, simulate, slurm
from megagate.supervise.arguments import FLAGS_VARIABLE, build_parser, words_of
from megagate.supervise.decide import Policy
from megagate.supervise.flags import check, save_folder
from megagate.supervise.status import screen
from megagate.supervise.supervisor import TRAINER, Settings, Supervisor


def main() -> int:
    """Do what the command line says."""
    words, command = sys.argv[1:], []
    if "--" in words:
        separator = words.index("--")
        words, command = words[:separator], words[separator + 1 :]
    if words[:1] == ["run"]:
        words[1:1] = words_of(os.environ.get(FLAGS_VARIABLE, ""))
    args = build_parser().parse_args(words)
    if args.command == "status":
        print(screen(args.save))
        return 0
    if args.command == "simulate":
        return simulate.run(args)
    if TRAINER not in command:
        raise UserError(f"the command after -- does not start the trainer: it must end with -m {TRAINER} FLAGS")
    flags = command[command.index(TRAINER) + 1 :]
    check(flags)
    policy = Policy(
        can_requeue=slurm.job() is not None and not args.no_requeue,
        same_step=args.same_step,
        without_progress=args.without_progress,
        back_off=args.back_off,
    )
    checks = args.preflight == "on" or (args.preflight == "auto" and slurm.job() is not None)
    preflight.build_parser().parse_args(["--folder", ".", *args.preflight_flags])  # says what is wrong before it starts
    of_preflight = tuple(args.preflight_flags) if checks else None
    settings = Settings(policy, args.hang_after, args.start_limit, args.save_margin, of_preflight)
    return Supervisor(command, save_folder(flags), settings).run()


if __name__ == "__main__":
    run_command(main)
