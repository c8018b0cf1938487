"""Train on short texts, extend the context to four times as much, and compare a gated model with its baseline there.

    python examples/long_context/run.py

follows section 4.4 of arXiv 2505.06708 at the size of a laptop: a model is trained at 64 tokens; the base of its rotary
embedding is raised and it trains on at 128; YaRN then doubles that without training. Both models are measured on
held-out files with windows of up to 256 tokens, each way. Data and tokenizer are made as in examples/quickstart.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import run as quickstart  # noqa: E402
from steps import ROOT, Steps, shown, training_report  # noqa: E402

from megagate.errors import UserError, run_command  # noqa: E402

LENGTH = 64
"""Tokens of the first training."""
BASE = 100_000
"""Of the rotary embedding in the second; 10,000 in the first. Few positions need no more."""
MODELS = {"gated": "sdpa-elementwise", "baseline": "baseline"}
"""Name here -> gate preset."""

ONE_PROCESS = {
    "tensor-model-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "omit": "sequence-parallel",
    "micro-batch-size": 8,
    "eval-iters": 0,
}
TRAININGS: dict[str, dict[str, Any]] = {
    "short": {
        "seq-length": LENGTH,
        "max-position-embeddings": LENGTH,
        "global-batch-size": 32,
        "train-iters": 240,
    },
    "extended": {
        "seq-length": 2 * LENGTH,
        "max-position-embeddings": 2 * LENGTH,
        "global-batch-size": 16,
        "rotary-base": BASE,
        "train-iters": 60,
        "lr": 2e-3,
        "lr-warmup-iters": 5,
        "finetune": True,
    },
}
"""Name -> flags beside the recipe's; the second begins with the weights of the first."""

SHORT_ITERATIONS = {"short": 20, "extended": 5}

MEASUREMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{LENGTH} tokens, as trained": ("short", {"seq-length": LENGTH}),
    f"{4 * LENGTH} tokens, nothing changed": (
        "short",
        {"seq-length": 4 * LENGTH, "max-position-embeddings": 4 * LENGTH},
    ),
    f"{4 * LENGTH} tokens, YaRN x 4": ("short", {"seq-length": 4 * LENGTH, "rotary-scaling-factor": 4}),
    f"{2 * LENGTH} tokens, new base, trained on": ("extended", {"seq-length": 2 * LENGTH}),
    f"{4 * LENGTH} tokens, new base, trained on, YaRN x 2": (
        "extended",
        {"seq-length": 4 * LENGTH, "rotary-scaling-factor": 2},
    ),
}
"""Row of the table -> which training's checkpoint, and flags of tools/evaluate.py perplexity."""

TOTAL_STEPS = 4 + len(MODELS) * (len(TRAININGS) + len(MEASUREMENTS))


def train(steps: Steps, model: str, name: str, prepared: Mapping[str, Path], is_short: bool) -> None:
    """Do one training of a model; the second loads what the first has saved."""
    save = steps.output / model / name
    values: dict[str, Any] = {
        "recipe": quickstart.RECIPE,
        "gate-preset": MODELS[model],
        **(quickstart.SHORT if is_short else {}),
        **ONE_PROCESS,
        **TRAININGS[name],
        **({"train-iters": SHORT_ITERATIONS[name], "lr-warmup-iters": 2} if is_short else {}),
        "save-interval": 1000,
        "data-path": prepared["train"],
        "data-cache-path": save / "data_cache",
        "save": save,
    }
    inputs = [quickstart.RECIPE, prepared["tokenizer"], *quickstart.dataset_files(prepared["train"])]
    if name == "extended":
        values["load"] = steps.output / model / "short"
        inputs.append(steps.stamps / f"{model}_short.json")
    tokens = values["global-batch-size"] * values["seq-length"]
    steps.run(
        f"{model}_{name}",
        f"train {model}, {name}: {values['train-iters']} iterations at {values['seq-length']} tokens",
        [
            sys.executable,
            *("-m", "megagate.pretrain"),
            *quickstart.flags(values),
            *quickstart.tokenizer_flags(prepared),
        ],
        inputs=inputs,
        outputs=[save / "latest_checkpointed_iteration.txt"],
        folder=save,
        report=training_report(tokens),
    )


def measure(steps: Steps, model: str, number: int, row: str, prepared: Mapping[str, Path]) -> float:
    """Return the perplexity of a row of the table."""
    name, flags = MEASUREMENTS[row]
    result = steps.output / model / f"{number}.json"
    values = {
        "load": steps.output / model / name,
        "data-path": prepared["held_out"],
        "tokenizer-model": prepared["tokenizer"],
        "micro-batch-size": 32,
        "output": result,
        **flags,
    }
    steps.run(
        f"evaluate_{model}_{number}",
        f"{model}: {row}",
        quickstart.tool("evaluate", "perplexity", *quickstart.flags(values)),
        inputs=[steps.stamps / f"{model}_{name}.json", *quickstart.dataset_files(prepared["held_out"])],
        outputs=[result],
    )
    return json.loads(result.read_text(encoding="utf-8"))["perplexity"]


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return the perplexities, a row for each measurement and a column for each model."""
    width = max(map(len, MEASUREMENTS))
    lines = [f"{'perplexity':<{width}}" + "".join(f"{model:>12}" for model in found)]
    lines += [
        f"{row:<{width}}" + "".join(f"{perplexities[row]:>12.1f}" for perplexities in found.values())
        for row in MEASUREMENTS
    ]
    return "\n".join(lines)


def main() -> int:
    """Run every step that is not done yet, then show the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    default = ROOT / "runs" / "long_context"
    parser.add_argument("--output", type=Path, default=default, help="folder for everything (runs/long_context)")
    parser.add_argument("--short", action="store_true", help="tiny models, to see that everything works")
    parser.add_argument("--fresh", action="store_true", help="do every step again")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the running step as Ctrl-C does
    started = time.monotonic()
    try:
        steps = Steps(options.output.absolute(), TOTAL_STEPS, fresh=options.fresh)
    except OSError as error:
        raise UserError(f"--output {options.output} cannot be used: {error.strerror}") from error
    prepared = quickstart.prepare_data(steps, options.short)
    found: dict[str, dict[str, float]] = {}
    for model in MODELS:
        for name in TRAININGS:
            train(steps, model, name, prepared, options.short)
        found[model] = {row: measure(steps, model, number, row, prepared) for number, row in enumerate(MEASUREMENTS, 1)}
    print(f"\n{table(found)}\n\nlogs of the steps, each with its command: {shown(steps.logs)}")
    print(f"took {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    run_command(main)
