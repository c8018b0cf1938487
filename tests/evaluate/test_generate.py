"""tools/generate.py: greedy and sampled continuations are those that the model's own logits give."""

import argparse
import io
import json
import math
import subprocess
import sys
import unittest.mock
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megagate.checkpoint.load import checkpoint_arguments
from megagate.errors import UserError
from megagate.evaluate import decoder, generate, generation
from megagate.evaluate.layout import Layout
from megagate.evaluate.load import check_tokenizer, find_checkpoint
from megagate.evaluate.sampling import Sampling
from tests.distributed import ROOT, run_distributed
from tests.evaluate import runs

PROMPTS = ["5 7 2 9 1 4", "8", "1 1 2 3"]
NEW = 12


def options_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    return parser.parse_args(words)


def run_tool(words: list[str]) -> int:
    """Run the tool on this rank."""
    return generate.run(options_of(words))


def completions(words: list[str], output: Path) -> list[dict]:
    """Run the tool and return its JSON lines."""
    words = [*words, "--max-new-tokens", str(NEW), "--output", str(output)]
    assert run_distributed(run_tool, 1, words) == [0]
    return [json.loads(line) for line in output.read_text().splitlines()]


def greedy(folder: Path, end_of_document: int) -> list[list[int]]:
    """Return the most probable tokens, each from the full forward pass over all before it; on this rank."""
    from megagate.evaluate.load import load_model

    found = []
    with load_model(folder) as loaded:
        for prompt in PROMPTS:
            tokens = [int(word) for word in prompt.split()]
            length = len(tokens)
            while len(tokens) < length + NEW:
                positions = torch.arange(len(tokens))[None]
                logits = loaded.model(torch.tensor([tokens]), positions, None)[0, -1]
                chosen = int(logits[: runs.VOCABULARY].argmax())
                if chosen == end_of_document:
                    break
                tokens.append(chosen)
            found.append(tokens[length:])
    return found


def test_greedy_tokens_are_the_most_probable_of_the_full_forward(checkpoints, tmp_path):
    folder = checkpoints("headwise")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'"{PROMPTS[0]}"\n\n{{"prompt": "{PROMPTS[1]}"}}\n"{PROMPTS[2]}"\n')
    (expected,) = run_distributed(greedy, 1, folder, runs.VOCABULARY - 1)
    together = completions(["--load", str(folder), "--prompt-file", str(prompts)], tmp_path / "together")
    alone = completions(["--load", str(folder), "--prompt", *PROMPTS, "--micro-batch-size", "1"], tmp_path / "alone")
    assert together == alone
    assert [found["prompt"] for found in together] == PROMPTS
    assert [found["tokens"] for found in together] == expected
    assert [found["text"].split() for found in together] == [[str(token) for token in row] for row in expected]


def test_what_is_drawn_depends_on_the_seed_and_on_no_other_prompt(checkpoints, tmp_path):
    words = ["--load", str(checkpoints("headwise")), "--prompt", *PROMPTS, "--temperature", "1.5", "--top-p", "0.95"]
    first = completions([*words, "--seed", "1"], tmp_path / "first")
    assert completions([*words, "--seed", "1", "--micro-batch-size", "2"], tmp_path / "again") == first
    assert completions([*words, "--seed", "2"], tmp_path / "other") != first


def test_generation_ends_with_the_document_or_the_positions(checkpoints, tmp_path):
    """Nothing but the end of the document is probable after a hook on the head says so."""
    prompt = " ".join(["2"] * (runs.SEQ_LENGTH - 5))
    (found,) = completions(["--load", str(checkpoints("headwise")), "--prompt", prompt], tmp_path / "positions")
    assert (found["finish"], len(found["tokens"])) == ("positions", 5) or found["finish"] == "end of document"
    ends = run_distributed(forced_end, 1, checkpoints("headwise"))[0]
    assert ends == [([], "end of document"), ([6, 6, 6], "length")]


def forced_end(folder: Path) -> list[tuple[list[int], str]]:
    """Let the head prefer the end of the document for the first row, the token 6 for the second; on this rank."""
    from megagate.evaluate.load import load_model

    with load_model(folder) as loaded:

        def head(_, inputs, output):
            output[0][..., 0, runs.VOCABULARY - 1] += 1e3
            output[0][..., 1, 6] += 1e3

        loaded.model.output_layer.register_forward_hook(head)
        return generation.generate_tokens(
            loaded,
            [[1, 2], [3]],
            max_new_tokens=3,
            end_of_document=runs.VOCABULARY - 1,
            vocabulary=runs.VOCABULARY,
        )


