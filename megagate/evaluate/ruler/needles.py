"""Needles in a haystack, and variables to follow: RULER's retrieval and multi-hop tasks.

The wording and the sizes are the benchmark's. Its keys are English adjectives and nouns; here they are words made of
syllables, so that no list is needed.
"""

import itertools
import random
import re
import string
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from megagate.evaluate.ruler.sample import Draft

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {values} for {key} is: {value}."
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"


def word(rng: random.Random, syllables: int = 3) -> str:
    """Return a word that nobody knows."""
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(syllables))


def distinct(rng: random.Random, draw: Callable[[random.Random], str], count: int) -> list[str]:
    """Return `count` different drawn texts."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)


def _number(rng: random.Random) -> str:
    return str(rng.randint(10**6, 10**7 - 1))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _key(rng: random.Random) -> str:
    return f"{word(rng)}-{word(rng, 2)}"


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a text, with single spaces in them."""
    return re.split(r"(?<=[.!?]) ", " ".join(text.split()))


def needle(
    rng: random.Random,
    length: int,
    *,
    haystack: Sequence[str] | None = None,
    of_needles: bool = False,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    key: Callable[[random.Random], str] = _key,
    value: Callable[[random.Random], str] = _number,
    kind: str = "number",
) -> Draft:
    """Draw needles "One of the special magic numbers for KEY is: VALUE." and ask for all values of some keys.

    Args:
        rng: what is drawn comes from it.
        length: not used.
        haystack: the sentences between the needles, repeated as need be; the benchmark's noise if None.
        of_needles: let the haystack be needles with other keys.
        keys: how many keys there are.
        values: how many values each key has.
        queries: how many keys are asked for.
        key: draws a key.
        value: draws a value.
        kind: what a value is.
    """
    names = distinct(rng, key, max(keys, queries))
    found = {name: distinct(rng, value, values) for name in names}
    needles = [NEEDLE.format(values=f"{kind}s", key=name, value=one) for name, own in found.items() for one in own]
    rng.shuffle(needles)
    places = sorted(rng.random() for _ in needles)
    chosen = rng.sample(names, queries)
    others = rng.getrandbits(64)
    plural = "s" if queries * values > 1 else ""
    asked = chosen[0] if queries == 1 else ", ".join(chosen[:-1]) + f", and {chosen[-1]}"
    is_are = "are" if plural else "is"
    introduction = (
        f"{'Some' if plural else 'A'} special magic {kind}{plural} {is_are} hidden within the following text. Make "
        f"sure to memorize it. I will quiz you about the {kind}{plural} afterwards.\n"
    )
    question = (
        f"\nWhat {is_are} {'all ' if plural else ''}the special magic {kind}{plural} for {asked} mentioned in the "
        f"provided text? The special magic {kind}{plural} for {asked} mentioned in the provided text {is_are}"
    )

    def render(units: int) -> str:
        if of_needles:
            own = random.Random(others)
            lines = [NEEDLE.format(values=f"{kind}s", key=key(own), value=value(own)) for _ in range(units)]
        elif haystack is None:
            lines = [NOISE] * units
        else:
            lines = [haystack[index % len(haystack)] for index in range(units)]
        for inserted, (place, text) in enumerate(zip(places, needles, strict=True)):
            lines.insert(int(place * (units + 1)) + inserted, text)
        return introduction + (" " if haystack is not None and not of_needles else "\n").join(lines) + question

    return Draft(render, [one for name in chosen for one in found[name]], room=128)


NEEDLES = {
    # Name -> arguments of `needle`; ESSAY stands for a haystack that the user gives.
    "niah_single_1": partial(needle),
    "niah_multikey_2": partial(needle, of_needles=True),
    "niah_multikey_3": partial(needle, of_needles=True, key=_uuid, value=_uuid, kind="uuid"),
}
"""Needles that need no text of the user's."""

ESSAY_NEEDLES = {
    "niah_single_2": partial(needle),
    "niah_single_3": partial(needle, value=_uuid, kind="uuid"),
    "niah_multikey_1": partial(needle, keys=4),
    "niah_multivalue": partial(needle, values=4),
    "niah_multiquery": partial(needle, queries=4),
}
"""Needles between the sentences of a text."""

CHAINS, HOPS = 1, 4


def variable_tracking(rng: random.Random, length: int) -> Draft:
    """Draw a chain of assignments "VAR A = 12345", "VAR B = VAR A", ... and ask for all variables of that value.

    A short example with its answer stands before it, as in the benchmark.
    """
    example, answer = _assignments(rng, 3)
    chain, answers = _assignments(rng, 5)
    places = sorted(rng.random() for _ in chain.lines)
    first = chain.ask(_between(example.lines, [0.2, 0.3, 0.5, 0.7, 0.9], 5), example.value, " ".join(answer)) + "\n\n"

    def render(units: int) -> str:
        return first + chain.ask(_between(chain.lines, places, units), chain.value, "").rstrip()

    return Draft(render, answers, room=30)


class _Chain:
    """Assignments of one value."""

    def __init__(self, lines: list[str], value: str) -> None:
        self.lines, self.value = lines, value

    @staticmethod
    def ask(text: str, value: str, answer: str) -> str:
        """Return the question about a text, and the answer as it begins."""
        return (
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            f"{text}\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: "
            f"According to the chain(s) of variable assignment in the text above, {HOPS + 1} variables are assigned "
            f"the value {value}, they are: {answer}"
        )


def _assignments(rng: random.Random, letters: int) -> tuple[_Chain, list[str]]:
    def name(own: random.Random) -> str:
        return "".join(own.choices(string.ascii_uppercase, k=letters))

    names, value = distinct(rng, name, HOPS + 1), str(rng.randint(10000, 99999))
    lines = [f"VAR {names[0]} = {value}"]
    lines += [f"VAR {after} = VAR {before}" for before, after in itertools.pairwise(names)]
    return _Chain(lines, value), names


def _between(lines: list[str], places: Sequence[float], units: int) -> str:
    """Return lines at their places in `units` lines of noise."""
    text = [NOISE] * units
    for inserted, (place, line) in enumerate(zip(places, lines, strict=True)):
        text.insert(int(place * (units + 1)) + inserted, line)
    return "\n".join(text)
