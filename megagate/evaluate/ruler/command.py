"""RULER's tasks by length of the text, generated here for the model's tokenizer, and scored as the benchmark does.

    python tools/evaluate.py ruler --load runs/mine/checkpoints --lengths 1k 2k 4k --samples 50 --haystack essays.txt

Every sample is as long as fits: prompt and room for the answer have at most so many tokens, counted with the model's
own tokenizer, and one more sentence, word or paragraph would exceed them. The same --seed gives the same samples.

Scores are percent, from greedy answers: the share of the values, variables or words that occur in the answer; for
questions whether one of the right answers does. The last line of the table is the mean over tasks.

Needles between the sentences of a text (niah_single_2 and others) need --haystack, a text file, for which the benchmark
takes essays; questions need --squad or --hotpot, the data sets' own files. Those tasks are left out without them.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megagate.data.tokenizer import quiet
from megagate.errors import UserError, nearest, reason
from megagate.evaluate.directories import check_directory, opened
from megagate.evaluate.extension import HINT, Extension
from megagate.evaluate.generation import Text, generate_tokens
from megagate.evaluate.load import LoadedModel
from megagate.evaluate.options import (
    add_decoding_arguments,
    add_model_arguments,
    check_output,
    check_positive,
    decoding_layout,
    write_file,
)
from megagate.evaluate.ruler.needles import ESSAY_NEEDLES, NEEDLES, sentences_of, variable_tracking
from megagate.evaluate.ruler.questions import hotpot, question_task, squad
from megagate.evaluate.ruler.sample import Sample, Task, fitting_draft, make_sample, match_all, match_part
from megagate.evaluate.ruler.words import common_words, frequent_words

NEEDS = dict.fromkeys(ESSAY_NEEDLES, "--haystack") | {"qa_1": "--squad", "qa_2": "--hotpot"}
"""Task -> the flag with the file that it needs."""


@dataclass(frozen=True)
class Result:
    """What a model answered to a sample."""

    task: str
    length: int
    tokens: int
    answers: list[str]
    prediction: str
    score: float


def tasks_of(
    haystack: Path | None = None, squad_file: Path | None = None, hotpot_file: Path | None = None
) -> dict[str, Task]:
    """Return the tasks by the benchmark's names, those that need a file only where it is given.

    Raises:
        UserError: a file cannot be read or is of another form.
    """
    tasks: dict[str, Task] = dict(NEEDLES)
    if haystack is not None:
        try:
            sentences = sentences_of(haystack.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read --haystack {haystack}: {reason(error)}; name a text file") from error
        if not any(sentences):
            raise UserError(f"--haystack {haystack} holds no text: give a file with sentences")
        tasks |= {name: partial(task, haystack=sentences) for name, task in ESSAY_NEEDLES.items()}
    tasks |= {"vt": variable_tracking, "cwe": common_words, "fwe": frequent_words}
    if squad_file is not None:
        tasks["qa_1"] = question_task(squad_file, "--squad", squad)
    if hotpot_file is not None:
        tasks["qa_2"] = question_task(hotpot_file, "--hotpot", hotpot)
    return tasks


def answer(loaded: LoadedModel, tokenizer: Any, samples: Sequence[Sample], micro_batch_size: int = 1) -> list[str]:
    """Return the model's greedy answers."""
    found = []
    for first in range(0, len(samples), micro_batch_size):
        batch = samples[first : first + micro_batch_size]
        prompts = [list(tokenizer.tokenize(sample.prompt)) for sample in batch]
        rows = generate_tokens(
            loaded,
            prompts,
            max_new_tokens=batch[0].room,
            end_of_document=tokenizer.eod,
            vocabulary=tokenizer.vocab_size,
        )
        found += [Text(tokenizer, prompt).of(tokens) for prompt, (tokens, _) in zip(prompts, rows, strict=True)]
    return found


