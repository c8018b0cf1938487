"""One cell, trained and measured: what is done already is not done again."""

import fcntl
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megagate.ablate.settings import RESULT, Work, names_of
from megagate.errors import UserError
from megagate.processes import ROOT, Iteration, environment, free_port, iteration_of, run_logged
from megagate.supervise.records import ATTEMPT_VARIABLE, DIRECTORY_VARIABLE, FOLDER, clear, read_outcomes, write_whole

SHARE = 20
"""The training loss's ends and lowest are means over one of so many parts of what is logged."""
NOT_FINITE = re.compile(r"Unexpected result .*\b(NaN|Inf)\b|^NaN or infinity")
"""In what ends a training: messages of Megatron's validation of results, and of its exit codes (supervised.RERUN)."""
EXIT_AGAIN = 75
"""Of a supervisor: saved and ended early."""


class Stopped(Exception):
    """The cell was asked to end before it was done; it goes on from its checkpoint another time."""


class Failed(Exception):
    """The cell failed; says how, in one sentence."""


def train_command(work: Work, launcher: Sequence[str]) -> list[str]:
    """Return the command line of the cell's training; `launcher` is what comes before `-m`."""
    cache_given = "data-cache-path" in (*work.recipe, *names_of(work.trainer))
    return [
        *launcher,
        *("-m", "megagate.pretrain", "--recipe", str(work.folder / "recipe.yaml"), *work.trainer),
        *("--save", str(work.save), "--load", str(work.save), "--allow-fresh-start"),
        *("--tensorboard-dir", str(work.events)),
        *(() if cache_given else ("--data-cache-path", str(work.data_cache))),
    ]


def evaluate_command(work: Work, evaluator: Sequence[str]) -> list[str]:
    """Return the command line of the cell's measurement; `evaluator` is what comes before Python's words."""
    flags = []
    for name, value in work.evaluation.items():
        flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    output = str(work.folder / "evaluation.json")
    tool = str(ROOT / "tools" / "evaluate.py")
    return [*evaluator, tool, "sinks", "--load", str(work.save), *flags, "--output", output]


