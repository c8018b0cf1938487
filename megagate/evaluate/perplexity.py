"""Perplexity of a checkpoint on held-out token files, its mean gate scores, and what a unigram model would reach.

    python tools/evaluate.py perplexity --load runs/quickstart/gated --data-path data/held_out_text_document \\
        --unigram-data-path data/train_text_document --output result.json
    torchrun --nproc-per-node 8 tools/evaluate.py perplexity --load runs/mine --expert-model-parallel-size 8 \\
        --data-path books=data/books_text_document code=data/code_text_document --stride 1024

Definitions. `megagate.evaluate.documents` says which tokens are predicted from what; each of them counts alike,
end-of-document tokens too, whatever the run masked in training.

- loss: mean over the predicted tokens of -ln p(token | the tokens before it in the window), in nats per token;
  over several datasets, the mean over all their tokens. Under --reset-attention-mask: the tokens of its document. The
  rows that pad the vocabulary have no probability, other than in training, whose validation loss counts them.
- perplexity: exp(loss).
- bits per byte: the sum of the losses, in bits, divided by the UTF-8 bytes of the whole text. Perplexity per byte: 2 to
  the power of it.
- unigram perplexity: exp of the mean over the same tokens of -ln q(token), where q is estimated on other data, the
  training data: q(w) = (count(w) + 1) / (tokens + vocabulary size).
- gate score: see `megagate.telemetry.gates`; over every input token of every window.
- parameters: all that the checkpoint holds, embeddings and the padding of the vocabulary included. Active parameters:
  the same with the routed experts' counted at top-k / experts of their number, which is what one token passes through.

The batch size, the number of ranks and the layout (`megagate.evaluate.layout`) change the speed and, apart from
rounding, nothing else; but a last window that the layout pads is left out of the gate scores.
"""

import argparse
import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megagate.data.tokenizer import quiet
from megagate.errors import UserError
from megagate.evaluate.directories import as_checkpoint, check_directory, is_hugging_face
from megagate.evaluate.documents import (
    Window,
    batches,
    check_vocabulary,
    count_tokens,
    open_dataset,
    text_bytes,
    token_counts,
)
from megagate.evaluate.extension import HINT, Extension
from megagate.evaluate.layout import SIZES, Layout, add_layout_arguments
from megagate.evaluate.load import (
    LoadedModel,
    check_tokenizer,
    find_checkpoint,
    load_model,
    one_process_arguments,
    tokenizer_of,
)
from megagate.evaluate.masks import tells_documents_apart
from megagate.evaluate.options import add_model_arguments, check_output, check_positive, write_file
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


class Progress:
    """One line on standard error every `PROGRESS_SECONDS`."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.tokens = 0
        self.started = self._shown = time.monotonic()

    def add(self, tokens: int) -> None:
        """Count `tokens` more."""
        self.tokens += tokens
        now = time.monotonic()
        if now - self._shown >= PROGRESS_SECONDS:
            self._shown = now
            speed = self.tokens / (now - self.started)
            print(f"{self.tokens} of {self.total} tokens, {speed:.0f} tokens/s", file=sys.stderr, flush=True)


def named_paths(words: Sequence[str]) -> dict[str, str]:
    """Return the datasets of --data-path by their names: NAME=PREFIX, or PREFIX, which is then its own name.

    Raises:
        UserError: two have the same name.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, prefix = word.partition("=")
        if not equals or "/" in name or Path(f"{word}.idx").exists():
            name = prefix = word
        if not name or not prefix:
            raise UserError(f"--data-path {word} lacks a name or a prefix: write NAME=PREFIX")
        if name in found:
            raise UserError(f"--data-path has two datasets named {name}: write NAME=PREFIX with different names")
        found[name] = prefix
    return found


def evaluate(
    loaded: LoadedModel,
    data_paths: Mapping[str, str] | Sequence[str],
    *,
    seq_length: int | None = None,
    stride: int | None = None,
    micro_batch_size: int = 8,
    unigram: Unigram | None = None,
    tokenizer: Any = None,
    telemetry: "Telemetry | None" = None,
    multiple: int = 1,
) -> Result:
    """Measure loss and gate scores on datasets; all ranks of the layout call this, and have the same result.

    Args:
        loaded: the model.
        data_paths: prefixes of .bin/.idx files, by name or their own names.
        seq_length: longest context; the one of training if None.
        stride: from one window to the next; `seq_length` if None.
        micro_batch_size: windows that a rank computes at a time.
        unigram: gives the unigram loss beside the model's.
        tokenizer: gives the text's bytes, and where documents end, which some models need to know.
        telemetry: what observes the model; the gates alone if None.
        multiple: of what the layout needs the length of a window to be a multiple.

    Raises:
        UserError: a dataset is missing or damaged, holds no two tokens, or tokens that the model does not know.
    """
    from megatron.core import mpu

    from megagate.evaluate.losses import summed_loss
    from megagate.telemetry.telemetry import Telemetry

    args, result = loaded.args, Result(loaded)
    end_of_document = tokenizer.eod if tells_documents_apart(args) else None
    paths = data_paths if isinstance(data_paths, Mapping) else {path: path for path in data_paths}
    opened = [(name, path, open_dataset(path)) for name, path in paths.items()]
    for _, path, dataset in opened:
        if count_tokens(dataset) < 2:
            raise UserError(f"{path} holds fewer than two tokens, so that there is nothing to predict: leave it out")
    progress = Progress(sum(count_tokens(dataset) for _, _, dataset in opened))
    length = seq_length or args.seq_length
    telemetry = telemetry or Telemetry(args, [loaded.model], rows=length, only_gates=True)
    ranks, own = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    for name, path, dataset in opened:
        found = DatasetResult(path, name)
        loss = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
        unigram_loss = 0.0
        for group in itertools.batched(batches(dataset, length, micro_batch_size, stride), ranks):
            for batch in group:
                check_vocabulary(batch.tokens, args.tokenizer_vocab_size, path)
                found.tokens += int(batch.counted.sum())
                unigram_loss += unigram.loss(_labels(batch)) if unigram else 0.0
            # Ranks that share experts take part in every step, with nothing that counts where the windows are over.
            mine = group[own] if own < len(group) else Window(group[0].tokens, np.zeros_like(group[0].counted))
            fits = own < len(group) and (mine.tokens.shape[1] - 1) % multiple == 0
            with telemetry.observing() if fits else contextlib.nullcontext():
                loss += summed_loss(loaded, mine, end_of_document, multiple)
            if args.rank == 0:
                progress.add(sum(int(batch.counted.sum()) for batch in group))
        torch.distributed.all_reduce(loss)
        found.total_loss = loss.item()
        found.total_unigram_loss = unigram_loss if unigram else None
        found.bytes = text_bytes(dataset, tokenizer, path) if tokenizer else None
        result.datasets.append(found)
    result.findings = telemetry.findings()
    result.seconds = time.monotonic() - progress.started
    return result


