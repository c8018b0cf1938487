"""Questions about one of many paragraphs: RULER's question answering, from local files of SQuAD and HotpotQA."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megagate.errors import UserError, reason
from megagate.evaluate.ruler.sample import Draft, Task


@dataclass(frozen=True)
class Question:
    """A question and the paragraphs that answer it."""

    text: str
    answers: list[str]
    paragraphs: list[str]
    related: list[str] = field(default_factory=list)
    """Others of the same article, which distract most and come first."""


def squad(content: Any) -> list[Question]:
    """Return the questions of SQuAD's file that have an answer."""
    found = []
    for article in content["data"]:
        contexts = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = paragraph["context"]
            related = [context for context in contexts if context != own]
            found += [
                Question(question["question"], [answer["text"] for answer in question["answers"]], [own], related)
                for question in paragraph["qas"]
                if question["answers"]
            ]
    return found


def hotpot(content: Any) -> list[Question]:
    """Return the questions of HotpotQA's file; its distracting paragraphs come along."""
    return [
        Question(one["question"], [one["answer"]], [f"{title}\n{''.join(text)}" for title, text in one["context"]])
        for one in content
    ]


def question_task(path: Path, flag: str, read: Callable[[Any], list[Question]]) -> Task:
    """Return the task of a file.

    Raises:
        UserError: the file cannot be read, or has another form.
    """
    try:
        questions = read(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{flag} {path} is not what the data set's own file is like: {reason(error)}") from error
    if not questions:
        raise UserError(f"{flag} {path} holds no question: give the data set's own file")
    paragraphs = list(dict.fromkeys(text for question in questions for text in question.paragraphs))
    return partial(_draw, questions=questions, paragraphs=paragraphs)


def _draw(rng: random.Random, length: int, *, questions: Sequence[Question], paragraphs: Sequence[str]) -> Draft:
    question = rng.choice(questions)
    related = rng.sample(question.related, len(question.related))
    near = {*question.paragraphs, *related}
    distant = [text for text in paragraphs if text not in near]
    rng.shuffle(distant)
    others = related + distant
    seed = rng.getrandbits(64)

    def render(units: int) -> str:
        texts = [*question.paragraphs, *(others[index % len(others)] for index in range(units if others else 0))]
        texts += [""] * (units if not others else 0)
        random.Random(seed).shuffle(texts)
        documents = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(texts, 1))
        instruction = "Answer the question based on the given documents. Only give me the answer and do not output any "
        return (
            f"{instruction}other words.\n\nThe following are given documents.\n\n{documents}\n\n{instruction}other "
            f"words.\n\nQuestion: {question.text} Answer:"
        )

    return Draft(render, question.answers, room=32)