def measure(
    loaded: LoadedModel,
    tokenizer: Any,
    tasks: Mapping[str, Task],
    lengths: Sequence[int],
    *,
    samples: int = 100,
    seed: int = 1234,
    micro_batch_size: int = 1,
    show: Callable[[str], None] = lambda line: None,
) -> list[Result]:
    """Let a model answer `samples` samples of each task and length.

    Raises:
        UserError: a length is too short for a task, or longer than the model's positions.
    """
    positions, lengths = loaded.args.max_position_embeddings, sorted(set(lengths))
    for length in lengths:
        if length > positions:
            raise UserError(f"--lengths {length} is more than the {positions} positions of the model: {HINT}")

    def count(text: str) -> int:
        return len(tokenizer.tokenize(text))

    for length, (name, task), index in itertools.product(lengths, tasks.items(), range(samples)):
        fitting_draft(task, name, length, seed, index, count)  # before hours of others
    found = []
    for length in lengths:
        for name, task in tasks.items():
            made = [make_sample(task, name, length, seed, index, count) for index in range(samples)]
            score = match_part if name.startswith("qa_") else match_all
            predictions = answer(loaded, tokenizer, made, micro_batch_size)
            results = [
                Result(name, length, sample.tokens, sample.answers, text, score(text, sample.answers))
                for sample, text in zip(made, predictions, strict=True)
            ]
            show(f"{name}, {length} tokens: {100 * mean([result.score for result in results]):.1f}")
            found += results
    return found


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def scores(results: Sequence[Result]) -> dict[str, dict[int, float]]:
    """Return the score in percent by task and length, and for "mean" the mean over tasks."""
    by_task: dict[str, dict[int, list[float]]] = {}
    for result in results:
        by_task.setdefault(result.task, {}).setdefault(result.length, []).append(result.score)
    found = {task: {length: 100 * mean(own) for length, own in rows.items()} for task, rows in by_task.items()}
    lengths = sorted({result.length for result in results})
    return found | {"mean": {length: mean([rows[length] for rows in found.values()]) for length in lengths}}


def table(found: Mapping[str, Mapping[int, float]]) -> str:
    """Return the readable form of the scores, like the paper's table 5."""
    width = max(map(len, found))
    lengths = list(found["mean"])
    lines = [f"{'task':<{width}}" + "".join(f"{length:>9}" for length in lengths)]
    lines += [f"{task:<{width}}" + "".join(f"{row[length]:>9.2f}" for length in lengths) for task, row in found.items()]
    return "\n".join(lines)


def tokens_of(text: str) -> int:
    """Parse a number of tokens such as 4096, 4k or 128k, k being 1024."""
    return int(text[:-1]) * 1024 if text.lower().endswith("k") else int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tools/evaluate.py ruler`; those that Megatron has bear its names."""
    add = parser.add_argument
    names = [*NEEDLES, *ESSAY_NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2"]
    add_model_arguments(parser)
    add("--lengths", nargs="+", type=tokens_of, default=[4096], metavar="N", help="tokens, as 4096 or 4k (4k)")
    add("--tasks", nargs="+", metavar="TASK", help=f"some of {', '.join(names)} (those that can be)")
    add("--samples", type=int, default=100, metavar="N", help="of each task and length (100; the benchmark has 500)")
    add("--seed", type=int, default=1234, metavar="N", help="of the samples (1234)")
    add("--haystack", type=Path, metavar="FILE", help="text between whose sentences needles are put")
    add("--squad", type=Path, metavar="FILE", help="SQuAD's JSON file, for qa_1")
    add("--hotpot", type=Path, metavar="FILE", help="HotpotQA's JSON file, for qa_2")
    add("--micro-batch-size", type=int, default=1, metavar="N", help="prompts computed at a time (1)")
    add("--output", metavar="FILE", help="write scores and answers as JSON")
    add_decoding_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run `tools/evaluate.py ruler`.

    Raises:
        UserError: something in the options is missing or does not fit the checkpoint.
    """
    layout = decoding_layout(options)
    check_positive(options, "samples", "micro_batch_size")
    check_output(options.output)
    check_directory(options.load, options.ckpt_step)
    tasks = chosen_tasks(options)
    extension, is_first = Extension.of(options), layout.rank == 0
    with (
        quiet(),
        opened(options.load, options.ckpt_step, options.tokenizer_model, extension, layout) as (loaded, tokenizer),
    ):
        results = measure(
            loaded,
            tokenizer,
            tasks,
            options.lengths,
            samples=options.samples,
            seed=options.seed,
            micro_batch_size=options.micro_batch_size,
            show=lambda line: print(line, file=sys.stderr, flush=True) if is_first else None,
        )
    if not is_first:
        return 0
    found = scores(results)
    print(table(found))
    if options.output:
        report = {"checkpoint": str(options.load), "scores": found, "results": [vars(result) for result in results]}
        write_file(Path(options.output), json.dumps(report, indent=2) + "\n")
    return 0


def chosen_tasks(options: argparse.Namespace) -> dict[str, Task]:
    """Return the tasks of the options.

    Raises:
        UserError: there is no such task, or it needs a file that is not given.
    """
    tasks = tasks_of(options.haystack, options.squad, options.hotpot)
    for name in options.tasks or ():
        if name not in tasks:
            if name in NEEDS:
                raise UserError(f"--tasks {name} needs {NEEDS[name]} FILE: add it")
            raise UserError(f"--tasks {name} is no task of RULER{nearest(name, [*tasks, *NEEDS])}")
    return {name: tasks[name] for name in options.tasks} if options.tasks else tasks
