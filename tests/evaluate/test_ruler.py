"""RULER's texts have the length that was asked for and the answers in them; scores are the benchmark's."""

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from megagate.errors import UserError
from megagate.evaluate.ruler import command
from megagate.evaluate.ruler.sample import make_sample, match_all, match_part
from tests.distributed import run_distributed
from tests.evaluate import runs

ESSAY = "It was late. The river was wide, and nobody had crossed it. Why should we? We did!"
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"The answer of paragraph {number} is fish{number}.",
                    "qas": [{"question": f"What is in {number}?", "answers": [{"text": f"fish{number}"}]}],
                }
                for number in range(30)
            ]
        }
    ]
}
HOTPOT = [
    {
        "question": f"Who made {number}?",
        "answer": f"bird{number}",
        "context": [["T", [f"bird{number} made it.", " So."]]],
    }
    for number in range(30)
]
NAMES = (
    "niah_single_1 niah_single_2 niah_single_3 niah_multikey_1 niah_multikey_2 niah_multikey_3 niah_multivalue "
    "niah_multiquery vt cwe fwe qa_1 qa_2"
).split()
"""The benchmark's 13 tasks."""


def count(text: str) -> int:
    """Return the tokens of a text: words, and signs alone."""
    return len(re.findall(r"\w+|[^\w\s]|\n", text))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("ruler")
    for name, content in (("essay", ESSAY), ("squad", json.dumps(SQUAD)), ("hotpot", json.dumps(HOTPOT))):
        (folder / name).write_text(content)
    return command.tasks_of(folder / "essay", folder / "squad", folder / "hotpot")


def test_all_of_the_benchmarks_tasks_are_there(tasks: dict) -> None:
    assert sorted(tasks) == sorted(NAMES)
    assert not set(command.NEEDS) & set(command.tasks_of())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1024, 5000])
def test_samples_are_as_long_as_fits_and_hold_their_answers(name: str, length: int, tasks: dict) -> None:
    for index in range(3):
        sample = make_sample(tasks[name], name, length, 7, index, count)
        assert sample.tokens == count(sample.prompt) + sample.room <= length
        largest_unit = 160 if name == "cwe" and length > 4096 else 80  # one word more stands there some times
        assert sample.tokens > length - largest_unit, "one more unit would exceed it"
        before_question = sample.prompt[: sample.prompt.rindex("Question" if name == "vt" else "?")]
        assert all(answer in before_question for answer in sample.answers)
        assert sample == make_sample(tasks[name], name, length, 7, index, count)
        assert sample.prompt != make_sample(tasks[name], name, length, 8, index, count).prompt
    assert len({make_sample(tasks[name], name, length, 7, index, count).prompt for index in range(3)}) == 3


def test_needles_are_what_is_asked_for(tasks: dict) -> None:
    for name, answers in (
        ("niah_multivalue", 4),
        ("niah_multiquery", 4),
        ("niah_multikey_1", 1),
        ("niah_multikey_3", 1),
    ):
        sample = make_sample(tasks[name], name, 2000, 1, 0, count)
        found = dict[str, list[str]]()
        for key, value in re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", sample.prompt):
            found.setdefault(key, []).append(value)
        asked = re.search(r"special magic \w+ for ([^?]+) mentioned", sample.prompt.rpartition("What ")[2])
        assert asked is not None
        keys = re.split(r", and |, ", asked[1])
        assert sorted(value for key in keys for value in found[key]) == sorted(sample.answers)
        assert len(sample.answers) == answers
        assert len(found) >= 4 or name == "niah_multivalue"
        assert "following text. Make sure to memorize it. I will quiz you about the" in sample.prompt


def test_paragraphs_of_the_same_article_distract_first(tmp_path: Path) -> None:
    def paragraph(article: int, number: int) -> dict:
        answer = f"fish{article}{number}"
        question = {"question": f"What is {article} {number}?", "answers": [{"text": answer}]}
        return {"context": f"There is {answer}.", "qas": [question]}

    articles = [{"paragraphs": [paragraph(article, number) for number in range(4)]} for article in range(3)]
    (tmp_path / "squad").write_text(json.dumps({"data": articles}))
    task = command.tasks_of(squad_file=tmp_path / "squad")["qa_1"]
    for index in range(5):
        sample = make_sample(task, "qa_1", 175, 1, index, count)
        articles_in = Counter(re.findall(r"There is fish(\d)\d\.", sample.prompt))
        assert articles_in[sample.answers[0][4]] == 4
        assert articles_in.total() > 4


def test_a_text_that_cannot_be_is_refused_before_any_other_is_answered(tasks: dict) -> None:
    loaded, tokenizer = SimpleNamespace(args=SimpleNamespace(max_position_embeddings=4096)), SimpleNamespace(eod=0)
    tokenizer.tokenize = str.split
    wanted = {"niah_single_1": tasks["niah_single_1"], "long": lambda rng, length: command_draft("x", "word " * length)}
    with pytest.raises(UserError, match=r"a sample of long has .* tokens at least, .* or other --tasks"):
        command.measure(loaded, tokenizer, wanted, [1024, 2048], samples=1)


