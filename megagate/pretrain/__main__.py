"""Pretrain: `torchrun --nproc-per-node N -m megagate.pretrain --recipe FILE`, `srun python -m ...`, or one process."""

import os
import sys
import traceback
from pathlib import Path

from megagate.errors import EXIT_USER_ERROR, UserError, reason, run_command
from megagate.pretrain import output, slurm, stop
from megagate.processes import free_port
from megagate.supervise.records import write_outcome

LOCAL_WORLD = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}


def main() -> int:
    """Parse, build, train."""
    if "--dry-run" in sys.argv:
        return _dry_run()
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if "RANK" not in os.environ and tasks > 1:
        slurm.set_ranks(tasks)
    alone = "RANK" not in os.environ  # neither torchrun nor a launcher that sets the same variables
    stop.install()
    for name, value in LOCAL_WORLD.items():
        os.environ.setdefault(name, value)
    if alone and "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())
    wants_help = any(token in ("-h", "--help") for token in sys.argv[1:])
    stream = None if "--verbose" in sys.argv else output.quiet()

    import megagate.platform  # before Megatron
    from megagate.platform import apex, cpu

    if not wants_help:
        cpu.announce()
        if os.environ["RANK"] == "0" and apex.notice():
            print(f"megagate: {apex.notice()}", flush=True)
    if megagate.platform.on_cpu():
        cpu.activate_training()
    from megagate.pretrain.arguments import parse

    if wants_help and stream is not None:
        sys.stdout = stream.terminal  # only the imports were to be quiet
    try:
        args = parse(sys.argv[1:])
    except UserError as error:
        if os.environ["LOCAL_RANK"] == "0":  # once on each machine: files can be missing on one of them
            raise
        write_outcome("user_error", int(os.environ["RANK"]), _sentence(error)[:1000])  # it may be this rank's alone
        return EXIT_USER_ERROR
    if stream is not None:
        log = output.open_log(stream, Path(args.save or args.tensorboard_dir or "runs") / "logs", args.rank)
        if args.rank == 0:
            print(f"megagate: every detail is in {log}", flush=True)
    from megagate.pretrain.train import train

    train(args)
    return 0


def _dry_run() -> int:
    """Say what a run would find, as one process that looks for no GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "--verbose" not in sys.argv:
        output.quiet()
    from megagate.plan import dry_run

    dry_run.run(sys.argv[1:])
    return 0


def _sentence(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # of torch's CheckpointException: rank -> what it raised, and where
    if failures:
        cause = next(iter(failures.values()))[0]
        return f"a checkpoint cannot be read or written: {type(cause).__name__}: {reason(cause)}"
    return f"{type(error).__name__}: {reason(error)}"


def told() -> int:
    """Run `main`, and tell a supervisor how it failed."""
    try:
        return main()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # which torch's CheckpointException is
        outcome = "user_error" if isinstance(error, UserError) else "failed"
        write_outcome(outcome, int(os.environ.get("RANK", "0")), _sentence(error)[:1000])
        if isinstance(error, BrokenPipeError):  # of a process that the rank needs, not of the reader of its output
            traceback.print_exc()
        raise


if __name__ == "__main__":
    run_command(told)
