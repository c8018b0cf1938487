"""Tasks of lm-evaluation-harness on local data: a checkpoint scores as transformers does with its export."""

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megagate.errors import UserError
from megagate.evaluate import harness
from tests.distributed import run_distributed
from tests.evaluate import runs

pytest.importorskip("lm_eval")

TASKS = {
    "own_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        "fewshot_split": "test",
        "num_fewshot": 1,
    },
    "own_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
    "own_generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{completion}}",
        "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["a"], "max_gen_toks": 6, "do_sample": False},
    },
}


def offline(folder: Path) -> None:
    """Keep Hugging Face's packages, which are imported after this, off the network and in a folder; on this rank."""
    os.environ |= {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def write_tasks(folder: Path, rows: list[dict[str, Any]]) -> None:
    import yaml

    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, "test_split": "test"} | source | task))


def rows() -> list[dict[str, Any]]:
    texts = runs.sentences(60, seed=8)
    return [
        {
            "question": texts[index],
            "choices": [" " + text for text in texts[20 + index : 24 + index]],
            "answer": index % 4,
            "text": " ".join(texts[index : index + 30 * (index % 2) + 1]),  # some are longer than the positions
            "completion": "?",
        }
        for index in range(12)
    ]


def export(folder: Path, out: Path) -> None:
    from megagate.checkpoint.convert import export_checkpoint

    export_checkpoint(folder, out)


def both(checkpoint: Path, exported: Path, folder: Path) -> list[dict[str, Any]]:
    """Return what the tool says of the checkpoint and of its export, then the harness's own model; on this rank.

    That one would score texts without a context after the begin-of-sequence token, which training has not seen.
    """
    offline(folder)
    found = []
    for load in (checkpoint, exported):
        output = folder / f"{load.name}.json"
        words = ["--load", str(load), "--tasks", *TASKS, "--task-path", str(folder), "--output", str(output)]
        assert harness.run(options_of([*words, "--micro-batch-size", "5"])) == 0
        found.append(json.loads(output.read_text())["tasks"])
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    model = HFLM(
        pretrained=str(exported), trust_remote_code=True, device="cpu", dtype="float32", batch_size=3, prefix_token_id=2
    )
    tasks = harness.load_tasks(list(TASKS), [folder])
    results = lm_eval.evaluate(model, tasks, bootstrap_iters=0, log_samples=True)
    found.append(
        {
            name: {key: value for key, value in scores.items() if isinstance(value, float) and "stderr" not in key}
            for name, scores in results["results"].items()
        }
    )
    found.append(results["samples"])
    generated = []
    for row in rows():
        prompt = model.tokenizer(row["question"], add_special_tokens=False, return_tensors="pt")["input_ids"]
        tokens = model.model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
        generated.append([token for token in tokens.tolist() if token != 2])
    found.append(generated)
    return found


def options_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    harness.add_arguments(parser)
    return parser.parse_args(words)


def answers(checkpoint: Path, folder: Path, generated: list[list[int]]) -> dict[str, list[Any]]:
    """Return the model's answers to each request of the tasks, in the harness's order; on this rank.

    Under "expected" are the texts of the tokens `generated` up to the stop; transformers decodes bytes otherwise.
    """
    import lm_eval

    from megagate.evaluate.directories import opened
    from megagate.evaluate.harness_model import language_model

    offline(folder)
    tasks = harness.load_tasks(list(TASKS), [folder])
    with opened(checkpoint) as (loaded, tokenizer):
        results = lm_eval.evaluate(language_model(loaded, tokenizer), tasks, bootstrap_iters=0, log_samples=True)
        expected = [tokenizer.detokenize(tokens).split("a")[0] for tokens in generated]
        drawn = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 5, "until": []}
        prompts = ["The sun", "A small old cat sees the", *["The sun"] * 3]
        requests = [SimpleNamespace(args=(prompt, drawn)) for prompt in prompts]
        one, many = (language_model(loaded, tokenizer, size).generate_until(requests) for size in (1, 4))
        assert one == many, "what is drawn depends on no other request"
        assert len(set(one)) == len(prompts)
        # Tasks may have the same settings, written in another order, and others that are sorted between them.
        kinds = [{"until": ["q"], "max_gen_toks": 5}, {"temperature": 0.0, "max_gen_toks": 2}]
        kinds.append({"do_sample": False, "temperature": 0.0} | kinds[0])
        kinds[0] |= {"do_sample": False, "temperature": 0.0}
        requests = [SimpleNamespace(args=("A small old cat", kind)) for kind in kinds]
        alone = [language_model(loaded, tokenizer).generate_until([request])[0] for request in requests]
        assert language_model(loaded, tokenizer).generate_until(requests) == alone
        assert all(alone)
        with pytest.raises(UserError, match=r"joins the answer 're' to the end of its question"):
            language_model(loaded, tokenizer)._loglikelihood_tokens([(("The", "re"), [5], [])])
    found = {name: [sample["resps"] for sample in samples] for name, samples in results["samples"].items()}
    return found | {"expected": expected}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder, rows())
    return folder


