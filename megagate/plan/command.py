"""What a run needs, before it runs: memory by kind, bytes by link, step time, days and cost.

    python tools/plan.py examples/moe_1t/recipe.yaml --gpus 2048 --gpu h100
    python tools/plan.py examples/moe_15a2b/recipe.yaml --gpus 64 --gpu h200 --search

Any flag of `megagate.pretrain` overrides the recipe's. Counts are exact; times are a model, whose assumptions are
printed, and whose error against published measurements --published shows. docs/planning.md explains both.
"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

from megagate.errors import UserError, run_command
from megagate.parser import Parser
from megagate.plan.gpus import KNOWN, Gpu, gpu

EFFECTS = {
    "published": (),
    "scaling": ("recipe", "gpu", "precision", "network", "node", "figure", "json"),
    "search": ("recipe", "gpus", "gpu", "precision", "network", "node", "top", "json"),
}
"""Flags that ask for something else than a plan -> those that have an effect beside them."""
NEEDED = {"figure": "scaling", "top": "search"}
"""Flags that have an effect beside another one only."""


def main() -> int:
    """Plan as the command line says."""
    options, rest = _parser().parse_known_args()
    _check_numbers(options)
    _check_effects(rest)
    if options.published:
        return _show_errors()
    if options.recipe is None or (options.gpus is None and not options.scaling):
        example = "--scaling" if options.scaling else "--gpus 64"
        raise UserError(f"give a recipe and {example.split()[0]}, for example examples/moe_15a2b/recipe.yaml {example}")
    if options.scaling:
        return _scale(options, rest)
    if options.search:
        return _search(options, rest)
    machine = _machine(options)
    args = _arguments(options, rest, machine, options.gpus)
    from megagate.plan.summary import lines, plan

    planned = plan(args, machine, options)
    _show(planned, list(lines(planned, options)), options.json)
    return 0 if planned["memory"]["fits"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="plan.py", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", help="YAML file of flags, as for megagate.pretrain")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many GPUs")
    parser.add_argument("--gpu", default="h100", help=f"which: {', '.join(KNOWN)} (default: h100)")
    parser.add_argument(
        "--precision",
        choices=("bf16", "fp8"),
        help="of matrix products, for the time (that of the run)",
    )
    parser.add_argument("--network", type=float, metavar="GB/S", help="bytes per second of each GPU to other nodes")
    parser.add_argument("--node", type=int, metavar="N", help="GPUs that NVLink connects")
    parser.add_argument("--tokens", type=float, metavar="T", help="of the run; default: the recipe's iterations")
    parser.add_argument(
        "--storage", type=float, default=20.0, metavar="GB/S", help="speed of checkpoints (default: 20)"
    )
    parser.add_argument("--power-overhead", type=float, default=1.6, metavar="F", help="all power over the GPUs' own")
    parser.add_argument("--price-per-gpu-hour", type=float, metavar="P")
    parser.add_argument("--price-per-kwh", type=float, metavar="P")
    parser.add_argument("--search", action="store_true", help="look for the fastest layouts instead of the recipe's")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="layouts that --search shows (default: 5)")
    parser.add_argument("--scaling", action="store_true", help="say what a rank needs on 8 to 16,384 GPUs")
    parser.add_argument("--figure", metavar="FILE", help="draw what --scaling says, as PNG")
    parser.add_argument("--json", metavar="FILE", help="write the plan to FILE too; - for standard output alone")
    parser.add_argument("--published", action="store_true", help="hold the step-time model against published figures")
    return parser


def _check_numbers(options: argparse.Namespace) -> None:
    for name, value in vars(options).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, int) and value < 1:
            raise UserError(f"{flag} must be at least 1, not {value}")
        if not math.isfinite(value) or value < 0 or (value == 0 and not name.startswith("price")):
            raise UserError(f"{flag} must be a number above 0, not {value:g}")


def _check_effects(rest: list[str]) -> None:
    """Raise UserError if a flag is given that has no effect beside another one, or without it.

    Args:
        rest: flags of the trainer.
    """
    parser = _parser()
    empty = argparse.Namespace(**dict.fromkeys(action.dest for action in parser._actions))  # in place of the defaults
    given = [name for name, value in vars(parser.parse_known_args(namespace=empty)[0]).items() if value is not None]
    asked = next((name for name in EFFECTS if name in given), None)
    if asked is None:
        for name, other in NEEDED.items():
            if name in given:
                raise UserError(f"--{name} has no effect without --{other}: add it")
        return
    useless = [name for name in given if name not in (asked, *EFFECTS[asked])]
    flags = ["a recipe" if name == "recipe" else f"--{name.replace('_', '-')}" for name in useless]
    if asked == "published":
        flags += [word.partition("=")[0] for word in rest if word.startswith("--")]
    _refuse(asked, flags)


def _refuse(asked: str, flags: list[str]) -> None:
    if flags:
        raise UserError(f"--{asked} has no use for {', '.join(flags)}: leave {'it' if len(flags) == 1 else 'them'} out")


def _arguments(options: argparse.Namespace, rest: list[str], machine: Gpu, gpus: int) -> argparse.Namespace:
    """Return the validated arguments of the run on so many GPUs."""
    with _quietly():
        from megagate.model.pattern import as_hybrid
        from megagate.plan.dry_run import arguments_for, forget

        args, _ = arguments_for(["--recipe", options.recipe, *rest], gpus)
        forget()
    if options.precision is None:
        options.precision = "fp8" if _given(options, rest).fp8 else "bf16"
    if options.precision == "fp8" and machine.fp8 is None:
        raise UserError(f"{machine.name} has no units for FP8: add --precision bf16, or choose another --gpu")
    return as_hybrid(args)


def _given(options: argparse.Namespace, rest: list[str]) -> argparse.Namespace:
    """Return what the recipe and the command line say, as it stands there."""
    with _quietly():
        from megagate.pretrain.arguments import build_parser
        from megagate.recipe import merge_recipe

        parser, gate_flags = build_parser()
        return parser.parse_args(merge_recipe(["--recipe", options.recipe, *rest], parser, gate_flags))


def _machine(options: argparse.Namespace) -> Gpu:
    changed = {"network": options.network, "node": options.node}
    scale = {"network": 1e9, "node": 1}
    return dataclasses.replace(
        gpu(options.gpu), **{name: value * scale[name] for name, value in changed.items() if value is not None}
    )


def _quietly() -> Any:
    """Keep back what Megatron prints and warns of."""
    import contextlib
    import os

    from megagate.data.tokenizer import quiet
    from megagate.evaluate.load import hidden_output

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a plan is about other machines than this one
    stack = contextlib.ExitStack()
    stack.enter_context(quiet())
    stack.enter_context(hidden_output())
    return stack


def _show(numbers: dict[str, Any], text: list[str], target: str | None) -> None:
    """Print the text, and write the numbers as JSON."""
    if target == "-":
        print(json.dumps(numbers, indent=1))
        return
    print("\n".join(text))
    if target is not None:
        try:
            Path(target).write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {target}: {error.strerror}; choose another --json") from error


def _search(options: argparse.Namespace, rest: list[str]) -> int:
    from megagate.plan.gpus import GIB
    from megagate.recipe import read_recipe

    machine = _machine(options)
    with _quietly():
        from megagate.plan.scaling import smallest
        from megagate.plan.search import CHOSEN, search

    typed = {word.partition("=")[0] for word in rest}
    _refuse("search", [f"--{name}" for name in CHOSEN if f"--{name}" in typed])
    given = _given(options, rest)
    # The recipe's own layout need not fit the machine; without a global batch, that of one micro batch on each rank is.
    args = _arguments(options, rest, machine, smallest(given) if given.global_batch_size else options.gpus)
    args.world_size = options.gpus

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total} layouts", end="", file=sys.stderr, flush=True)

    recipe, _ = read_recipe(options.recipe)
    found, rejected = search(args, machine, options.precision, progress)
    text = [
        f"{len(found)} layouts fit {options.gpus} {machine.name}, {sum(rejected.counts.values())} do not; the fastest:"
    ]
    numbers: dict[str, Any] = {"fitting": len(found), "best": [], "rejected": [], "not counted": args.uncounted}
    for candidate in found[: options.top]:
        step = candidate.estimate
        text.append(
            f"  {step.step:.2f} s, {step.model_tflops:.0f} TFLOP/s per GPU, {candidate.memory / GIB:.0f} GiB, "
            f"recomputing {candidate.recompute}:"
        )
        text.append(f"    {candidate.flags(recipe)}")
        numbers["best"].append(
            {
                "flags": candidate.flags(recipe),
                "seconds": step.step,
                "model TFLOP/s per GPU": step.model_tflops,
                "memory": candidate.memory,
            }
        )
    text.append("rejected:")
    for reason, count in sorted(rejected.counts.items(), key=lambda item: -item[1]):
        text.append(f"  {count} for example since {rejected.examples[reason]}")
        numbers["rejected"].append({"count": count, "reason": reason, "example": rejected.examples[reason]})
    _show(numbers, [*text, *_uncounted(args)], options.json)
    return 0 if found else 1


def _scale(options: argparse.Namespace, rest: list[str]) -> int:
    from megagate.report.style import to_png

    machine = _machine(options)
    with _quietly():
        from megagate.plan.scaling import figure, lines, smallest, study

    args = _arguments(options, rest, machine, smallest(_given(options, rest)))
    rows = study(args, machine, options.precision)
    if not rows:
        raise UserError(f"no layout of {options.recipe} fits 8, 16, ... 16,384 GPUs: change its parallel sizes")
    if options.figure is not None:
        try:
            Path(options.figure).write_bytes(to_png(figure(rows, machine)))
        except OSError as error:
            raise UserError(f"cannot write {options.figure}: {error.strerror}; choose another --figure") from error
    text = [*lines(rows, machine), *_uncounted(args)]
    _show({"GPU": machine.name, "rows": rows, "not counted": args.uncounted}, text, options.json)
    return 0


def _uncounted(args: argparse.Namespace) -> list[str]:
    return [f"not counted: {', '.join(args.uncounted)}"] if args.uncounted else []


def _show_errors() -> int:
    with _quietly():
        from megagate.plan.published import errors

        rows = errors()
    print(f"{'model':<20} {'GPUs':>5} {'measured':>9} {'planned':>8} {'error':>7}")
    for measurement, planned, error in rows:
        low, high = measurement.tflops
        measured = f"{low:g}" if low == high else f"{low:g}-{high:g}"
        name = measurement.name + ("*" if measurement.overlapped else "")
        print(f"{name:<20} {measurement.gpus:>5} {measured:>9} {planned:>8.0f} {error:>+7.0%}  {measurement.note}")
    print("TFLOP/s per H100; * the all-to-all runs beside the computation of another micro batch")
    return 0


if __name__ == "__main__":
    run_command(main)
