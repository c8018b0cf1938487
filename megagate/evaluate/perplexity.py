"""Perplexity of a checkpoint on held-out token files, its mean gate scores, and what a unigram model would reach.

    python tools/evaluate.py perplexity --load runs/quickstart/gated --data-path data/held_out_text_document \\
        --unigram-data-path data/train_text_document --output result.json

Definitions. `megagate.evaluate.documents` says which tokens are predicted from what; each of them counts alike,
end-of-document tokens too, whatever the run masked in training.

- loss: mean over the predicted tokens of -ln p(token | the tokens before it in the window), in nats per token;
  over several datasets, the mean over all their tokens. Under --reset-attention-mask: the tokens of its document.
- perplexity: exp(loss).
- bits per byte: the sum of the losses, in bits, divided by the UTF-8 bytes of the whole text.
- unigram perplexity: exp of the mean over the same tokens of -ln q(token), where q is estimated on other data, the
  training data: q(w) = (count(w) + 1) / (tokens + vocabulary size).
- gate score: see `megagate.telemetry.gates`; over every input token of every window.
- parameters: all that the checkpoint holds, embeddings and the padding of the vocabulary included. Active parameters:
  the same with the routed experts' counted at top-k / experts of their number, which is what one token passes through.

One process, on one device. The batch size changes the speed and, apart from rounding, nothing else.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megagate.data.tokenizer import quiet
from megagate.errors import UserError
from megagate.evaluate.documents import (
    batches,
    check_vocabulary,
    count_tokens,
    open_dataset,
    text_bytes,
    token_counts,
)
from megagate.evaluate.load import LoadedModel, find_checkpoint, load_model, one_process_arguments, tokenizer_of
from megagate.evaluate.masks import document_mask
from megagate.evaluate.report import DatasetResult, Result, table

if TYPE_CHECKING:
    from megagate.telemetry.telemetry import Telemetry

PROGRESS_SECONDS = 5.0


class Unigram:
    """ln q(w) of every token, from the counts of a training set.

    Args:
        counts: of all tokens of the vocabulary, int [v].
    """

    def __init__(self, counts: np.ndarray) -> None:
        self.log_probabilities = np.log(counts + 1.0) - math.log(counts.sum() + len(counts))

    def loss(self, tokens: np.ndarray) -> float:
        """Return the sum over `tokens` of -ln q(token), in nats."""
        return -float(self.log_probabilities[tokens].sum())


def token_losses(model: torch.nn.Module, windows: np.ndarray, end_of_document: int | None = None) -> torch.Tensor:
    """Return the loss of each label: fp32 [b, s] in nats.

    Args:
        model: in evaluation mode.
        windows: int64 [b, s + 1] as `megagate.evaluate.documents` yields them.
        end_of_document: for a model that was trained with --reset-attention-mask, to which a document is hidden from
            the ones after it.
    """
    tokens = torch.from_numpy(windows).cuda()
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    mask = None if end_of_document is None else document_mask(inputs, end_of_document)
    with torch.no_grad():
        return model(inputs, positions, mask, labels=labels).float()


class Progress:
    """One line on standard error every `PROGRESS_SECONDS`."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.tokens, self.loss = 0, 0.0
        self.started = self._shown = time.monotonic()

    def add(self, tokens: int, loss: float) -> None:
        """Count `tokens` more, with the sum of their losses."""
        self.tokens += tokens
        self.loss += loss
        now = time.monotonic()
        if now - self._shown >= PROGRESS_SECONDS:
            self._shown = now
            print(
                f"{self.tokens} of {self.total} tokens, loss {self.loss / self.tokens:.3f}, "
                f"{self.tokens / (now - self.started):.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )


def evaluate(
    loaded: LoadedModel,
    data_paths: Sequence[str],
    *,
    seq_length: int | None = None,
    micro_batch_size: int = 8,
    unigram: Unigram | None = None,
    tokenizer: Any = None,
    telemetry: "Telemetry | None" = None,
) -> Result:
    """Measure loss and gate scores on datasets.

    Args:
        loaded: the model.
        data_paths: prefixes of .bin/.idx files.
        seq_length: longest context; the one of training if None.
        micro_batch_size: windows that are computed at a time.
        unigram: gives the unigram loss beside the model's.
        tokenizer: gives the text's bytes; needed for a model that was trained with --reset-attention-mask.
        telemetry: what observes the model; the gates alone if None.

    Raises:
        UserError: a dataset is missing or damaged, holds no two tokens, or tokens that the model does not know.
    """
    from megagate.telemetry.telemetry import Telemetry

    args, result = loaded.args, Result(loaded)
    end_of_document = tokenizer.eod if args.reset_attention_mask else None
    opened = [(path, open_dataset(path)) for path in data_paths]
    progress = Progress(sum(count_tokens(dataset) for _, dataset in opened))
    length = seq_length or args.seq_length
    telemetry = telemetry or Telemetry(args, [loaded.model], rows=length, only_gates=True)
    with telemetry.observing():
        for path, dataset in opened:
            found = DatasetResult(path)
            unigram_loss = 0.0
            for batch in batches(dataset, length, micro_batch_size):
                check_vocabulary(batch, args.tokenizer_vocab_size, path)
                losses = token_losses(loaded.model, batch, end_of_document)
                total = losses.sum(dtype=torch.float64).item()
                found.tokens += losses.numel()
                found.total_loss += total
                unigram_loss += unigram.loss(batch[:, 1:]) if unigram else 0.0
                progress.add(losses.numel(), total)
            if not found.tokens:
                raise UserError(f"{path} holds fewer than two tokens: there is nothing to predict")
            found.total_unigram_loss = unigram_loss if unigram else None
            found.bytes = text_bytes(dataset, tokenizer, path) if tokenizer else None
            result.datasets.append(found)
    result.findings = telemetry.findings()
    result.seconds = time.monotonic() - progress.started
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tools/evaluate.py perplexity`; those that Megatron has bear its names."""
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="directory that training saved to")
    add("--ckpt-step", type=int, metavar="N", help="iteration to load (the newest complete one)")
    add("--data-path", nargs="+", required=True, metavar="PREFIX", help="held-out .bin/.idx files, without the ending")
    add("--unigram-data-path", nargs="+", metavar="PREFIX", help="training data to estimate the unigram model on")
    add("--tokenizer-model", metavar="FILE", help="where the run's tokenizer is now, if it has moved")
    add("--seq-length", type=int, metavar="N", help="tokens per window (as in training)")
    add("--micro-batch-size", type=int, default=8, metavar="N", help="windows computed at a time (8)")
    add("--output", metavar="FILE", help="write the result as JSON")


def run(options: argparse.Namespace) -> int:
    """Run `tools/evaluate.py perplexity`.

    Raises:
        UserError: something in the options is missing or does not fit the checkpoint.
    """
    with quiet():
        report = _measure(options)
    print(table(report))
    if options.output:
        try:
            Path(options.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write --output {options.output}: {error.strerror}") from error
    return 0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """Check the options, the cheap checks first, then load the checkpoint and return the report."""
    if options.micro_batch_size < 1:
        raise UserError(f"--micro-batch-size must be positive, not {options.micro_batch_size}")
    if options.output and not os.path.isdir(os.path.dirname(options.output) or "."):
        raise UserError(f"--output {options.output} lies in a directory that does not exist: make it first")
    checkpoint = find_checkpoint(Path(options.load), options.ckpt_step)
    unigram_paths = options.unigram_data_path or []
    for path in (*options.data_path, *unigram_paths):
        open_dataset(path)
    args = one_process_arguments(checkpoint)
    longest = args.max_position_embeddings
    if options.seq_length is not None and not 1 <= options.seq_length <= longest:
        raise UserError(f"--seq-length {options.seq_length} must lie between 1 and {longest}, the model's positions")
    tokenizer = tokenizer_for_text(args, options.tokenizer_model)
    counts = [token_counts(path, args.tokenizer_vocab_size) for path in unigram_paths]
    print(f"loading {checkpoint}", file=sys.stderr, flush=True)
    with load_model(Path(options.load), options.ckpt_step) as loaded:
        return evaluate(
            loaded,
            options.data_path,
            seq_length=options.seq_length,
            micro_batch_size=options.micro_batch_size,
            unigram=Unigram(np.sum(counts, axis=0)) if counts else None,
            tokenizer=tokenizer,
        ).as_json()


def tokenizer_for_text(args: argparse.Namespace, moved_to: str | None) -> Any:
    """Return the run's tokenizer, or None where it is not there and nothing but the bytes needs it.

    Raises:
        UserError: it was asked for or is needed and cannot be built, or is another one than the checkpoint's.
    """
    if args.tokenizer_type == "NullTokenizer" and not args.reset_attention_mask:
        return None  # its tokens are numbers, there is no text
    try:
        tokenizer = tokenizer_of(args, moved_to)
    except UserError as error:
        if moved_to is not None or args.reset_attention_mask:
            raise
        print(f"the text's bytes are not known: {error}", file=sys.stderr, flush=True)
        return None
    check_tokenizer(tokenizer, args, moved_to)
    return tokenizer


def check_tokenizer(tokenizer: Any, args: argparse.Namespace, moved_to: str | None) -> None:
    """Raise UserError if a tokenizer is another one than the checkpoint's."""
    if max(tokenizer.vocab_size, args.vocab_size or 0) != args.tokenizer_vocab_size:
        raise UserError(
            f"the checkpoint was written with a tokenizer of {args.tokenizer_vocab_size} tokens, but "
            f"{moved_to or args.tokenizer_model} has {tokenizer.vocab_size}: give its own with --tokenizer-model"
        )
