"""Train a SentencePiece tokenizer whose decode(encode(text)) is text, for every Unicode text.

    python tools/train_tokenizer.py --input corpus/ --output-prefix tokenizer --vocab-size 32000

writes tokenizer.model; train with `--tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model`.

SentencePiece's defaults lose text: they normalise (NFKC), drop runs of spaces and turn unknown characters into an
"unknown" token. Here bytes are the fallback for whatever is not in the vocabulary (newlines and tabs among them), and
nothing is normalised, with one exception that loses nothing. SentencePiece writes a space as U+2581 inside its pieces,
so a U+2581 in the text would come back as a space; the model's normalisation rules therefore spell it as two other
characters and the model's denormalisation rules restore it (`ESCAPE`). Readers that ignore those rules (Hugging Face
conversions) differ for these two code points only.

Ids: 0 unknown (never produced), 1 begin, 2 end of document (Megatron's `eod`), 3 padding, then the 256 bytes.
"""

import argparse
import io
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megagate.data.corpus import BadRecordPolicy, expand_inputs, iterate_texts
from megagate.errors import UserError

ESCAPE = 0x10FFFD
"""The last private-use code point: written instead of U+2581, and doubled by a suffix where it occurs itself."""
SPACE_SYMBOL = 0x2581
NORMALIZATION: dict[tuple[int, ...], tuple[int, ...]] = {
    (SPACE_SYMBOL,): (ESCAPE, ord("a")),
    (ESCAPE,): (ESCAPE, ord("b")),
}
SENTENCE_CHARACTERS = 4096
DEFAULT_MAXIMUM_BYTES = 512 << 20
HEARTBEAT_SECONDS = 10.0
_SEPARATORS = re.compile("[\n\t\0\u2585]+")
"""Characters that SentencePiece's trainer reserves or splits at; they are encoded as bytes, never learned."""


@dataclass
class Sample:
    """Sentences for training, at most so many bytes of them, spread evenly over everything that was read."""

    sentences: list[str]
    bytes_kept: int
    bytes_read: int


def sample_sentences(texts: Iterable[str], maximum_bytes: int) -> Sample:
    """Keep every sentence, or where they exceed `maximum_bytes` every second, fourth, eighth... of them.

    Deterministic, reads `texts` once, and never holds more than about `maximum_bytes` of UTF-8.
    """
    sample = Sample([], 0, 0)
    stride = 1
    for number, sentence in enumerate(_sentences(texts)):
        size = len(sentence.encode("utf-8"))
        sample.bytes_read += size
        if number % stride:
            continue
        sample.sentences.append(sentence)
        sample.bytes_kept += size
        while sample.bytes_kept > maximum_bytes and len(sample.sentences) > 1:
            stride *= 2
            sample.sentences = sample.sentences[::2]
            sample.bytes_kept = sum(len(kept.encode("utf-8")) for kept in sample.sentences)
    return sample


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in _SEPARATORS.split(text):
            for start in range(0, len(line), SENTENCE_CHARACTERS):
                yield line[start : start + SENTENCE_CHARACTERS]


def train_sentencepiece(
    sentences: Sequence[str], vocab_size: int, model_type: str = "bpe", character_coverage: float = 0.9995
) -> bytes:
    """Train a model on `sentences` and return the bytes of its .model file; the same input gives the same bytes.

    Args:
        vocab_size: number of pieces, the 4 special ones and 256 bytes included.
        model_type: "bpe" or "unigram".
        character_coverage: share of the characters that get pieces of their own; the rest is spelled in bytes.

    Raises:
        UserError: there is no text, or `vocab_size` does not fit the text; the message says what does.
    """
    import sentencepiece

    if not any(sentences):
        raise UserError("the corpus is empty: there is no text to train a tokenizer on")
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                model_type=model_type,
                vocab_size=vocab_size,
                character_coverage=character_coverage,
                byte_fallback=True,
                normalization_rule_tsv=_write_rules(folder, "normalize.tsv", NORMALIZATION),
                denormalization_rule_tsv=_write_rules(
                    folder, "denormalize.tsv", {after: before for before, after in NORMALIZATION.items()}
                ),
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                split_digits=True,
                max_sentence_length=8 * SENTENCE_CHARACTERS,
                unk_id=0,
                bos_id=1,
                eos_id=2,
                pad_id=3,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise UserError(_explain(str(error), vocab_size)) from error
    return _without_file_names(model.getvalue())


def _write_rules(folder: str, name: str, rules: dict[tuple[int, ...], tuple[int, ...]]) -> str:
    path = os.path.join(folder, name)
    with open(path, "w", encoding="ascii") as stream:
        for before, after in rules.items():
            stream.write("\t".join(" ".join(f"{code:X}" for code in side) for side in (before, after)) + "\n")
    return path


