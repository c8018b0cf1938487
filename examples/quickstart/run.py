"""The demo: train a small gated mixture-of-experts model and its ungated baseline on this machine, and compare them.

    python examples/quickstart/run.py            # or: make demo

takes a real corpus (the source files of Python's standard library), trains a tokenizer, trains both models on two
processes with tensor, sequence and expert parallelism, and measures them on files that neither has seen. A few minutes
on two CPU cores; no GPU is used. What is done already is reused when it is run again, and an interrupted training
continues from its last checkpoint. Every command that it runs stands at the top of that step's log.
"""

import argparse
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from corpus import EXCLUDED_FOLDERS, HELD_OUT_PERCENT, write_corpus
from steps import ROOT, Steps, shown, training_report
from table import draw_losses, models_table, read_report, tokens_per_second

from megagate.errors import UserError, run_command

RECIPE = Path(__file__).resolve().parent / "recipe.yaml"
RANKS = 2
MODELS = {"gated": "sdpa-elementwise", "baseline": "baseline"}
"""Name here -> gate preset."""
TOTAL_STEPS = 4 + 2 * len(MODELS)

VOCABULARY_SIZE, SHORT_VOCABULARY_SIZE = 4096, 512
SHORT_FILES = 48
SHORT = {
    "num-layers": 2,
    "hidden-size": 64,
    "num-experts": 4,
    "seq-length": 128,
    "max-position-embeddings": 128,
    "train-iters": 40,
    "lr-warmup-iters": 5,
    "log-interval": 10,
    "eval-iters": 1,
    "split": "90,10,0",
}
"""What --short changes in the recipe."""


def flags(values: Mapping[str, Any]) -> list[str]:
    """Return command-line words: paths as they are shown, a list as several values, True as a flag without one."""
    words: list[str] = []
    for name, value in values.items():
        words.append(f"--{name}")
        if value is not True:
            parts = value if isinstance(value, list) else [value]
            words += [shown(part) if isinstance(part, Path) else str(part) for part in parts]
    return words


def tool(name: str, *words: str) -> list[str]:
    """Return the command line of one of the programs in tools/."""
    return [sys.executable, shown(ROOT / "tools" / f"{name}.py"), *words]


def dataset_files(prefix: Path) -> list[Path]:
    """Return the two files of a tokenized dataset."""
    return [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]


def prepare_data(steps: Steps, short: bool, vocabulary_size: int = VOCABULARY_SIZE) -> dict[str, Path]:
    """Write the corpus, train the tokenizer and tokenize.

    Args:
        steps: of the example.
        short: take little text and a small vocabulary.
        vocabulary_size: otherwise.

    Returns:
        The tokenizer's file, and the prefixes of the datasets "train" and "held_out".
    """
    corpus, tokenizer = steps.output / "corpus", steps.output / "tokenizer" / "python"
    files = {"train": corpus / "train.jsonl", "held_out": corpus / "held_out.jsonl"}
    maximum_files = SHORT_FILES if short else None
    steps.run(
        "corpus",
        "corpus: the source files of Python's standard library",
        lambda: write_corpus(corpus, maximum_files),
        outputs=[*files.values()],
        settings=[maximum_files, HELD_OUT_PERCENT, sorted(EXCLUDED_FOLDERS)],
    )
    vocabulary_size = SHORT_VOCABULARY_SIZE if short else vocabulary_size
    prepared = {"tokenizer": tokenizer.with_name(tokenizer.name + ".model")}
    tokenizer_values = {"input": files["train"], "output-prefix": tokenizer, "vocab-size": vocabulary_size}
    steps.run(
        "tokenizer",
        f"tokenizer: SentencePiece, {vocabulary_size} tokens",
        tool("train_tokenizer", *flags(tokenizer_values)),
        inputs=[files["train"]],
        outputs=[prepared["tokenizer"]],
        folder=tokenizer.parent,
    )
    for part, path in files.items():
        prefix = steps.output / "data" / part
        prepared[part] = prefix.with_name(f"{part}_text_document")
        values = {"input": path, "output-prefix": prefix, "append-eod": True, "workers": 2, "overwrite": True}
        steps.run(
            f"preprocess_{part}",
            f"tokenize the {part.replace('_', '-')} files",
            tool("preprocess_data", *flags(values), *tokenizer_flags(prepared)),
            inputs=[path, prepared["tokenizer"]],
            outputs=dataset_files(prepared[part]),
        )
    return prepared


def tokenizer_flags(prepared: Mapping[str, Path]) -> list[str]:
    """Return the flags that name the tokenizer, the same for preprocessing and training."""
    return flags({"tokenizer-type": "SentencePieceTokenizer", "tokenizer-model": prepared["tokenizer"]})


