"""Texts continued token by token, in batches: what tools/generate.py, the harness and RULER do with a model.

What is generated for a prompt depends on the others in its batch by rounding only.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megagate.errors import UserError, reason
from megagate.evaluate.decoder import Decoder
from megagate.evaluate.extension import HINT
from megagate.evaluate.layout import of_first_rank
from megagate.evaluate.load import LoadedModel
from megagate.evaluate.sampling import Sampling

END, LENGTH, POSITIONS = "end of document", "length", "positions"
"""Why a continuation ends."""

CONTEXT = 16
"""Tokens of the prompt that new ones are decoded together with, since some tokenizers look at what stands before."""


@dataclass(frozen=True)
class Completion:
    """A prompt and what was generated for it."""

    prompt: str
    text: str
    """What follows the prompt."""
    prompt_tokens: list[int]
    tokens: list[int]
    """Generated, without the end of the document."""
    finish: str
    """`END`, `LENGTH` or `POSITIONS`."""


@dataclass
class Speed:
    """Tokens and seconds of a generation, without loading the model."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    """Until the first tokens are there, which the prompts' computation gives."""
    tokens: int = 0
    """Generated after the first of each prompt."""
    seconds: float = 0.0

    def __str__(self) -> str:
        prompts = self.prompt_tokens / max(self.prompt_seconds, 1e-9)
        text = f"{self.prompt_tokens} tokens of prompts at {prompts:.0f} tokens/s"
        return text + (
            f", {self.tokens} more generated at {self.tokens / self.seconds:.1f} tokens/s" if self.tokens else ""
        )


def check_length(prompt: Sequence[int], positions: int, name: str) -> None:
    """Raise UserError where a prompt leaves no position for a new token; `name` is the prompt's."""
    if len(prompt) >= positions:
        raise UserError(
            f"{name} has {len(prompt)} tokens, but the model has {positions} positions: leave one free, or {HINT}"
        )


def generate_tokens(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_of_document: int,
    vocabulary: int,
    sampling: Sampling | None = None,
    numbers: Sequence[int] | None = None,
    on_token: Callable[[int, list[int]], bool] | None = None,
    speed: Speed | None = None,
) -> list[tuple[list[int], str]]:
    """Continue a batch of prompts, and return for each the new tokens and why it ends.

    Args:
        loaded: the model.
        prompts: tokens, at least one and fewer than the model's positions.
        max_new_tokens: at most so many new tokens.
        end_of_document: the token at which a continuation ends; it is not returned.
        vocabulary: tokens of the tokenizer; others are never chosen.
        sampling: how to choose; greedy if None.
        numbers: of the prompts, which say what is drawn for each; from 0 if None.
        on_token: called with a row and its new tokens after each of them; a row for which it returns true ends.
        speed: what was computed is added to it.
    """
    sampling, speed = sampling or Sampling(), speed or Speed()
    generators = [sampling.generator(number) for number in (numbers or range(len(prompts)))]
    room = [min(max_new_tokens, loaded.args.max_position_embeddings - len(prompt)) for prompt in prompts]
    decoder = Decoder(loaded, prompts, max(room), end_of_document)
    tokens: list[list[int]] = [[] for _ in prompts]
    finish: list[str | None] = [None for _ in prompts]
    started, first_done = time.monotonic(), 0.0
    while True:
        logits = decoder.next_logits()[:, :vocabulary]
        chosen = of_first_rank(sampling.choose(logits, generators))
        for row, token in enumerate(chosen.tolist()):
            if finish[row] is not None:
                continue
            if token == end_of_document:
                finish[row] = END
                continue
            tokens[row].append(token)
            if len(tokens[row]) == room[row]:
                finish[row] = LENGTH if room[row] == max_new_tokens else POSITIONS
            if on_token is not None and on_token(row, tokens[row]):
                finish[row] = END
        first_done = first_done or time.monotonic()
        if all(end is not None for end in finish):
            break
        decoder.append(chosen)
    speed.prompt_tokens += sum(map(len, prompts))
    speed.prompt_seconds += first_done - started
    speed.tokens += sum(max(0, len(new) - 1) for new in tokens)
    speed.seconds += time.monotonic() - first_done
    return [(new, str(end)) for new, end in zip(tokens, finish, strict=True)]


class Text:
    """The text of new tokens after a prompt, of which more is known with each token."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._before = list(prompt[-CONTEXT:])
        self._prefix = tokenizer.detokenize(self._before)
        self._shown = 0

    def of(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens that follow the prompt."""
        text = self._tokenizer.detokenize([*self._before, *tokens])
        if not text.startswith(self._prefix):
            return self._tokenizer.detokenize(list(tokens))
        return text[len(self._prefix) :]

    def more(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """Return what has not been returned yet; a character of which bytes are missing waits for them."""
        text = self.of(tokens)
        if not is_last:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new


def complete(
    loaded: LoadedModel,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    micro_batch_size: int = 8,
    show: Callable[[str], None] = lambda text: None,
    speed: Speed | None = None,
) -> Iterator[Completion]:
    """Continue texts, in their order.

    Args:
        loaded: the model.
        tokenizer: the run's.
        prompts: any texts.
        max_new_tokens: at most so many new tokens for each.
        sampling: how to choose tokens; greedy if None.
        micro_batch_size: prompts that are computed at a time.
        show: given the text of prompts and continuations, piece by piece.
        speed: what was computed is added to it.

    Raises:
        UserError: a prompt has too many tokens, or cannot be tokenized.
    """
    encoded = [encode(tokenizer, prompt, number) for number, prompt in enumerate(prompts, 1)]
    for number, tokens in enumerate(encoded, 1):
        check_length(tokens, loaded.args.max_position_embeddings, f"prompt {number}")
    for first in range(0, len(prompts), micro_batch_size):
        batch = encoded[first : first + micro_batch_size]
        texts = [Text(tokenizer, tokens) for tokens in batch]

        def stream(row: int, tokens: list[int], text: Text = texts[0]) -> bool:
            if row == 0:
                show(text.more(tokens))
            return False

        show(prompts[first])
        found = generate_tokens(
            loaded,
            batch,
            max_new_tokens=max_new_tokens,
            end_of_document=tokenizer.eod,
            vocabulary=tokenizer.vocab_size,
            sampling=sampling,
            numbers=range(first, first + len(batch)),
            on_token=stream,
            speed=speed,
        )
        for row, (tokens, finish) in enumerate(found):
            prompt = prompts[first + row]
            show(("" if row == 0 else prompt) + texts[row].more(tokens, is_last=True) + "\n")
            yield Completion(prompt, texts[row].of(tokens), batch[row], tokens, finish)


def encode(tokenizer: Any, prompt: str, number: int) -> list[int]:
    """Return the tokens of a prompt; an empty one begins a document.

    Raises:
        UserError: the tokenizer refuses it; `number` says which prompt it is.
    """
    try:
        prompt.encode()
        return list(tokenizer.tokenize(prompt)) or [tokenizer.eod]
    except ValueError as error:  # half of a surrogate pair, which is no text; NullTokenizer, whose texts are numbers
        raise UserError(f"the tokenizer does not take prompt {number}: {reason(error)}; change it") from error