def test_sampling_draws_by_the_probabilities_that_are_left():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -9.0]]).log_softmax(-1).repeat(4000, 1)
    generators = [np.random.default_rng([7, row]) for row in range(len(logits))]
    drawn = Sampling(temperature=0.5, top_k=3).choose(logits.clone(), generators)
    shares = torch.bincount(drawn, minlength=5) / len(drawn)
    expected = torch.tensor([6.0, 4.0, 2.0]).softmax(-1)
    assert shares[:3] == pytest.approx(expected, abs=0.03)
    assert shares[3:].sum() == 0
    drawn = Sampling(temperature=1.0, top_p=0.7).choose(logits.clone(), generators)
    shares = torch.bincount(drawn, minlength=5) / len(drawn)
    assert shares[:2] == pytest.approx(torch.tensor([3.0, 2.0]).softmax(-1), abs=0.03), "0.64 is less than 0.7"
    assert shares[2:].sum() == 0
    assert Sampling().choose(logits, generators).tolist() == [0] * len(logits)
    for temperature in (1e-42, 5e-324):
        assert Sampling(temperature).choose(logits, generators).tolist() == [0] * len(logits), "nearly greedy"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"temperature": -1}, "--temperature -1 is negative"),
        ({"temperature": 1, "top_k": -1}, "--top-k -1 is negative"),
        ({"temperature": 1, "top_p": 0}, "--top-p 0 is no share"),
        ({"top_k": 3}, "no effect on greedy generation"),
        ({"seed": -1}, "--seed -1 is negative"),
    ],
)
def test_settings_out_of_range_are_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        Sampling(**settings)


def refusal(words: list[str]) -> str:
    with pytest.raises(UserError) as refused:
        run_distributed(run_tool, 1, words)
    return str(refused.value)


def test_a_tokenizer_of_another_vocabulary_is_refused(text_model: Path) -> None:
    """Also where --vocab-size gives the model more rows than its tokenizer has tokens, of which some may be added."""
    args = checkpoint_arguments(find_checkpoint(text_model))
    assert args.tokenizer_own_vocab_size == args.tokenizer_vocab_size == 340

    def is_taken(size: int, **changed: int) -> bool:
        try:
            check_tokenizer(SimpleNamespace(vocab_size=size), argparse.Namespace(**(vars(args) | changed)), None)
        except UserError as error:
            assert str(error).startswith("the checkpoint was written with a tokenizer of 340 tokens, but ")
            assert f" has {size}: give its own with --tokenizer-model" in str(error)
            return False
        return True

    assert [is_taken(size) for size in (339, 340, 341)] == [False, True, False]
    rows = {"vocab_size": 384, "tokenizer_vocab_size": 384}
    assert [is_taken(size, **rows) for size in (339, 340, 341, 384, 385)] == [False, True, True, True, False]
    del args.tokenizer_own_vocab_size  # an older checkpoint
    assert [is_taken(size) for size in (339, 340, 341)] == [False, True, False]


def test_prompts_that_do_not_fit_are_refused(checkpoints, tmp_path):
    load = ["--load", str(checkpoints("headwise"))]
    long = " ".join(["1"] * runs.SEQ_LENGTH)
    found = refusal([*load, "--prompt", "1", long])
    assert found.startswith("prompt 2 has 32 tokens, but the model has 32 positions: leave one free, or extend it with")
    assert "the tokenizer does not take prompt 1" in refusal([*load, "--prompt", "words"])
    prompts = tmp_path / "prompts"
    prompts.write_text("{}\n")
    assert "line 1 of" in refusal([*load, "--prompt-file", str(prompts)])
    prompts.write_text("\n")
    assert "holds no prompt" in refusal([*load, "--prompt-file", str(prompts)])
    assert "--max-new-tokens must be positive" in refusal([*load, "--max-new-tokens", "0"])
    assert "does not exist" in refusal(["--load", str(tmp_path / "missing")])


@pytest.mark.parametrize(
    ("content", "words", "sentence"),
    [
        ('"a"', ["--prompt", "b"], "--prompt and --prompt-file are both given: leave one out"),
        (None, [], r"cannot read --prompt-file .*No such file or directory.*; name another"),
        ('"a"\nb', [], "line 2 of .* is not JSON: .*; mend it there"),
        ("\n3", [], 'line 2 of .* is no JSON string and no object with a "prompt": write one'),
        ("", [], "--prompt-file .* holds no prompt: write one JSON string a line"),
    ],
)
def test_a_file_of_prompts(content: str | None, words: list[str], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=sentence):
        generate.read_prompts(options_of(["--load", "x", "--prompt-file", str(path), *words]))


def test_a_prompt_keeps_every_character(tmp_path: Path) -> None:
    """As --output writes it: U+2028 and the like, at which Python splits lines, are no end of a line in JSON."""
    prompts = ["one\u2028two\u0085three", "four\nfive"]
    path = tmp_path / "prompts"
    path.write_text("".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in prompts))
    assert generate.read_prompts(options_of(["--load", "x", "--prompt-file", str(path)])) == prompts


