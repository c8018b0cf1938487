"""What a Hugging Face directory holds besides weights: config.json, the settings for generation, the tokenizer's files.

No Python is copied, and none is run: a tokenizer that needs code of its own is not loaded.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from megagate.checkpoint.huggingface import CONFIG, read_json
from megagate.data.tokenizer import BYTE_LEVEL, SENTENCEPIECE_TYPES
from megagate.errors import UserError, reason

SOURCE = "huggingface"
"""The folder of an imported checkpoint that holds what its source held besides weights."""

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""One of these is in every directory with a tokenizer."""

TOKENIZER_COMPANIONS = (
    *TOKENIZER_FILES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
INHERITED = (*SPECIAL_TOKENS, "initializer_range", "use_cache", "router_aux_loss_coef", "output_router_logits")
"""Keys of a source's config.json that do not change what the model computes, and that no checkpoint holds."""

PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    " a  b   c ",
    "x\n\n\ty = f(1234567, 'z')  # \u00e9\u4e2d\u6587\U0001f642",
    "",
    '\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439 \u4e16\u754c 3.14 <a href="b">',
)
"""Texts on which a tokenizer that was converted must agree with the one that it comes from."""


def tokenizer_flags(source: Path) -> dict[str, Any]:
    """Return the trainer's flags for the tokenizer of a Hugging Face directory, or for one of bare numbers."""
    if has_tokenizer(source):
        return {"tokenizer-type": "HuggingFaceTokenizer", "tokenizer-model": str(source.absolute())}
    return {"tokenizer-type": "NullTokenizer"}


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds the files of a tokenizer."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def copy_side_files(source: Path, target: Path) -> None:
    """Make `target` and copy what `source` holds besides weights to it."""
    target.mkdir()
    _copy(source, target, (CONFIG, GENERATION_CONFIG, *TOKENIZER_COMPANIONS))


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def write_side_files(
    target: Path,
    config: dict[str, Any],
    dtype: torch.dtype,
    args: argparse.Namespace,
    source: Path | None = None,
    tokenizer: Path | None = None,
) -> None:
    """Write config.json, generation_config.json and the tokenizer's files beside exported weights.

    Args:
        target: the directory.
        config: from the family.
        dtype: of the weights.
        args: of the checkpoint; say which tokenizer it was trained with.
        source: a Hugging Face directory of the same kind of model, for what the checkpoint does not hold.
        tokenizer: a directory with the tokenizer's files, or a SentencePiece model.

    Raises:
        UserError: the tokenizer that was asked for cannot be read.
    """
    original = read_json(source / CONFIG) if source else {}
    if original.get("model_type") == config.get("model_type"):
        config = {name: original[name] for name in INHERITED if name in original} | config
    else:
        source = None
    special_tokens = _write_tokenizer(target, args, source, tokenizer)
    config = special_tokens | config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(target / CONFIG, config)
    if source and (source / GENERATION_CONFIG).is_file():
        shutil.copyfile(source / GENERATION_CONFIG, target / GENERATION_CONFIG)
    else:
        tokens = {name: config[name] for name in SPECIAL_TOKENS if config.get(name) is not None}
        _write_json(target / GENERATION_CONFIG, {"_from_model_config": True, **tokens})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(
    target: Path, args: argparse.Namespace, source: Path | None, tokenizer: Path | None
) -> dict[str, int]:
    """Write the tokenizer's files, or say what is missing; return the special tokens of one that is converted."""
    trained = Path(args.tokenizer_model) if getattr(args, "tokenizer_model", None) else None
    is_sentencepiece = args.tokenizer_type in SENTENCEPIECE_TYPES
    for directory in (tokenizer, source, None if is_sentencepiece else trained):
        if directory is not None and has_tokenizer(directory):
            _copy(directory, target, TOKENIZER_COMPANIONS)
            return {}
    model = tokenizer or (trained if is_sentencepiece else None)
    if model is not None and model.is_file():
        problem = write_sentencepiece(model, target)
        if isinstance(problem, dict):
            return problem
        shutil.copyfile(model, target / "tokenizer.model")
    elif tokenizer is not None:
        raise UserError(f"--tokenizer {tokenizer} has none of {', '.join(TOKENIZER_FILES)} and is no file")
    elif args.tokenizer_type == "NullTokenizer":
        return {}  # tokens are numbers
    elif args.tokenizer_type == BYTE_LEVEL:
        problem = "its tokens are bytes, and Hugging Face has no such format; build it with megagate.data.tokenizer"
    else:
        problem = f"the {args.tokenizer_type} {trained} is not there: give its place with --tokenizer"
    print(f"the export has no tokenizer that AutoTokenizer can load: {problem}", file=sys.stderr, flush=True)
    return {}


def write_sentencepiece(model: Path, target: Path) -> dict[str, int] | str:
    """Write a SentencePiece model as transformers' fast tokenizer loads it.

    Returns:
        The special tokens' numbers; or why there is none, if transformers is missing or would tokenize otherwise.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as messages

    try:
        from tokenizers import decoders, normalizers
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError:
        return "transformers, which converts SentencePiece models, is not installed"
    try:
        original = sentencepiece.SentencePieceProcessor(model_file=str(model))
        description = messages.ModelProto.FromString(model.read_bytes())  # type: ignore[attr-defined]
    except Exception as error:
        raise UserError(f"{model} is no SentencePiece model: {reason(error)}") from error
    ids = {
        "bos": original.bos_id(),
        "eos": original.eos_id(),
        "pad": original.pad_id(),
        "unk": original.unk_id(),
    }
    tokens = {f"{name}_token": original.id_to_piece(number) for name, number in ids.items() if number >= 0}
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_prefix_space": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        **tokens,
    }
    folder = target / "tokenizer.incomplete"
    folder.mkdir()
    try:
        shutil.copyfile(model, folder / "tokenizer.model")
        _write_json(folder / "tokenizer_config.json", settings)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if description.normalizer_spec.add_dummy_prefix:  # transformers adds none before a space
            backend = tokenizer.backend_tokenizer
            blank = normalizers.Replace(" ", "\u2581")
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), blank])
            backend.decoder = decoders.Sequence([backend.decoder, decoders.Strip(" ", 1, 0)])
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **tokens)
        tokenizer.save_pretrained(folder)
        os.remove(folder / "tokenizer.model")
        converted = AutoTokenizer.from_pretrained(folder)
        for text in PROBES:
            numbers = original.encode(text)
            if converted.encode(text, add_special_tokens=False) != numbers:
                return f"transformers would tokenize otherwise than {model.name} ({text!r})"
            if converted.decode(numbers) != original.decode(numbers):
                return f"transformers would put tokens together otherwise than {model.name} ({text!r})"
        _copy(folder, target, TOKENIZER_COMPANIONS)
    except Exception as error:  # whatever its converters raise for a model that they do not know
        return f"transformers cannot convert {model.name} ({reason(error)})"
    finally:
        shutil.rmtree(folder)
    return {f"{name}_token_id": number for name, number in ids.items() if number >= 0 and name != "unk"}
