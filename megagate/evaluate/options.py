"""What the tools that compute with a model have in common on their command lines."""

import argparse
import os
from pathlib import Path

from megagate.errors import UserError
from megagate.evaluate.extension import add_extension_arguments
from megagate.evaluate.layout import DECODING, SIZES, Layout, add_layout_arguments


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which model, with Megatron's names."""
    add = parser.add_argument
    add("--load", required=True, type=Path, metavar="DIR", help="directory that training saved to, or Hugging Face's")
    add("--ckpt-step", type=int, metavar="N", help="iteration to load (the newest complete one)")
    add("--tokenizer-model", metavar="FILE", help="where the run's tokenizer is now, if it has moved")
    add_extension_arguments(parser)


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that divide a model whose tokens are computed one by one."""
    add_layout_arguments(parser, DECODING)


def decoding_layout(options: argparse.Namespace) -> Layout:
    """Return the layout of the flags of `add_decoding_arguments`.

    Raises:
        UserError: the sizes are not those of the processes.
    """
    check_positive(options, *(SIZES[field] for field in DECODING))
    return Layout.to_decode(options)


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Raise UserError for the first of the options that is given and is less than 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be positive, not {value}")


def check_output(path: str | None) -> None:
    """Raise UserError where --output names no place for a file, before anything slow begins."""
    if path and not os.path.isdir(os.path.dirname(path) or "."):
        raise UserError(f"--output {path} lies in a directory that does not exist: make it first")
    if path and os.path.isdir(path):
        raise UserError(f"--output {path} is a directory: name a file in it")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, and its directory if that is missing.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another place for it") from error