def test_what_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"the tokenizer does not take prompt 3: .* surrogates not allowed; change it"):
        generation.encode(Bytes(), "half \ud800", 3)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    with pytest.raises(UserError, match=r"standard input is no text in UTF-8: .*; convert it"):
        generate.read_prompts(options_of(["--load", "x"]))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"temperature": -1.0}, "--temperature -1.0 is negative: give 0 for greedy, or more"),
        ({"temperature": math.nan}, "--temperature nan is no finite number: give 0 for greedy, or more"),
        ({"temperature": math.inf}, "--temperature inf is no finite number: give 0 for greedy, or more"),
        ({"top_k": -1}, "--top-k -1 is negative: give 0 for all tokens, or more"),
        ({"top_p": 0.0}, "--top-p 0.0 is no share of the probability: give 0 < p <= 1"),
        ({"seed": -1}, "--seed -1 is negative: give 0 or more"),
        ({"top_k": 5}, "--top-k and --top-p have no effect on greedy generation: give --temperature too"),
    ],
)
def test_sampling_that_cannot_be(values: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Sampling(**values)


def test_processes_that_are_not_those_of_the_sizes(monkeypatch: pytest.MonkeyPatch, hugging_face: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    words = ["--load", str(hugging_face), "--tensor-model-parallel-size", "2"]
    expected = (
        "--tensor-model-parallel-size 2 and --expert-model-parallel-size 1 divide the model over 2 processes, but "
        "there are 4: start as many by torchrun, or change the sizes"
    )
    with pytest.raises(UserError, match=expected):
        generate.run(options_of(words))
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(UserError, match=r"--ckpt-step has no effect: .* is Hugging Face's and holds one model. Leave"):
        generate.run(options_of(["--load", str(hugging_face), "--ckpt-step", "7"]))
    with pytest.raises(UserError, match="standard input reaches one of several processes only: give --prompt or"):
        generate.read_prompts(options_of(words), processes=2)


def around(method: Any, change: Any) -> Any:
    return lambda self: change(self, method(self))


def decoded(checkpoint: Path, tensor: int, expert: int) -> tuple[list[list[int]], list[float], list[list[int]]]:
    """Return what a model generates, and how probable it finds some tokens, on this rank of a layout.

    And what it generates where ranks but the first would choose a token of their own.
    """
    import torch

    from megagate.evaluate.directories import opened
    from megagate.evaluate.scores import continuation_scores

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    layout = Layout(tensor=tensor, expert=expert, rank=rank, local_rank=rank, world_size=world_size, decodes=True)
    with opened(checkpoint, layout=layout) as (loaded, tokenizer):
        found = generation.generate_tokens(
            loaded,
            [[5, 7, 9], [11], [4, 8]],
            max_new_tokens=9,
            end_of_document=tokenizer.eod,
            vocabulary=tokenizer.vocab_size,
            sampling=Sampling(temperature=1.0, seed=3),
        )
        pairs = [([5, 6, 7], [8, 9]), ([1], [2, 3, 4, 5])]
        scores = sorted(continuation_scores(loaded, pairs))

        def differ(_, logits: torch.Tensor) -> torch.Tensor:
            return logits + 1e3 * rank * torch.nn.functional.one_hot(torch.tensor(rank), logits.shape[-1])

        with unittest.mock.patch.object(decoder.Decoder, "next_logits", around(decoder.Decoder.next_logits, differ)):
            settings = {"end_of_document": -1, "vocabulary": tokenizer.vocab_size}
            in_step = generation.generate_tokens(loaded, [[5, 7, 9]], max_new_tokens=4, **settings)
    return [tokens for tokens, _ in found], [score for _, score, _ in scores], [tokens for tokens, _ in in_step]


@pytest.mark.parametrize(("ranks", "tensor", "expert"), [(2, 2, 2), (4, 2, 4)])
def test_ranks_that_divide_the_model_write_the_same(text_model: Path, ranks: int, tensor: int, expert: int) -> None:
    (expected, probable, in_step), *_ = run_distributed(decoded, 1, text_model, 1, 1)
    assert len({token for tokens in expected for token in tokens}) > 10
    for tokens, scores, same in run_distributed(decoded, ranks, text_model, tensor, expert):
        assert tokens == expected
        assert same == in_step
        assert scores == pytest.approx(probable, rel=1e-5)


def test_a_vocabulary_that_does_not_divide_over_the_ranks() -> None:
    sentence = "the 341 rows of the model's vocabulary do not divide over --tensor-model-parallel-size 2: choose a size"
    with pytest.raises(UserError, match=sentence):
        Layout(tensor=2, world_size=2).apply(argparse.Namespace(padded_vocab_size=341))


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode(errors="surrogatepass"))

    def detokenize(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def test_a_character_is_shown_once_it_is_whole():
    text = generation.Text(Bytes(), "prefix: é".encode())
    new = "né€".encode()
    shown = [text.more(list(new[: end + 1]), end + 1 == len(new)) for end in range(len(new))]
    assert shown == ["n", "", "é", "", "", "€"]
    assert text.of(list(new)) == "né€"


@pytest.mark.full
def test_standard_input_is_a_prompt_and_the_result_streams_to_standard_output(checkpoints):
    tool = [sys.executable, str(ROOT / "tools" / "generate.py"), "--load", str(checkpoints("headwise"))]
    finished = subprocess.run(
        [*tool, "--max-new-tokens", "3"], input="5 7\n", capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("5 7 ")
    assert "tokens/s" in finished.stderr