def _labels(batch: Window) -> np.ndarray:
    """Return the labels that count."""
    labels = batch.tokens[:, 1:]
    return labels[np.arange(labels.shape[1]) >= labels.shape[1] - batch.counted[:, None]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tools/evaluate.py perplexity`; those that Megatron has bear its names."""
    add = parser.add_argument
    add_model_arguments(parser)
    add("--data-path", nargs="+", required=True, metavar="[NAME=]PREFIX", help="held-out .bin/.idx files")
    add("--unigram-data-path", nargs="+", metavar="PREFIX", help="training data to estimate the unigram model on")
    add("--seq-length", type=int, metavar="N", help="tokens per window (as in training)")
    add("--stride", type=int, metavar="N", help="tokens from one window to the next (the tokens per window)")
    add("--micro-batch-size", type=int, default=8, metavar="N", help="windows computed at a time (8)")
    add("--output", metavar="FILE", help="write the result as JSON")
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run `tools/evaluate.py perplexity`.

    Raises:
        UserError: something in the options is missing or does not fit the checkpoint.
    """
    layout = Layout.of(options)
    with quiet():
        report = _measure(options, layout)
    if layout.rank > 0:
        return 0
    print(table(report))
    if options.output:
        write_file(Path(options.output), json.dumps(report, indent=2) + "\n")
    return 0


def _measure(options: argparse.Namespace, layout: Layout) -> dict[str, Any]:
    """Check the options, the cheap checks first, then load the checkpoint and return the report."""
    check_positive(options, "micro_batch_size", "stride", *SIZES.values())
    check_output(options.output)
    directory = options.load
    check_directory(directory, options.ckpt_step)
    paths, unigram_paths = named_paths(options.data_path), options.unigram_data_path or []
    for path in (*paths.values(), *unigram_paths):
        open_dataset(path)
    with as_checkpoint(directory, layout=layout) as checkpoint_directory:
        step = None if is_hugging_face(directory) else options.ckpt_step
        args = one_process_arguments(find_checkpoint(checkpoint_directory, step))
        Extension.of(options).apply(args)
        length, longest = options.seq_length or args.seq_length, args.max_position_embeddings
        if options.seq_length is not None and not 1 <= length <= longest:
            raise UserError(f"--seq-length {length} must lie between 1 and {longest}, the model's positions: {HINT}")
        if options.stride is not None and options.stride > length:
            raise UserError(
                f"--stride {options.stride} is more than the {length} tokens of a window: give at most that, or "
                "some tokens would be missed"
            )
        tokenizer = tokenizer_for_text(args, options.tokenizer_model)
        counts = [token_counts(path, args.tokenizer_vocab_size) for path in unigram_paths]
        if layout.rank == 0:
            print(f"loading {directory}", file=sys.stderr, flush=True)
        with load_model(checkpoint_directory, step, layout=layout, extension=Extension.of(options)) as loaded:
            report = evaluate(
                loaded,
                paths,
                seq_length=length,
                stride=options.stride,
                micro_batch_size=options.micro_batch_size,
                unigram=Unigram(np.sum(counts, axis=0)) if counts else None,
                tokenizer=tokenizer,
                multiple=layout.multiple,
            ).as_json()
    if is_hugging_face(directory):
        report["checkpoint"] = str(directory)
    return report | {"seq_length": length, "stride": options.stride or length}


def tokenizer_for_text(args: argparse.Namespace, moved_to: str | None) -> Any:
    """Return the run's tokenizer, or None where it is not there and nothing but the bytes needs it.

    Raises:
        UserError: it was asked for or is needed and cannot be built, or is another one than the checkpoint's.
    """
    if args.tokenizer_type == "NullTokenizer" and not tells_documents_apart(args):
        return None  # its tokens are numbers, there is no text
    try:
        tokenizer = tokenizer_of(args, moved_to)
    except UserError as error:
        if moved_to is not None or tells_documents_apart(args):
            raise
        print(f"the text's bytes are not known: {error}", file=sys.stderr, flush=True)
        return None
    check_tokenizer(tokenizer, args, moved_to)
    return tokenizer