def _without_file_names(model: bytes) -> bytes:
    """The model without the names of the temporary rule files, which would differ from run to run."""
    from sentencepiece import sentencepiece_model_pb2 as messages

    proto = messages.ModelProto.FromString(model)  # type: ignore[attr-defined]
    proto.normalizer_spec.ClearField("normalization_rule_tsv")
    proto.denormalizer_spec.ClearField("normalization_rule_tsv")
    return proto.SerializeToString(deterministic=True)


def _explain(message: str, vocab_size: int) -> str:
    """One sentence for what SentencePiece's trainer refuses."""
    if match := re.search(r"Vocabulary size too high.*<= (\d+)", message):
        return (
            f"the corpus is too small for a vocabulary of {vocab_size}: it supports at most {match[1]}; "
            "give a smaller --vocab-size or more text"
        )
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"a vocabulary of {vocab_size} cannot hold the special tokens, 256 bytes and characters of this corpus: "
            f"it needs at least {match[1]}; give a larger --vocab-size or a smaller --character-coverage"
        )
    return f"SentencePiece cannot train on this corpus: {message.splitlines()[-1].strip()}"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of tools/train_tokenizer.py."""
    parser = argparse.ArgumentParser(
        prog="train_tokenizer.py",
        description="Train a SentencePiece tokenizer that gives back every text exactly.",
        allow_abbrev=False,
    )
    parser.add_argument("--input", nargs="+", required=True, help=".jsonl or .txt files (.gz, .zst), globs, folders, -")
    parser.add_argument("--json-key", default="text", help="key of the text in a .jsonl line (text)")
    parser.add_argument("--output-prefix", required=True, help="writes OUTPUT_PREFIX.model")
    parser.add_argument("--vocab-size", type=int, required=True, help="pieces, special tokens and bytes included")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="kind of model (bpe)")
    parser.add_argument("--character-coverage", type=float, default=0.9995, help="share of characters kept (0.9995)")
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=DEFAULT_MAXIMUM_BYTES,
        help=f"train on an even sample of at most this many bytes ({DEFAULT_MAXIMUM_BYTES})",
    )
    parser.add_argument("--on-bad-line", choices=("fail", "skip"), default="fail", help="for malformed lines (fail)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing model")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tools/train_tokenizer.py."""
    options = parse_arguments(arguments)
    path = options.output_prefix + ".model"
    if os.path.exists(path) and not options.overwrite:
        raise UserError(f"{path} exists; choose another --output-prefix or give --overwrite")
    if options.vocab_size < 1 or options.max_bytes < 1 or not 0 < options.character_coverage <= 1:
        raise UserError("--vocab-size and --max-bytes must be positive, --character-coverage in (0, 1]")
    started = time.monotonic()
    policy = BadRecordPolicy(options.on_bad_line)
    sample = Sample([], 0, 0)
    model = b""

    def describe() -> str:
        return f"training on {sample.bytes_kept / 1e6:.1f} MB" if sample.bytes_read else "reading"

    def work() -> None:
        nonlocal sample, model
        texts = iterate_texts(expand_inputs(options.input), options.json_key, policy)
        sample = sample_sentences(texts, options.max_bytes)
        model = train_sentencepiece(
            sample.sentences, options.vocab_size, options.model_type, options.character_coverage
        )

    _run_with_heartbeat(work, describe)
    _write_atomically(path, model)
    print(
        f"wrote {path}: {options.model_type}, {options.vocab_size} pieces, trained on {sample.bytes_kept / 1e6:.1f} of "
        f"{sample.bytes_read / 1e6:.1f} MB, {policy.skipped} malformed records skipped, "
        f"{time.monotonic() - started:.1f} s"
    )
    return 0


def _run_with_heartbeat(work: Callable[[], None], describe: Callable[[], str]) -> None:
    """Run `work` in a thread, so that minutes inside SentencePiece show progress and Ctrl-C ends them."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # raised again below, in the thread that waits
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    started = time.monotonic()
    thread.start()
    while thread.is_alive():
        thread.join(HEARTBEAT_SECONDS)
        if thread.is_alive():
            print(f"{describe()}, {time.monotonic() - started:.0f} s so far", file=sys.stderr, flush=True)
    if failures:
        raise failures[0]


def _write_atomically(path: str, content: bytes) -> None:
    folder = os.path.dirname(path) or "."
    temporary = f"{path}.partial-{os.getpid()}"
    try:
        os.makedirs(folder, exist_ok=True)
        try:
            with open(temporary, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another --output-prefix") from error
