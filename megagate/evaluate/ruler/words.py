"""Common words and frequent words: RULER's aggregation tasks, with words made of syllables and letters."""

import random
import string

from megagate.evaluate.ruler.needles import distinct, word
from megagate.evaluate.ruler.sample import Draft

COMMON = 10
SHORT = 4096
"""Tokens below which words are repeated less, as in the benchmark."""
ALPHA = 2.0
"""Of the zeta distribution of frequent words."""


def common_words(rng: random.Random, length: int) -> Draft:
    """Draw a numbered list in which ten words stand more often than the others, and ask for them.

    A short example with its answer stands before it. The units are the words that stand less often.
    """
    often, seldom = (6, 1) if length < SHORT else (30, 3)
    example_sizes = (20, 3, 1) if length < SHORT else (40, 10, 3)
    seed = rng.getrandbits(64)
    words = distinct(rng, word, example_sizes[0] + COMMON)
    common, others = words[:COMMON], words[COMMON:]
    example = _numbered(rng, others[:COMMON], others[COMMON:], *example_sizes[1:])
    first = _ask_common(example) + " " + _answer(others[:COMMON]) + "\n"

    def render(units: int) -> str:
        own = random.Random(seed)
        uncommon = [other for other in distinct(own, word, units + COMMON) if other not in common][:units]
        return first + _ask_common(_numbered(own, common, uncommon, often, seldom))

    return Draft(render, common, room=120)


def _numbered(rng: random.Random, common: list[str], uncommon: list[str], often: int, seldom: int) -> str:
    words = common * often + uncommon * seldom
    rng.shuffle(words)
    return _answer(words)


def _answer(words: list[str]) -> str:
    return " ".join(f"{number}. {one}" for number, one in enumerate(words, 1))


def _ask_common(text: str) -> str:
    return (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
        f"that appear most often.\n{text}\nQuestion: What are the 10 most common words in the above list? Answer: The "
        "top 10 words that appear most often in the list are:"
    )


def frequent_words(rng: random.Random, length: int) -> Draft:
    """Draw words of six letters of which the k-th most frequent has a share of k^-2, and ask for the first three.

    The most frequent is "...", which does not count. The units are the words of the text.
    """
    vocabulary = distinct(rng, lambda own: "".join(own.choices(string.ascii_lowercase, k=6)), max(10, length // 50))
    seed = rng.getrandbits(64)
    total = sum(rank**-ALPHA for rank in range(1, len(vocabulary) + 2))

    def render(units: int) -> str:
        words: list[str] = []
        for rank, one in enumerate(["...", *vocabulary], 1):
            words += [one] * round(units * rank**-ALPHA / total)
        random.Random(seed).shuffle(words)
        return (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' '.join(words)}\nQuestion: Do not provide any explanation. Please ignore the "
            "dots '....'. What are the three most frequently appeared words in the above coded text? Answer: According "
            "to the coded text above, the three most frequently appeared words are:"
        )

    return Draft(render, vocabulary[:3], room=50, fewest=100)
