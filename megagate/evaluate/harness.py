"""Tasks of lm-evaluation-harness on a checkpoint or a Hugging Face directory, and the paper's list of them.

    python tools/evaluate.py harness --load runs/mine/checkpoints --tasks paper --output scores.json
    python tools/evaluate.py harness --load runs/mine/checkpoints --tasks my_task --task-path my_tasks

The harness makes the prompts and the scores, from its own task files or those in --task-path; megagate's model answers,
under torchrun on tensor and expert parallel ranks. `paper` stands for `PAPER`, the tasks of arXiv 2505.06708,
section 3.1. The paper does not say how many examples stand before a question; the numbers here are ours.

The harness loads the tasks' data through Hugging Face's `datasets`, from the network or where its cache or the task
file says. HumanEval runs the code that the model writes, which needs --confirm-run-unsafe-code.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megagate.data.tokenizer import quiet
from megagate.errors import UserError, nearest, reason
from megagate.evaluate.directories import check_directory, opened
from megagate.evaluate.extension import Extension
from megagate.evaluate.load import LoadedModel
from megagate.evaluate.options import (
    add_decoding_arguments,
    add_model_arguments,
    check_output,
    check_positive,
    decoding_layout,
    write_file,
)

PAPER: dict[str, int] = {"hellaswag": 10, "mmlu": 5, "gsm8k": 5, "humaneval": 0, "ceval-valid": 5, "cmmlu": 5}
"""The paper's tasks by the harness's names -> examples before each question, which are ours."""

GROUP = "paper"
SEED = 1234
"""Of the examples that are drawn before a question; the harness's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tools/evaluate.py harness`; those that Megatron or the harness have bear their names."""
    add = parser.add_argument
    add_model_arguments(parser)
    add("--tasks", nargs="+", required=True, metavar="TASK", help=f"names of tasks; {GROUP}: {', '.join(PAPER)}")
    add("--task-path", nargs="+", type=Path, default=[], metavar="DIR", help="directories with further task files")
    add("--num-fewshot", type=int, metavar="N", help=f"examples before each question (the task's; {GROUP}: ours)")
    add("--limit", type=int, metavar="N", help="questions of each task at most (all)")
    add("--micro-batch-size", type=int, default=8, metavar="N", help="requests computed at a time (8)")
    add("--confirm-run-unsafe-code", action="store_true", help="run the code that the model writes")
    add("--output", metavar="FILE", help="write the results as JSON")
    add_decoding_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run `tools/evaluate.py harness`.

    Raises:
        UserError: something in the options or the tasks is missing or does not fit the checkpoint.
    """
    layout = decoding_layout(options)
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("tools/evaluate.py harness needs lm-evaluation-harness: pip install 'megagate[eval]'")
    check_positive(options, "micro_batch_size", "limit")
    check_output(options.output)
    check_directory(options.load, options.ckpt_step)
    with quiet():
        tasks = load_tasks(options.tasks, options.task_path, options.num_fewshot)
        check_code(tasks, options.confirm_run_unsafe_code)
        extension = Extension.of(options)
        with opened(options.load, options.ckpt_step, options.tokenizer_model, extension, layout) as (loaded, tokenizer):
            report = measure(loaded, tokenizer, tasks, limit=options.limit, micro_batch_size=options.micro_batch_size)
    if layout.rank > 0:
        return 0
    report["checkpoint"] = str(options.load)
    print(table(report["tasks"]))
    if options.output:
        write_file(Path(options.output), json.dumps(report, indent=2) + "\n")
    return 0


def load_tasks(names: Sequence[str], paths: Sequence[Path] = (), shots: int | None = None) -> dict[str, Any]:
    """Return tasks with their data, as the harness's `evaluate` takes them.

    Args:
        names: of tasks, groups and tags; `GROUP` stands for `PAPER`.
        paths: directories with further task files.
        shots: examples before each question; the task's own if None.

    Raises:
        UserError: there is no such task, or its data cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    for path in paths:
        if not path.is_dir():
            raise UserError(f"--task-path {path} is no directory: give one with task files")
    # The harness's own thousands of task files take it long to look through.
    manager = TaskManager(include_path=list(paths), include_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=list(paths) or None)
    wanted: dict[str, int | None] = {}
    for name in names:
        if name == GROUP:
            wanted |= {task: own if shots is None else shots for task, own in PAPER.items()}
        elif name in manager.all_tasks:
            wanted[name] = shots
        else:
            raise UserError(f"--tasks {name} is no task of the harness{nearest(name, [GROUP, *manager.all_tasks])}")
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name, number in wanted.items():
        print(f"loading the task {name}", file=sys.stderr, flush=True)
        try:
            found: Mapping[str, Any] = manager.load([name])
        except Exception as error:  # of datasets, huggingface_hub, pyarrow and the task's own code
            raise UserError(
                f"the task {name} cannot be loaded, whose data may be on the network only: {reason(error)[:300]}"
            ) from error
        for task in found["tasks"].values():
            if number is not None and task.get_config("num_fewshot") != 0:
                task.set_config(key="num_fewshot", value=number)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEED)
        for part, items in loaded.items():
            items |= found[part]
    return loaded


def check_code(tasks: Mapping[str, Any], is_confirmed: bool) -> None:
    """Allow tasks to run what the model writes, if the user has.

    Raises:
        UserError: a task wants it and the user has not.
    """
    if is_confirmed:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
        return
    for name, task in tasks["tasks"].items():
        if task.get_config("unsafe_code"):
            raise UserError(
                f"the task {name} runs the code that the model writes: give --confirm-run-unsafe-code where that "
                "can do no harm, or leave the task out"
            )


def measure(
    loaded: LoadedModel,
    tokenizer: Any,
    tasks: dict[str, Any],
    *,
    limit: int | None = None,
    micro_batch_size: int = 8,
) -> dict[str, Any]:
    """Return the harness's scores by task and group, as the JSON file has them.

    Args:
        loaded: the model.
        tokenizer: the run's.
        tasks: from `load_tasks`.
        limit: questions of each task at most.
        micro_batch_size: requests that are computed at a time.
    """
    import lm_eval

    from megagate.evaluate.harness_model import language_model

    model = language_model(loaded, tokenizer, micro_batch_size, SEED)
    results: Any = lm_eval.evaluate(
        model,
        tasks,
        limit=limit,
        bootstrap_iters=0,
        log_samples=False,
        confirm_run_unsafe_code=True,  # check_code has asked
    )
    scores = {
        name: {key: value for key, value in found.items() if isinstance(value, int | float) and "stderr" not in key}
        for name, found in (results["results"] | results.get("groups", {})).items()
    }
    shots = {name: task.get_config("num_fewshot") for name, task in tasks["tasks"].items()}
    return {"iteration": loaded.iteration, "tasks": scores, "num_fewshot": shots, "lm_eval": lm_eval.__version__}


def table(scores: Mapping[str, Mapping[str, float]]) -> str:
    """Return the readable form of the scores."""
    width = max(len("task"), *map(len, scores))
    lines = [f"{'task':<{width}}  {'metric':<28}  {'score':>8}"]
    for name, found in scores.items():
        lines += [f"{name:<{width}}  {key.removesuffix(',none'):<28}  {value:>8.4f}" for key, value in found.items()]
    return "\n".join(lines)
