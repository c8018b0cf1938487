"""A question about a text as long as a number of tokens allows, with the tokens counted."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from megagate.errors import UserError


@dataclass(frozen=True)
class Draft:
    """A question whose text can be of any length; everything random in it is drawn."""

    render: Callable[[int], str]
    """The prompt with so many units of what makes it long; the more, the longer."""
    answers: list[str]
    room: int
    """Tokens of the answer at most."""
    fewest: int = 0
    """Units that the question needs."""


@dataclass(frozen=True)
class Sample:
    """A prompt and the answers to find."""

    prompt: str
    answers: list[str]
    room: int
    tokens: int
    """Of the prompt and the room for the answer together."""


Task = Callable[[random.Random, int], Draft]
"""Draws a question; the length in tokens decides about some sizes."""


def fitting_draft(task: Task, name: str, length: int, seed: int, index: int, count: Callable[[str], int]) -> Draft:
    """Draw the question of a sample, and check that its shortest text fits into the length; arguments as below.

    Raises:
        UserError: the length is too short for the question.
    """
    draft = task(random.Random(f"{seed} {name} {length} {index}"), length)
    shortest = count(draft.render(draft.fewest)) + draft.room
    if shortest > length:
        raise UserError(
            f"a sample of {name} has {shortest} tokens at least, with {draft.room} for its answer, which is more than "
            f"the length {length}: give a longer one in --lengths, or other --tasks"
        )
    return draft


def make_sample(task: Task, name: str, length: int, seed: int, index: int, count: Callable[[str], int]) -> Sample:
    """Draw a question and make its text as long as fits: one more unit would exceed the length.

    Args:
        task: what to draw.
        name: of the task.
        length: tokens of prompt and answer together at most.
        seed: with name, length and index it determines the sample.
        index: of the sample.
        count: returns the tokens of a text.

    Raises:
        UserError: the length is too short for the question.
    """
    draft = fitting_draft(task, name, length, seed, index, count)

    def tokens(units: int) -> int:
        return count(draft.render(units)) + draft.room

    fits, exceeds = draft.fewest, draft.fewest + 1
    while tokens(exceeds) <= length:
        fits, exceeds = exceeds, 2 * exceeds
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        fits, exceeds = (middle, exceeds) if tokens(middle) <= length else (fits, middle)
    return Sample(draft.render(fits), draft.answers, draft.room, tokens(fits))


def match_all(prediction: str, answers: list[str]) -> float:
    """Return the share of the answers that occur in a prediction, whatever their case."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


def match_part(prediction: str, answers: list[str]) -> float:
    """Return 1 if one of the answers occurs in a prediction, whatever its case, else 0."""
    return float(any(answer.lower() in prediction.lower() for answer in answers))