def run(
    work: Work,
    launcher: Sequence[str],
    evaluator: Sequence[str],
    variables: Mapping[str, str],
    on_iteration: Callable[[Iteration], object],
) -> dict[str, Any]:
    """Train and measure a cell, as far as that is not done, and return its result.

    Args:
        work: the cell.
        launcher: what starts the trainer.
        evaluator: what starts the measurement.
        variables: the whole environment of both.
        on_iteration: is told how far the training is.

    Raises:
        Stopped: it was asked to end.
        Failed: it failed, or another process is at it.
    """
    logs = work.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    lock = os.open(work.folder / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Failed("is being run by another process, or by what one that was killed has left running") from error
        result = work.result()  # by another process, in the meantime
        if result is None:
            reason = _train(work, launcher, variables, on_iteration, lock)
            measured = None if reason else _measure(work, evaluator, variables, lock)
            result = collect(work, measured, reason)
            write_whole(work.folder / RESULT, json.dumps(result, indent=1) + "\n")
        return result
    finally:
        os.close(lock)


def _train(
    work: Work,
    launcher: Sequence[str],
    variables: Mapping[str, str],
    on_iteration: Callable[[Iteration], object],
    lock: int,
) -> str | None:
    """Train to the end, if that has not been done; return why the loss is not finite where that has ended it."""
    records = work.save / FOLDER
    if _outcome(records)[0] == "finished":
        return None
    clear(records)
    write_whole(work.folder / "recipe.yaml", yaml.safe_dump(work.recipe, sort_keys=False))

    def on_line(line: str) -> None:
        if seen := iteration_of(line):
            on_iteration(seen)

    log = work.folder / "logs" / "train.log"
    status = _execute(work, train_command(work, launcher), log, variables, on_line, lock)
    outcome, message = _outcome(records)
    if status == 0 and outcome == "finished":
        return None
    if work.is_stopped or status == EXIT_AGAIN or outcome in ("stopped", "asked"):
        raise Stopped
    if outcome == "failed" and NOT_FINITE.search(message):
        return message
    raise Failed(f"training failed with status {status}{': ' + message if message else ''}; {log} says more")


def _outcome(records: Path) -> tuple[str, str]:
    """Return how the training ended, and a message; what rank 0 says counts most."""
    said = sorted(read_outcomes(records), key=lambda outcome: outcome["rank"])
    return (said[0]["outcome"], said[0]["message"]) if said else ("", "")


def _measure(work: Work, evaluator: Sequence[str], variables: Mapping[str, str], lock: int) -> dict[str, Any]:
    log = work.folder / "logs" / "evaluate.log"
    status = _execute(work, evaluate_command(work, evaluator), log, variables, None, lock)
    if work.is_stopped:
        raise Stopped
    if status:
        last = log.read_text(encoding="utf-8").strip().splitlines()[-1]
        raise Failed(f"the evaluation failed with status {status}: {last.removeprefix('error: ')}; {log} says more")
    return json.loads((work.folder / "evaluation.json").read_text(encoding="utf-8"))["checkpoints"][0]


def _execute(
    work: Work,
    command: Sequence[str],
    log: Path,
    variables: Mapping[str, str],
    on_line: Callable[[str], object] | None,
    lock: int,
) -> int:
    if work.is_stopped:
        raise Stopped

    def on_start(process: subprocess.Popen[str]) -> None:
        work.processes.append(process)
        if work.is_stopped:  # in the meantime
            process.terminate()

    try:
        # The lock is held until the program ends, even if this process is killed before.
        return run_logged(command, log, variables, on_line, on_start=on_start, inherited=(lock,))
    except OSError as error:
        raise Failed(f"cannot run {command[0]}: {error.strerror}") from error
    finally:
        work.processes.clear()


def collect(work: Work, measured: Mapping[str, Any] | None, reason: str | None) -> dict[str, Any]:
    """Return the result of a cell.

    Args:
        work: the cell, trained.
        measured: of the checkpoint; None if there is none.
        reason: why the training's loss is not finite.
    """
    result: dict[str, Any] = {
        "fingerprint": work.fingerprint,
        "labels": work.cell.labels,
        "recipe": work.recipe,
        "trainer": work.trainer,
        "not finite": reason,
        **_training(work),
    }
    if measured is not None:
        scalars = measured["scalars"]
        result |= {
            "tokens": measured["tokens"],
            "loss": measured["loss"],
            "perplexity": measured["perplexity"],
            "gate score": scalars.get("gate/mean-score"),
            "M-Act": scalars.get("activation/max"),
            "F-Attn": scalars.get("attention/first-token-share"),
            "F-Attn if uniform": scalars.get("attention/first-token-share-uniform"),
        }
    return result


def _training(work: Work) -> dict[str, Any]:
    """Return what the event files say of the training."""
    from megagate.report.runs import read_run
    from megagate.report.tables import LOSS, tokens_per_second

    try:
        run = read_run(work.events)
    except UserError:  # it ended before its first logged step
        return {"iterations": 0, "training tokens": None, "last loss": None, "lowest loss": None, "tokens/s": None}
    losses = run.scalars[LOSS].values if LOSS in run.scalars else np.array([math.nan])
    parts = np.array_split(losses, min(SHARE, len(losses)))
    means = np.array([part.mean() for part in parts])
    speed = tokens_per_second(run)
    return {
        "iterations": int(run.scalars[LOSS].steps[-1]) if LOSS in run.scalars else 0,
        "training tokens": float(run.tokens.values[-1]) if run.tokens is not None else None,
        "last loss": float(means[-1]) if np.isfinite(means[-1]) else None,
        "lowest loss": float(np.nanmin(means)) if np.isfinite(means).any() else None,
        "tokens/s": float(np.median(speed.values)) if speed is not None else None,
    }


def has_diverged(result: Mapping[str, Any], limit: float) -> bool:
    """Return whether a cell's training loss is not finite, or ended `limit` nats above its lowest."""
    last, lowest = result["last loss"], result["lowest loss"]
    return bool(result["not finite"]) or last is None or last > lowest + limit


def local_launcher(world_size: int) -> list[str]:
    """Return what starts a training of so many processes on this machine."""
    return [sys.executable] if world_size == 1 else ["bash", str(ROOT / "launch" / "node.sh")]


def local_evaluator(world_size: int) -> list[str]:
    """Return what starts a measurement on this machine: with the environment of such a training."""
    return [sys.executable] if world_size == 1 else ["bash", str(ROOT / "launch" / "process.sh")]


def local_variables(work: Work, world_size: int, jobs: int) -> dict[str, str]:
    """Return the environment of a cell's programs where no supervisor starts them, `jobs` cells at a time here."""
    threads = max(1, (os.cpu_count() or 1) // (world_size * jobs))
    variables = environment() | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # Where the trainer says how it ended; a supervisor sets both by itself.
        DIRECTORY_VARIABLE: str(work.save / FOLDER),
        ATTEMPT_VARIABLE: "0",
    }
    if world_size > 1:
        has_gpu = shutil.which("nvidia-smi") is not None
        kind = os.environ.get("MEGAGATE_ENV", "generic" if has_gpu else "cpu")
        variables |= {"MEGAGATE_RANKS": str(world_size), "MEGAGATE_ENV": kind, "MEGAGATE_PYTHON": sys.executable}
        variables["MASTER_PORT"] = str(free_port())
    return variables
