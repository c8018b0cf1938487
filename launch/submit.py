"""Fill in launch/slurm/pretrain.sbatch for a recipe and submit it.

    python launch/submit.py examples/quickstart/recipe.yaml --nodes 4 --name mine --time 12:00:00 \\
        --env h100_infiniband -- --data-path data/text_document --train-iters 10000

What follows `--` goes to the trainer. --dry-run prints the script instead. The script that was submitted is kept beside
the checkpoints, as SAVE/supervise/job.sbatch; submitting the same run again goes on where it was.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megagate.errors import run_command  # noqa: E402
from megagate.parser import Parser  # noqa: E402
from megagate.supervise import sbatch  # noqa: E402
from megagate.supervise.flags import check, last_value  # noqa: E402
from megagate.supervise.records import FOLDER  # noqa: E402


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the words before `--`."""
    parser = Parser(prog="launch/submit.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="YAML file of the trainer's flags")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--name", help="the job's name, of which one runs at a time (default: the recipe's)")
    sbatch.add_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    return parser


def script(args: argparse.Namespace, trainer: list[str]) -> tuple[str, Path]:
    """Return the filled-in script, and the folder of the run's checkpoints.

    Raises:
        UserError: something in the arguments is wrong.
    """
    from megagate.recipe import read_recipe

    flags, _ = read_recipe(args.recipe)
    if args.recipe.stem == "recipe":
        args.name = args.name or args.recipe.resolve().parent.name
    name = args.name or args.recipe.stem
    save = Path(last_value(trainer, "--save") or flags.get("save") or f"runs/{name}/checkpoints")
    save = save if save.is_absolute() else ROOT / save
    trainer = ["--recipe", str(args.recipe.resolve()), *trainer, "--save", str(save)]
    check(trainer)
    options = {"--job-name": name, "--output": sbatch.log_file(save / "main.log")}
    return sbatch.fill(args, args.nodes, trainer, options, [save, args.recipe.resolve().parent]), save


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
    print(f"{sbatch.submit(save / FOLDER / 'job.sbatch', text, '--save')}; its log is {save / 'main.log'}")
    print(f"to see how it goes: python -m megagate.supervise status {save}")
    return 0


if __name__ == "__main__":
    run_command(main)
