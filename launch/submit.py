"""Fill in launch/slurm/pretrain.sbatch for a recipe and submit it.

    python launch/submit.py examples/quickstart/recipe.yaml --nodes 4 --name mine --time 12:00:00 \\
        --env h100_infiniband -- --data-path data/text_document --train-iters 10000

What follows `--` goes to the trainer. --dry-run prints the script instead. The script that was submitted is kept beside
the checkpoints, as SAVE/supervise/job.sbatch; submitting the same run again goes on where it was.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megagate.errors import UserError, run_command  # noqa: E402
from megagate.parser import Parser  # noqa: E402
from megagate.supervise.__main__ import build_parser as build_supervisor_parser  # noqa: E402
from megagate.supervise.__main__ import words_of  # noqa: E402
from megagate.supervise.flags import check, last_value  # noqa: E402
from megagate.supervise.records import FOLDER, write_whole  # noqa: E402
from megagate.supervise.slurm import parse_limit  # noqa: E402

TEMPLATE = ROOT / "launch" / "slurm" / "pretrain.sbatch"
MARKER = "# ---- settings"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the words before `--`."""
    parser = Parser(prog="launch/submit.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="YAML file of the trainer's flags")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--name", help="the job's name, of which one runs at a time (default: the recipe's)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="0 for nodes without GPUs (default: 8)")
    parser.add_argument("--ranks-per-node", type=int, help="processes on a node (default: its GPUs, or 1)")
    parser.add_argument("--time", default="24:00:00", help="limit of one stay in the queue's nodes (default: 24:00:00)")
    parser.add_argument(
        "--warn", type=int, default=600, metavar="SECONDS", help="how long before it the run saves (default: 600)"
    )
    parser.add_argument("--partition")
    parser.add_argument("--account")
    parser.add_argument("--qos")
    parser.add_argument("--env", help="one of launch/env/, without .sh (default: generic, or cpu without GPUs)")
    parser.add_argument("--python", help="the interpreter on the nodes (default: .venv/bin/python here)")
    parser.add_argument("--container", help="image that the ranks run in")
    parser.add_argument("--container-runtime", choices=("pyxis", "apptainer"), default="pyxis")
    parser.add_argument("--mounts", help="folders that the container sees besides this repository: /a,/b")
    parser.add_argument("--supervisor", help="flags of the supervisor, as one word")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option of sbatch, such as --reservation=x",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    return parser


def fill(template: str, options: dict[str, str | None], settings: dict[str, str], trainer: list[str]) -> str:
    """Return the script with its options, settings and the trainer's flags.

    Args:
        template: launch/slurm/pretrain.sbatch.
        options: option of sbatch -> value, "" for one without, None to leave it out.
        settings: environment variable -> value.
        trainer: flags of the trainer.
    """
    lines = template.splitlines()
    for name, value in options.items():
        line = f"#SBATCH {name}={shlex.quote(value)}" if value else f"#SBATCH {name}"
        present = [number for number, text in enumerate(lines) if re.match(rf"#SBATCH {re.escape(name)}(=|$)", text)]
        for number in reversed(present):
            del lines[number]
        if value is not None:
            lines.insert(present[0] if present else 1, line)
    marker = next(number for number, text in enumerate(lines) if text.startswith(MARKER))
    filled = [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
    lines[marker + 1 : marker + 1] = [*filled, f"set -- {shlex.join(trainer)}"]
    return "\n".join(lines) + "\n"


def mounts(given: str | None, needed: list[Path]) -> str | None:
    """Return what a container mounts: what is given, and folders that lie neither there nor in this repository."""
    listed = given.split(",") if given else []
    for folder in needed:
        seen = [ROOT, *(Path(entry.partition(":")[0]) for entry in listed)]
        if not any(folder.is_relative_to(place) for place in seen):
            listed.append(str(folder))
    return ",".join(listed) or None


def script(args: argparse.Namespace, trainer: list[str]) -> tuple[str, Path]:
    """Return the filled-in script, and the folder of the run's checkpoints.

    Raises:
        UserError: something in the arguments is wrong.
    """
    from megagate.recipe import read_recipe

    flags, _ = read_recipe(args.recipe)
    for name, least in (("nodes", 1), ("warn", 1), ("gpus-per-node", 0), ("ranks-per-node", 1)):
        value = getattr(args, name.replace("-", "_"))
        if value is not None and value < least:
            raise UserError(f"--{name} must be at least {least}, not {value}")
    limit = parse_limit(args.time)
    if limit is None:
        raise UserError(f"--time {args.time} is no time limit: write minutes, hours:minutes:seconds or days-hours")
    if args.warn >= limit:
        raise UserError(f"--warn {args.warn} leaves nothing of --time {args.time} ({limit:.0f} s): make it shorter")
    build_supervisor_parser().parse_args(["run", *words_of(args.supervisor or "")])
    environments = sorted(path.stem for path in (ROOT / "launch" / "env").glob("*.sh"))
    environment = args.env or ("generic" if args.gpus_per_node else "cpu")
    if environment not in environments:
        raise UserError(f"launch/env has no {environment}.sh: --env takes {', '.join(environments)}")
    if args.recipe.stem == "recipe":
        args.name = args.name or args.recipe.resolve().parent.name
    name = args.name or args.recipe.stem
    save = Path(last_value(trainer, "--save") or flags.get("save") or f"runs/{name}/checkpoints")
    save = save if save.is_absolute() else ROOT / save
    trainer = ["--recipe", str(args.recipe.resolve()), *trainer, "--save", str(save)]
    check(trainer)
    options: dict[str, str | None] = {
        "--job-name": name,
        "--nodes": str(args.nodes),
        "--gpus-per-node": str(args.gpus_per_node) if args.gpus_per_node else None,
        "--time": args.time,
        "--output": str(save / "main.log").replace("%", "%%"),
        "--signal": f"B:USR1@{args.warn}",
        "--partition": args.partition,
        "--account": args.account,
        "--qos": args.qos,
    }
    for option in args.sbatch:
        given = re.fullmatch(r"--([\w-]+)(?:[= ](.*))?", option)
        if given is None:
            raise UserError(f"--sbatch={option}: write a long option of sbatch, as in --sbatch=--reservation=x")
        options[f"--{given[1]}"] = given[2] or ""
    broken = next((name for name, value in options.items() if value and not value.isprintable()), None)
    if broken is not None:
        raise UserError(f"the value of {broken} for sbatch, {options[broken]!r}, has characters that cannot be printed")
    settings = {
        "MEGAGATE_ROOT": str(ROOT),
        "MEGAGATE_ENV": environment,
        "MEGAGATE_RANKS": str(args.ranks_per_node or args.gpus_per_node or 1),
        "MEGAGATE_PYTHON": args.python,
        "MEGAGATE_CONTAINER": args.container,
        "MEGAGATE_CONTAINER_RUNTIME": args.container_runtime if args.container else None,
        "MEGAGATE_MOUNTS": mounts(args.mounts, [save, args.recipe.resolve().parent]) if args.container else None,
        "MEGAGATE_SUPERVISOR": args.supervisor,
    }
    filled = {key: value for key, value in settings.items() if value is not None}
    return fill(TEMPLATE.read_text(encoding="utf-8"), options, filled, trainer), save


def main() -> int:
    """Submit, or print."""
    words, trainer = sys.argv[1:], []
    if "--" in words:
        separator = words.index("--")
        words, trainer = words[:separator], words[separator + 1 :]
    args = build_parser().parse_args(words)
    text, save = script(args, trainer)
    if args.dry_run:
        print(text, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise UserError("there is no sbatch here: submit from a login node of a Slurm cluster, or --dry-run")
    path = save / FOLDER / "job.sbatch"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
        done = subprocess.run(["sbatch", str(path)], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; correct --save") from error
    if done.returncode:
        raise UserError(f"sbatch refuses {path}: {' '.join(done.stderr.split())}; correct the flags")
    print(f"{done.stdout.strip()}; its log is {save / 'main.log'}")
    print(f"to see how it goes: python -m megagate.supervise status {save}")
    return 0


if __name__ == "__main__":
    run_command(main)
