"""The tokenizer that training uses, built the way training builds it.

Preprocessing and training must agree on what `--tokenizer-type` and its companions mean, so both go through
Megatron's own `build_tokenizer`, with the defaults of Megatron's `TokenizerConfig`. What is added here: the flags
without the seconds that importing Megatron takes, and one sentence instead of a traceback when a file is missing, is
not a tokenizer, or needs a package that is not installed.

The result has `tokenize(text) -> list[int]`, `detokenize(ids) -> str`, `vocab_size` and `eod`.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megagate.errors import UserError, nearest

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
WORD_PIECE_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase")
BYTE_LEVEL = "ByteLevelTokenizer"
TOKENIZER_TYPES = (
    *SENTENCEPIECE_TYPES,
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "GPT2BPETokenizer",
    *WORD_PIECE_TYPES,
    BYTE_LEVEL,
    "NullTokenizer",
)
"""Megatron's tokenizers of plain text; its multimodal and conversation tokenizers read other data."""

_PACKAGE = {
    **dict.fromkeys(SENTENCEPIECE_TYPES, "sentencepiece"),
    **dict.fromkeys(("HuggingFaceTokenizer", "GPT2BPETokenizer", *WORD_PIECE_TYPES), "transformers"),
    "TikTokenizer": "tiktoken",
}
_NEEDS_FILE = (*SENTENCEPIECE_TYPES, "TikTokenizer")


def add_tokenizer_arguments(parser: argparse.ArgumentParser, required: bool = True) -> list[str]:
    """Add Megatron's tokenizer flags that matter for plain text, with Megatron's names, meanings and defaults.

    Returns the names under which the parsed values are found; they are keyword arguments of :func:`build_tokenizer`.
    """
    group = parser.add_argument_group("tokenizer", "the same flags, with the same meaning, as in training")
    add = group.add_argument
    actions = [
        add("--tokenizer-type", required=required, help="one of: " + ", ".join(TOKENIZER_TYPES)),
        add("--tokenizer-model", help="model file (SentencePiece, TikToken) or Hugging Face directory"),
        add("--vocab-size", type=int, help="vocabulary size (NullTokenizer, TikTokenizer)"),
        add("--vocab-file", help="vocabulary file (GPT2BPETokenizer, BertWordPiece...)"),
        add("--merge-file", help="merges file (GPT2BPETokenizer)"),
        add("--tokenizer-metadata", dest="metadata_path", help="Megatron tokenizer metadata, a JSON file"),
        add("--tokenizer-special-tokens", dest="special_tokens", nargs="+", help="special tokens to add"),
        add("--tiktoken-pattern", choices=("v1", "v2"), help="TikToken splitting pattern"),
        add("--tiktoken-num-special-tokens", type=int, default=1000, help="TikToken special tokens (1000)"),
        add("--tokenizer-sentencepiece-legacy", action="store_true", help="let special tokens be added"),
        add("--tokenizer-hf-no-use-fast", action="store_true", help="use the slow Hugging Face tokenizer"),
        add(
            "--tokenizer-hf-no-include-special-tokens",
            action="store_true",
            help="do not let a Hugging Face tokenizer put its own special tokens around a document",
        ),
        add("--trust-remote-code", action="store_true", help="run Python found in a Hugging Face directory"),
        add("--null-tokenizer-eod-id", type=int, help="NullTokenizer's end-of-document id (the last id)"),
    ]
    return [action.dest for action in actions]


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | None = None, **options: Any):
    """Build Megatron's tokenizer of that type, as training would from the same flags.

    Args:
        tokenizer_type: one of `TOKENIZER_TYPES`.
        tokenizer_model: model file, or directory or name for Hugging Face.
        options: fields of `megatron.training.config.training_config.TokenizerConfig`, such as `vocab_size`.

    Raises:
        UserError: the type is unknown, a file or a flag that it needs is missing, or it cannot be loaded.
    """
    _check(tokenizer_type, tokenizer_model, options)
    with quiet():
        from megatron.training.config.training_config import TokenizerConfig

    config = TokenizerConfig(
        tokenizer_type=tokenizer_type, tokenizer_model=tokenizer_model, pad_vocab_size=False, **options
    )
    try:
        return build_as_megatron(config)
    except UserError:
        raise
    except Exception as error:  # every tokenizer library has its own way to refuse a file
        detail = " ".join(str(error).split()) or type(error).__name__
        source = f" from {tokenizer_model or options.get('vocab_file') or 'the flags given'}"
        raise UserError(f"cannot build a {tokenizer_type}{source}: {detail}") from error


def build_as_megatron(config: Any) -> Any:
    """Build what `config`, Megatron's arguments or its `TokenizerConfig`, says: Megatron's tokenizer, or bytes.

    Raises:
        UserError: the flags do not suit bytes.
    """
    with quiet():
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as build

        from megagate.data.byte_tokenizer import ByteTokenizer
    if config.tokenizer_type != BYTE_LEVEL:
        return build(config)
    if config.tokenizer_model:
        raise UserError(f"--tokenizer-type {BYTE_LEVEL} has no model, but --tokenizer-model is given: leave it out")
    return ByteTokenizer(config.special_tokens)