def test_variables_form_the_chain(tasks: dict) -> None:
    sample = make_sample(tasks["vt"], "vt", 1500, 1, 0, count)
    text = sample.prompt[sample.prompt.rindex("Memorize") :]
    value = re.search(r"assigned the value (\d+) in the text", text)
    assert value is not None
    holders = re.findall(rf"VAR (\w+) = {value[1]}", text)
    for _ in range(4):
        holders += re.findall(rf"VAR (\w+) = VAR {holders[-1]}\b", text)
    assert holders == sample.answers
    assert len(holders) == 5


@pytest.mark.parametrize("length", [1500, 6000])
def test_the_common_and_frequent_words_are_the_most_common(length: int, tasks: dict) -> None:
    sample = make_sample(tasks["cwe"], "cwe", length, 1, 0, count)
    words = Counter(re.findall(r"\d+\. (\w+)", sample.prompt[sample.prompt.rindex("Below is") :]))
    assert {word for word, _ in words.most_common(10)} == set(sample.answers)
    often, seldom = (6, 1) if length < 4096 else (30, 3)
    assert set(words.values()) == {often, seldom}
    sample = make_sample(tasks["fwe"], "fwe", length, 1, 0, count)
    words = Counter(re.findall(r"\b[a-z]{6}\b", sample.prompt.partition("coded words. ")[2].partition("\n")[0]))
    assert [word for word, _ in words.most_common(3)] == sample.answers


def test_scores_are_those_of_the_benchmark() -> None:
    assert match_all("It is 12 and ABC", ["12", "abc", "x", "y"]) == 0.5
    assert match_part("It is 12", ["13", "12"]) == 1
    assert match_part("It is 12", ["13"]) == 0
    results = [
        command.Result("vt", 1024, 1000, ["a"], "a", 1.0),
        command.Result("vt", 1024, 1000, ["a"], "b", 0.0),
        command.Result("cwe", 1024, 1000, ["a"], "a", 1.0),
    ]
    found = command.scores(results)
    assert found == {"vt": {1024: 50.0}, "cwe": {1024: 100.0}, "mean": {1024: 75.0}}
    assert command.table(found).splitlines()[-1].split() == ["mean", "75.00"]


def options_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def run_tool(words: list[str]) -> int:
    return command.run(options_of(words))


def cheating(checkpoint: Path, gives: str, wanted: str) -> float:
    """Return the score of a model whose head is changed to spell a text again and again; on this rank."""
    from megagate.evaluate.directories import opened

    with opened(checkpoint) as (loaded, tokenizer):
        tokens = tokenizer.tokenize(gives)
        step = iter(range(10**6))

        def head(_, inputs, output):
            output[0][..., tokens[next(step) % len(tokens)]] += 1e4

        loaded.model.output_layer.register_forward_hook(head)
        task = {"fish": lambda rng, length: command_draft(wanted)}
        results = command.measure(loaded, tokenizer, task, [runs.TEXT_LENGTH, runs.TEXT_LENGTH], samples=2)
    assert len(results) == 2, "a length that is named twice is measured once"
    return command.scores(results)["mean"][runs.TEXT_LENGTH]


def command_draft(answer: str, question: str = "what?"):
    from megagate.evaluate.ruler.sample import Draft

    return Draft(lambda units: "the sun " * units + question, [answer], room=32)


def test_a_model_that_knows_scores_and_one_that_does_not_does_not(text_model: Path) -> None:
    assert run_distributed(cheating, 1, text_model, " moon 7", "moon 7")[0] == 100
    assert run_distributed(cheating, 1, text_model, " moon 7", "moon 8")[0] == 0


def refusal(words: list[str]) -> str:
    with pytest.raises(UserError) as refused:
        run_distributed(run_tool, 1, words)
    return str(refused.value)


def test_what_cannot_be_is_refused(text_model: Path, tmp_path: Path) -> None:
    words = ["--load", str(text_model)]
    found = refusal([*words, "--lengths", "4k"])
    assert "--lengths 4096 is more than the 128 positions of the model" in found
    assert "tokens at least, with 128 for its answer" in refusal([*words, "--lengths", "128"])
    assert "--tasks qa_1 needs --squad FILE" in refusal([*words, "--tasks", "qa_1"])
    assert "--tasks vtt is no task of RULER; did you mean vt" in refusal([*words, "--tasks", "vtt"])
    assert "cannot read --haystack" in refusal([*words, "--haystack", str(tmp_path / "none")])
    (tmp_path / "empty").write_text("{}")
    assert "is not what the data set's own file is like" in refusal([*words, "--squad", str(tmp_path / "empty")])
    assert "--samples must be positive" in refusal([*words, "--samples", "0"])


def test_files_with_nothing_in_them(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(" ")
    with pytest.raises(UserError, match=r"--haystack .* holds no text: give a file with sentences"):
        command.tasks_of(haystack=path)
    path.write_text('{"data": []}')
    with pytest.raises(UserError, match=r"--squad .* holds no question: give the data set's own file"):
        command.tasks_of(squad_file=path)


def test_lengths_in_k() -> None:
    assert [command.tokens_of(text) for text in ("4096", "4k", "128K")] == [4096, 4096, 131072]
