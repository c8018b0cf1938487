"""launch/slurm/pretrain.sbatch, filled in for a run or an array of runs, and given to sbatch."""

import argparse
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megagate.errors import UserError
from megagate.processes import ROOT
from megagate.supervise import arguments
from megagate.supervise.records import write_whole
from megagate.supervise.slurm import parse_limit

TEMPLATE = ROOT / "launch" / "slurm" / "pretrain.sbatch"
MARKER = "# ---- settings"


def add_arguments(parser: Any) -> None:
    """Add the flags that say where and how long a job runs."""
    add = parser.add_argument
    add("--gpus-per-node", type=int, default=8, help="0 for nodes without GPUs (default: 8)")
    add("--ranks-per-node", type=int, help="processes on a node (default: its GPUs, or 1)")
    add("--time", default="24:00:00", help="limit of one stay in the queue's nodes (default: 24:00:00)")
    add("--warn", type=int, default=600, metavar="SECONDS", help="how long before it the run saves (default: 600)")
    add("--partition")
    add("--account")
    add("--qos")
    add("--env", help="one of launch/env/, without .sh (default: generic, or cpu without GPUs)")
    add("--python", help="the interpreter on the nodes (default: .venv/bin/python here)")
    add("--container", help="image that the ranks run in")
    add("--container-runtime", choices=("pyxis", "apptainer"), default="pyxis")
    add("--mounts", help="folders that the container sees besides this repository: /a,/b")
    add("--supervisor", help="flags of the supervisor, as one word")
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option of sbatch, such as --reservation=x",
    )


def fill(
    args: argparse.Namespace,
    nodes: int,
    words: Sequence[str],
    options: Mapping[str, str | None],
    needed: Sequence[Path],
    settings: Mapping[str, str] | None = None,
) -> str:
    """Return the script.

    Args:
        args: with the flags of `add_arguments`.
        nodes: of the job.
        words: what the script is given.
        options: more options of sbatch -> value, "" for one without, None to leave it out.
        needed: folders that a container must see.
        settings: more environment variables.

    Raises:
        UserError: something in the arguments is wrong.
    """
    least = {"--nodes": 1, "--warn": 1, "--gpus-per-node": 0, "--ranks-per-node": 1}
    for flag, value in zip(least, (nodes, args.warn, args.gpus_per_node, args.ranks_per_node), strict=True):
        if value is not None and value < least[flag]:
            raise UserError(f"{flag} must be at least {least[flag]}, not {value}")
    limit = parse_limit(args.time)
    if limit is None:
        raise UserError(f"--time {args.time} is no time limit: write minutes, hours:minutes:seconds or days-hours")
    if args.warn >= limit:
        raise UserError(f"--warn {args.warn} leaves nothing of --time {args.time} ({limit:.0f} s): make it shorter")
    arguments.build_parser().parse_args(["run", *arguments.words_of(args.supervisor or "")])
    environments = sorted(path.stem for path in (ROOT / "launch" / "env").glob("*.sh"))
    environment = args.env or ("generic" if args.gpus_per_node else "cpu")
    if environment not in environments:
        raise UserError(f"launch/env has no {environment}.sh: --env takes {', '.join(environments)}")
    given: dict[str, str | None] = {
        **options,
        "--nodes": str(nodes),
        "--gpus-per-node": str(args.gpus_per_node) if args.gpus_per_node else None,
        "--time": args.time,
        "--signal": f"B:USR1@{args.warn}",
        "--partition": args.partition,
        "--account": args.account,
        "--qos": args.qos,
    }
    for option in args.sbatch:
        parts = re.fullmatch(r"--([\w-]+)(?:[= ](.*))?", option)
        if parts is None:
            raise UserError(f"--sbatch={option}: write a long option of sbatch, as in --sbatch=--reservation=x")
        given[f"--{parts[1]}"] = parts[2] or ""
    broken = next((name for name, value in given.items() if value and not value.isprintable()), None)
    if broken is not None:
        raise UserError(f"the value of {broken} for sbatch, {given[broken]!r}, has characters that cannot be printed")
    variables = {
        "MEGAGATE_ROOT": str(ROOT),
        "MEGAGATE_ENV": environment,
        "MEGAGATE_RANKS": str(ranks_per_node(args)),
        "MEGAGATE_PYTHON": args.python,
        "MEGAGATE_CONTAINER": args.container,
        "MEGAGATE_CONTAINER_RUNTIME": args.container_runtime if args.container else None,
        "MEGAGATE_MOUNTS": _mounts(args.mounts, needed) if args.container else None,
        "MEGAGATE_SUPERVISOR": args.supervisor,
        **(settings or {}),
    }
    return _filled(TEMPLATE.read_text(encoding="utf-8"), given, variables, words)


def ranks_per_node(args: argparse.Namespace) -> int:
    """Return how many processes run on a node."""
    return args.ranks_per_node or args.gpus_per_node or 1


def log_file(path: Path) -> str:
    """Return a path as the name of a log, in which sbatch has `%` stand for something else."""
    return str(path).replace("%", "%%")


def _mounts(given: str | None, needed: Sequence[Path]) -> str | None:
    """Return what a container mounts: what is given, and folders that lie neither there nor in this repository."""
    listed = given.split(",") if given else []
    for folder in needed:
        seen = [ROOT, *(Path(entry.partition(":")[0]) for entry in listed)]
        if not any(folder.is_relative_to(place) for place in seen):
            listed.append(str(folder))
    return ",".join(listed) or None


def _filled(
    template: str, options: Mapping[str, str | None], variables: Mapping[str, str | None], words: Sequence[str]
) -> str:
    lines = template.splitlines()
    for name, value in options.items():
        line = f"#SBATCH {name}={shlex.quote(value)}" if value else f"#SBATCH {name}"
        present = [number for number, text in enumerate(lines) if re.match(rf"#SBATCH {re.escape(name)}(=|$)", text)]
        for number in reversed(present):
            del lines[number]
            if value is None and lines[number - 1].startswith("# "):  # what it was for
                del lines[number - 1]
        if value is not None:
            lines.insert(present[0] if present else 1, line)
    marker = next(number for number, text in enumerate(lines) if text.startswith(MARKER))
    exported = [f"export {name}={shlex.quote(value)}" for name, value in variables.items() if value is not None]
    lines[marker + 1 : marker + 1] = [*exported, f"set -- {shlex.join(words)}"]
    return "\n".join(lines) + "\n"


def require() -> None:
    """Raise UserError if there is no sbatch here."""
    if shutil.which("sbatch") is None:
        raise UserError("there is no sbatch here: submit from a login node of a Slurm cluster, or --dry-run")


def submit(path: Path, text: str, where: str) -> str:
    """Write the script to `path`, give it to sbatch, and return what that says; `where` is the flag to correct.

    Raises:
        UserError: it cannot be written, or sbatch is not here or refuses it.
    """
    require()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
        done = subprocess.run(["sbatch", str(path)], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; correct {where}") from error
    if done.returncode:
        raise UserError(f"sbatch refuses {path}: {' '.join(done.stderr.split())}; correct the flags")
    return done.stdout.strip()
