"""The command `tools/gpu_check.py`: run parts, print one table, write JSON.

With several parts each runs in a process of its own: a kernel that fails on a GPU takes its process with it, and one
that does not end is ended.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megagate.errors import UserError, nearest
from megagate.gpu_check.result import Outcome, outcome_of, table

PARTS = {
    "presets": ("presets", "every gate preset's layer against the reference in float64 on the CPU"),
    "kernel_results": ("kernel", "the fused gate against the reference in float64"),
    "training": ("training", "50 steps of a small gated MoE: bf16 against fp32, FP8 against bf16"),
    "kernel_times": ("kernel", "the fused gate against torch.compile and a copy"),
    "gate_steps": ("steps", "step time of gates against the baseline and Megatron's own gate"),
    "stack_15a2b": ("steps", "tokens/s, TFLOP/s and MFU of two blocks of the 15A2B model"),
}
"""Name of a part, which is a function, -> its module and what it does."""

GRACE = 180.0
"""Seconds beside its own that a part's process has: imports, compilation, the round that it is in."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    described = "; ".join(f"{name}: {what}" for name, (_, what) in PARTS.items())
    parser.add_argument("--parts", nargs="+", metavar="PART", default=list(PARTS), help=f"all by default. {described}")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], help="cpu: small sizes; by default CUDA where there is one"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="what the counted calls of a timed part may take (10)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")


def run(options: argparse.Namespace) -> int:
    """Run the parts that are asked for; return 1 if one failed.

    Raises:
        UserError: a part or the device is not there.
    """
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        raise UserError(f"--parts {unknown[0]} is not a part{nearest(unknown[0], PARTS)}; there are {', '.join(PARTS)}")
    if not options.seconds > 0:
        raise UserError(f"--seconds must be above 0, not {options.seconds}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise UserError(f"the folder of --json {options.json} is not there: make it")
    is_cuda = _is_cuda(options.device)
    from megagate.gpu_check.machine import describe

    facts = describe(is_cuda)
    outcomes: list[Outcome] = []
    for name in options.parts:
        if len(options.parts) == 1:
            outcomes.append(_run_here(name, is_cuda, options.seconds))
        else:
            print(f"gpu_check: {name} ({PARTS[name][1]})", file=sys.stderr, flush=True)
            outcomes.append(_run_apart(name, is_cuda, options.seconds))
        if options.json is not None:  # after each part, so that whoever ends the rest has those before it
            results = {"machine": facts, "parts": [outcome.as_dict() for outcome in outcomes]}
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("  ".join(f"{key} {value}" for key, value in facts.items()))
    for line in table(outcomes):
        print(line)
    return int(any(outcome.status == "failed" for outcome in outcomes))


def _is_cuda(device: str | None) -> bool:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch finds no CUDA device: see nvidia-smi, or use --device cpu")
    if device == "cpu" and torch.cuda.is_available():
        raise UserError("--device cpu on a machine with CUDA: hide its devices, as CUDA_VISIBLE_DEVICES= does")
    return torch.cuda.is_available()


def _run_here(name: str, is_cuda: bool, seconds: float) -> Outcome:
    import megagate.platform  # noqa: F401  # before Megatron
    from megagate.gpu_check.machine import Machine

    part = getattr(importlib.import_module(f"megagate.gpu_check.{PARTS[name][0]}"), name)
    return outcome_of(name, lambda: part(Machine(is_cuda, seconds)))


def _run_apart(name: str, is_cuda: bool, seconds: float) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "part.json")
        command = [sys.executable, "-W", "ignore", "-m", "megagate.gpu_check.command", "--parts", name]
        command += ["--device", "cuda" if is_cuda else "cpu", "--seconds", str(seconds), "--json", str(path)]
        return watch(name, command, path, seconds + GRACE)


def watch(name: str, command: Sequence[str], path: Path, limit: float) -> Outcome:
    """Run a part's process, and return what it wrote to `path`, or that it failed.

    Args:
        name: of the part.
        command: of the process.
        path: a file of JSON, which the process writes at its end.
        limit: the seconds after which it is killed.
    """
    started = time.monotonic()
    try:
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=limit)
        last = (ended.stderr.strip().splitlines() or ["nothing was said"])[-1]
        reason = f"ended with status {ended.returncode}: {last}"
    except subprocess.TimeoutExpired:
        reason = f"still running after {limit:.0f} s"
    if path.exists():  # whatever happened while the process was taken down
        return Outcome.from_dict(json.loads(path.read_text(encoding="utf-8"))["parts"][0])
    return Outcome(name, "failed", reason, time.monotonic() - started)


def main() -> int:
    """Check as the command line says."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    from megagate.errors import run_command

    run_command(main)