def batch_encoder(tokenizer: Any) -> Callable[[list[str]], Sequence[Any]]:
    """Return a function from texts to the ids that `tokenizer.tokenize` gives for each, as lists or integer arrays.

    It is the batch encoder of SentencePiece, a fast Hugging Face tokenizer or tiktoken where Megatron's wrapper adds
    nothing to it, and a view of the bytes for the byte-level tokenizer; otherwise (SentencePiece with added special
    tokens or marked spaces, a slow Hugging Face tokenizer or one without its special tokens, any other class) the texts
    are tokenized one by one.
    """
    with quiet():
        from megatron.core.tokenizers.text.libraries import HuggingFaceTokenizer, SentencePieceTokenizer
        from megatron.core.tokenizers.text.libraries import TikTokenTokenizer as TikToken
        from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

        from megagate.data.byte_tokenizer import ByteLibrary, encode_batch

    def one_by_one(texts: list[str]) -> list[Any]:
        return [tokenizer.tokenize(text) for text in texts]

    if getattr(type(tokenizer), "tokenize", None) is not MegatronTokenizerText.tokenize:
        return one_by_one
    wrapper = tokenizer._tokenizer
    kind = type(wrapper)
    library: Any = getattr(wrapper, "tokenizer", None)
    if kind is SentencePieceTokenizer:
        if wrapper.legacy or (wrapper.removed_extra_spaces and not wrapper.ignore_extra_whitespaces):
            return one_by_one
        return lambda texts: library.encode(texts, num_threads=1, return_type="numpy")
    if issubclass(kind, HuggingFaceTokenizer) and kind.text_to_ids is HuggingFaceTokenizer.text_to_ids:
        if not (wrapper.include_special_tokens and library.is_fast):
            return one_by_one
        return lambda texts: library(texts, return_attention_mask=False, return_token_type_ids=False)["input_ids"]
    if kind is ByteLibrary:
        return encode_batch
    if kind is TikToken:
        return lambda texts: library.encode_batch(texts, num_threads=1, allowed_special="all")
    return one_by_one


def describe_tokenizer(tokenizer: Any) -> str:
    """Return a text that tells this tokenizer from others: its kind, its vocabulary's size, and tokens of a sample.

    The same file at another path gives the same text.
    """
    sample = "The quick brown fox, 1234 Grüße: def f(x):\n\treturn x"
    try:
        tokens = tokenizer.tokenize(sample)
    except ValueError:  # a tokenizer of numbers
        tokens = []
    digest = hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:16]
    kind = type(getattr(tokenizer, "tokenizer", tokenizer)).__name__
    return f"{kind} with {tokenizer.vocab_size} tokens, {digest}"


def _check(tokenizer_type: str, tokenizer_model: str | None, options: dict[str, Any]) -> None:
    """Raise `UserError` for what can be seen to be wrong before Megatron is imported."""
    if tokenizer_type not in TOKENIZER_TYPES:
        hint = nearest(tokenizer_type, TOKENIZER_TYPES)
        raise UserError(f"--tokenizer-type {tokenizer_type} is not one of {', '.join(TOKENIZER_TYPES)}{hint}")
    if tokenizer_type == BYTE_LEVEL:  # which needs nothing
        return
    package = _PACKAGE.get(tokenizer_type)
    if package and importlib.util.find_spec(package) is None:
        raise UserError(f"--tokenizer-type {tokenizer_type} needs a package: pip install {package}")
    if tokenizer_type == "NullTokenizer":
        if not options.get("vocab_size") or options["vocab_size"] < 1:
            raise UserError("--tokenizer-type NullTokenizer needs --vocab-size, at least 1")
    elif tokenizer_type in (*_NEEDS_FILE, "HuggingFaceTokenizer"):
        if not tokenizer_model:
            raise UserError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model")
    elif not options.get("vocab_file"):
        raise UserError(f"--tokenizer-type {tokenizer_type} needs --vocab-file")
    files = {
        "--tokenizer-model": tokenizer_model if tokenizer_type in _NEEDS_FILE else None,
        "--vocab-file": options.get("vocab_file"),
        "--merge-file": options.get("merge_file"),
        "--tokenizer-metadata": options.get("metadata_path"),
    }
    for flag, path in files.items():
        if path and not os.path.isfile(path):
            folder = os.path.dirname(path) or "."
            others = os.listdir(folder) if os.path.isdir(folder) else []
            raise UserError(f"{flag} {path} does not exist{nearest(os.path.basename(path), others)}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep back the warnings that importing Megatron gives about optional packages, which tokenizing never uses."""
    previous = logging.root.manager.disable
    logging.disable(max(previous, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
