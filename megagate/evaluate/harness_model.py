"""A checkpoint as lm-evaluation-harness knows models: what it asks, answered by megagate's own model.

`language_model` returns an object of the harness's `TemplateLM`, which splits contexts and continuations as for every
other model. The class is made inside the function, since the harness is an optional package.
"""

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from megagate.errors import UserError
from megagate.evaluate.generation import Text, generate_tokens
from megagate.evaluate.load import LoadedModel
from megagate.evaluate.sampling import Sampling
from megagate.evaluate.scores import Pair, continuation_scores

MAX_NEW_TOKENS = 256
"""Where a task does not say, as in the harness."""

PROGRESS_SECONDS = 5.0


def language_model(loaded: LoadedModel, tokenizer: Any, micro_batch_size: int = 8, seed: int = 1234) -> Any:
    """Return the harness's language model for a checkpoint.

    Texts without a context are scored after the end-of-document token, as documents are in training. Sampling, where a
    task wants it, draws by `seed`.

    Args:
        loaded: the model.
        tokenizer: the run's.
        micro_batch_size: requests that are computed at a time.
        seed: of what is drawn.
    """
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

    positions = loaded.args.max_position_embeddings

    class MegagateLM(TemplateLM):
        """Scores and continues text with the loaded model."""

        @property
        def eot_token_id(self) -> int:
            return tokenizer.eod

        @property
        def tokenizer_name(self) -> str:
            return str(loaded.args.tokenizer_model)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return list(tokenizer.tokenize(string))

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
        ) -> list[tuple[float, bool]]:
            pairs: list[Pair] = [(context, continuation) for _, context, continuation in requests]
            for texts, _context, continuation in requests:
                if not continuation:
                    raise UserError(
                        f"the tokenizer joins the answer {texts[1]!r} to the end of its question, so that no token is "
                        "left to score: let the task put a space between them (target_delimiter), or leave it out"
                    )
            found: list[Any] = [None] * len(pairs)
            scores = continuation_scores(
                loaded, pairs, micro_batch_size=micro_batch_size, end_of_document=tokenizer.eod
            )
            for number, score, is_greedy in _shown(scores, len(pairs), "requests scored"):
                found[number] = (score, is_greedy)
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], found[number])
            return found

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            windows, owners = [], []
            for number, (text,) in enumerate(request.args for request in requests):
                for pair in utils.get_rolling_token_windows(self.tok_encode(text), tokenizer.eod, positions, 1):
                    windows.append((None, *utils.make_disjoint_window(pair)))
                    owners.append(number)
            totals = [0.0] * len(requests)
            for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
                totals[owner] += score
            return totals

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            asked = [(request.args[0], normalize_gen_kwargs(request.args[1], MAX_NEW_TOKENS)) for request in requests]
            order = sorted(range(len(asked)), key=lambda number: (repr(asked[number][1]), -len(asked[number][0])))
            found = [""] * len(asked)
            for number, text in _shown(self._generated(asked, order), len(asked), "texts generated"):
                found[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
            return found

        def _generated(self, asked: Sequence[tuple[str, Any]], order: list[int]) -> Iterator[tuple[int, str]]:
            groups = itertools.groupby(order, key=lambda number: repr(asked[number][1]))
            for numbers in itertools.chain.from_iterable(itertools.batched(own, micro_batch_size) for _, own in groups):
                wanted = asked[numbers[0]][1]
                room = min(wanted["max_gen_toks"], positions - 1)
                prompts = [
                    (self.tok_encode(asked[number][0]) or [tokenizer.eod])[room - positions :] for number in numbers
                ]
                texts = [Text(tokenizer, prompt) for prompt in prompts]
                stops = [stop for stop in wanted["until"] if stop]

                def is_over(row: int, tokens: list[int], texts: Any = texts, stops: Any = stops) -> bool:
                    return bool(stops) and any(stop in texts[row].of(tokens) for stop in stops)

                rows = generate_tokens(
                    loaded,
                    prompts,
                    max_new_tokens=room,
                    end_of_document=tokenizer.eod,
                    vocabulary=tokenizer.vocab_size,
                    sampling=_sampling(wanted, seed),
                    numbers=numbers,
                    on_token=is_over,
                )
                for number, text, (tokens, _) in zip(numbers, texts, rows, strict=True):
                    yield number, postprocess_generated_text(text.of(tokens), stops, None)

    return MegagateLM()


def _sampling(wanted: Any, seed: int) -> Sampling:
    if not wanted.get("do_sample") or not wanted.get("temperature"):
        return Sampling()
    return Sampling(wanted["temperature"], wanted.get("top_k") or 0, wanted.get("top_p") or 1.0, seed)


def _shown(results: Iterator[Any], total: int, what: str) -> Iterator[Any]:
    """Pass results on, with a line on standard error every `PROGRESS_SECONDS`."""
    shown = time.monotonic()
    for done, result in enumerate(results, 1):
        yield result
        if time.monotonic() - shown >= PROGRESS_SECONDS and os.environ.get("RANK", "0") == "0":
            shown = time.monotonic()
            print(f"{done} of {total} {what}", file=sys.stderr, flush=True)