def test_a_checkpoint_scores_as_its_export_does_in_transformers(text_model: Path, tasks: Path) -> None:
    exported = tasks / "exported"
    run_distributed(export, 1, text_model, exported)
    ours, imported, theirs, samples, generated = run_distributed(both, 1, text_model, exported, tasks, timeout=300)[0]
    assert set(ours) == set(imported) == set(theirs) == set(TASKS)
    for name, scores in theirs.items():
        for found in (ours, imported):
            shared = {key: found[name][key] for key in scores}
            assert shared == pytest.approx(scores, rel=1e-4), name
    own = run_distributed(answers, 1, text_model, tasks, generated, timeout=300)[0]
    theirs_by_task = {name: [sample["resps"] for sample in found] for name, found in samples.items()}
    del theirs_by_task["own_generation"]
    expected = own.pop("expected")
    assert [text for ((text,),) in own["own_generation"]] == expected
    assert len(set(expected)) > 1
    for name, answers_of_task in theirs_by_task.items():
        assert numbers(own[name]) == pytest.approx(numbers(answers_of_task), rel=1e-4), name


def numbers(response: Any) -> list[float]:
    """Return all log-probabilities, and whether they are greedy, in their order."""
    if isinstance(response, list | tuple):
        return [value for part in response for value in numbers(part)]
    return [float(response == "True" if isinstance(response, str) and not response[-1].isdigit() else response)]


def refusal(words: list[str]) -> str:
    with pytest.raises(UserError) as refused:
        run_distributed(refused_in_rank, 1, words)
    return str(refused.value)


def refused_in_rank(words: list[str]) -> None:
    offline(Path(words[words.index("--task-path") + 1]))
    harness.run(options_of(words))


def test_tasks_that_cannot_be_are_refused(text_model: Path, tasks: Path) -> None:
    remote = "task: remote\ndataset_path: nobody/nothing\ntest_split: test\n"
    (tasks / "remote.yaml").write_text(remote + "output_type: generate_until\ndoc_to_text: x\ndoc_to_target: y\n")
    words = ["--load", str(text_model), "--task-path", str(tasks), "--tasks"]
    assert "the task remote cannot be loaded, whose data may be on the network only" in refusal([*words, "remote"])
    found = refusal([*words, "own_text", "--task-path", str(text_model / "none")])
    assert "none is no directory: give one with task files" in found
    assert "--limit must be positive" in refusal([*words, "own_text", "--limit", "0"])
    (tasks / "remote.yaml").unlink()


@pytest.mark.full
def test_another_name_is_no_task(text_model: Path, tasks: Path) -> None:
    """The harness looks through all of its files for it."""
    words = ["--load", str(text_model), "--task-path", str(tasks), "--tasks"]
    found = refusal([*words, "own_chioce"])
    assert "--tasks own_chioce is no task of the harness; did you mean own_choice" in found


def test_code_is_run_only_where_the_user_says_so() -> None:
    class Task:
        def get_config(self, key: str) -> bool:
            return key == "unsafe_code"

    with pytest.raises(UserError, match="give --confirm-run-unsafe-code"):
        harness.check_code({"tasks": {"humaneval": Task()}}, False)


@pytest.mark.full
def test_the_papers_tasks_are_the_harness_s() -> None:
    from lm_eval.tasks import TaskManager

    assert set(harness.PAPER) <= set(TaskManager().all_tasks)