def train(steps: Steps, name: str, prepared: Mapping[str, Path], recipe: Mapping[str, Any], short: bool) -> Path:
    """Pretrain one model and return the folder of its checkpoints."""
    save = steps.output / name
    values = {
        "recipe": RECIPE,
        "gate-preset": MODELS[name],
        **(SHORT if short else {}),
        "data-path": prepared["train"],
        "data-cache-path": save / "data_cache",  # Megatron's cache does not notice that a dataset has changed
        "load": save,
        "allow-fresh-start": True,
        "save": save,
        "tensorboard-dir": save / "tensorboard",
    }
    torchrun = ["-m", "torch.distributed.run", *flags({"standalone": True, "nproc-per-node": RANKS})]
    steps.run(
        f"train_{name}",
        f"train {name}: {recipe['train-iters']} iterations on {RANKS} ranks",
        [sys.executable, *torchrun, "-m", "megagate.pretrain", *flags(values), *tokenizer_flags(prepared)],
        inputs=[RECIPE, prepared["tokenizer"], *dataset_files(prepared["train"])],
        outputs=[save / "latest_checkpointed_iteration.txt"],
        folder=save,
        report=training_report(tokens_per_iteration(recipe)),
    )
    return save


def tokens_per_iteration(recipe: Mapping[str, Any]) -> int:
    """Return the tokens of one optimizer step."""
    return recipe["global-batch-size"] * recipe["seq-length"]


def evaluate(steps: Steps, name: str, save: Path, prepared: Mapping[str, Path]) -> Path:
    """Measure one model on the held-out files and return the JSON."""
    result = steps.output / f"{name}.json"
    values = {
        "load": save,
        "data-path": prepared["held_out"],
        "unigram-data-path": prepared["train"],
        "tokenizer-model": prepared["tokenizer"],
        "micro-batch-size": 16,
        "output": result,
    }
    steps.run(
        f"evaluate_{name}",
        f"evaluate {name} on the held-out files",
        tool("evaluate", "perplexity", *flags(values)),
        inputs=[
            steps.stamps / f"train_{name}.json",
            *dataset_files(prepared["held_out"]),
            *dataset_files(prepared["train"]),
        ],
        outputs=[result],
    )
    return result


def show_results(steps: Steps, saves: Mapping[str, Path], results: Mapping[str, Path], tokens: int) -> None:
    """Print the table, draw the losses, and say where everything lies."""
    reports = {name: read_report(path) for name, path in results.items()}
    boards = {name: save / "tensorboard" for name, save in saves.items()}
    speeds = {name: tokens_per_second(folder, tokens) for name, folder in boards.items()}
    picture = steps.output / "loss.png"
    drawn = draw_losses(boards, picture)
    print(f"\n{models_table(reports, speeds)}\n")
    held_out = next(iter(reports.values()))["tokens"]
    print(f"Measured on {held_out:,} tokens of files that were held out; losses are in nats per token.")
    print("Active parameters are those that one token passes through: of the experts, top-k of all.")
    print(f"loss curves: {shown(picture) if drawn else 'not drawn, since matplotlib is not installed'}")
    print(f"checkpoints, each with logs: {', '.join(shown(save) for save in saves.values())}")
    print(f"TensorBoard: {shown(Path(sys.executable))} -m tensorboard.main --logdir {shown(steps.output)}")
    print(f"logs of the steps, each with its command: {shown(steps.logs)}")


def main() -> int:
    """Run every step that is not done yet, then show what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    default = ROOT / "runs" / "quickstart"
    parser.add_argument("--output", type=Path, default=default, help="folder for everything (runs/quickstart)")
    parser.add_argument("--short", action="store_true", help="a minute with a tiny model, to see that everything works")
    parser.add_argument("--fresh", action="store_true", help="do every step again")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the running step as Ctrl-C does
    started = time.monotonic()
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8")) | (SHORT if options.short else {})
    try:
        steps = Steps(options.output.absolute(), TOTAL_STEPS, fresh=options.fresh)
    except OSError as error:
        raise UserError(f"--output {options.output} cannot be used: {error.strerror}") from error

    prepared = prepare_data(steps, options.short)
    saves = {name: train(steps, name, prepared, recipe, options.short) for name in MODELS}
    results = {name: evaluate(steps, name, save, prepared) for name, save in saves.items()}
    show_results(steps, saves, results, tokens_per_iteration(recipe))
    reused = "" if steps.all_new else f" ({steps.seconds:.0f} s with the steps that were reused)"
    print(f"took {time.monotonic() - started:.0f} s{reused}")
    return 0


if __name__ == "__main__":
    run_command(main)
