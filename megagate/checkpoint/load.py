"""Which checkpoint a run loads, decided before any process group exists, and whether it fits the run.

Megatron trains from scratch, with a line among hundreds, when `--load` names a directory without a checkpoint, and
fails on every rank when one is incomplete. Here the first is an error unless asked for, and an incomplete checkpoint is
passed over for the last complete one.
"""

import argparse
import os
import re
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

from megagate.errors import UserError
from megagate.gate.config import gate_config_from_args

TRACKER = "latest_checkpointed_iteration.txt"
ITERATION_DIRECTORY = re.compile(r"iter_(\d{7,})$")


def choose_checkpoint(args: argparse.Namespace) -> Path | None:
    """Decide which checkpoint `args.load` means, check that it fits the model, and return its directory.

    Sets `args.ckpt_step` where the last complete checkpoint is not the one the tracker names, and unsets `args.load`
    where there is none and a fresh start was asked for.

    Raises:
        UserError: there is nothing to load, nothing complete, or it does not fit.
    """
    if args.load is None:
        return None
    directory = Path(args.load)
    if not (directory / TRACKER).is_file() and args.ckpt_step is None and not _iterations(directory):
        if args.pretrained_checkpoint is not None:
            return None  # Megatron then loads that one to fine-tune from
        if not args.allow_fresh_start:
            raise UserError(
                f"--load {directory} holds no checkpoint ({TRACKER} is missing): correct the path, or add "
                "--allow-fresh-start to train from scratch when there is none"
            )
        args.load = None
        return None
    checkpoint = find_complete(directory, args.ckpt_step)
    iteration = ITERATION_DIRECTORY.search(checkpoint.name)
    if args.ckpt_step is None and iteration and int(iteration[1]) != _tracked_iteration(directory):
        args.ckpt_step = int(iteration[1])
    if not (checkpoint / "metadata.json").is_file():
        return None  # Megatron's older format, which keeps its arguments elsewhere
    check_fits(args, checkpoint)
    return checkpoint


def _iterations(directory: Path) -> list[int]:
    """Return the iterations that have a directory, newest first."""
    if not directory.is_dir():
        return []
    matches = (ITERATION_DIRECTORY.match(entry.name) for entry in directory.iterdir() if entry.is_dir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _tracked_iteration(directory: Path) -> int | None:
    """Return the iteration that the tracker file names, or None for a release checkpoint or no tracker.

    Raises:
        UserError: the tracker file holds something else.
    """
    tracker = directory / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8").strip()
    if text == "release":
        return None
    if not text.isdigit():
        raise UserError(f"{tracker} must hold an iteration or 'release', not {text!r}: write the iteration to load")
    return int(text)


def find_complete(directory: Path, step: int | None = None) -> Path:
    """Return the checkpoint to load: the one at iteration `step`, else the newest complete one.

    A checkpoint newer than the tracker says was not finished and is not considered. Passing over an incomplete one is
    said on the first rank.

    Raises:
        UserError: none is complete; the message says what is missing in the one that was wanted.
    """
    if step is not None:
        wanted = [step]
    else:
        tracked = _tracked_iteration(directory)
        if tracked is None and (directory / "release").is_dir():
            return directory / "release"
        wanted = [iteration for iteration in _iterations(directory) if tracked is None or iteration <= tracked]
        if tracked is not None and tracked not in wanted:
            wanted.insert(0, tracked)
    problems: list[str] = []
    for iteration in wanted:
        checkpoint = directory / f"iter_{iteration:07d}"
        problem = missing_piece(checkpoint)
        if problem is None:
            if problems and os.environ.get("RANK", "0") == "0":
                print(f"megagate: {problems[0]}; loading {checkpoint.name} instead", flush=True)
            return checkpoint
        problems.append(problem)
    reason = problems[0] if problems else f"{directory} has no iter_ directory"
    raise UserError(f"no complete checkpoint in {directory}: {reason}; restore the file or load another checkpoint")


def missing_piece(checkpoint: Path) -> str | None:
    """Return what a checkpoint directory lacks, as a clause that names the path, or None if it is complete.

    For Megatron's distributed format every shard must reach as far as the index says; other formats are only looked
    at for presence.
    """
    if not checkpoint.is_dir():
        return f"{checkpoint} does not exist"
    if any(checkpoint.glob("mp_rank_*")):
        return None
    for name in ("metadata.json", ".metadata"):
        if not (checkpoint / name).is_file():
            return f"{checkpoint} is incomplete: {name} is missing"
    try:
        index = FileSystemReader(checkpoint).read_metadata()
    except Exception as error:  # whatever unpickling a damaged file raises
        return f"{checkpoint} is incomplete: .metadata cannot be read ({type(error).__name__})"
    needed: dict[str, int] = {}
    for piece in (index.storage_data or {}).values():
        needed[piece.relative_path] = max(needed.get(piece.relative_path, 0), piece.offset + piece.length)
    for name, size in sorted(needed.items()):
        path = checkpoint / name
        if not path.is_file():
            return f"{checkpoint} is incomplete: {name} is missing"
        if path.stat().st_size < size:
            return f"{checkpoint} is incomplete: {name} has {path.stat().st_size} of {size} bytes"
    return None


def checkpoint_arguments(checkpoint: Path) -> argparse.Namespace:
    """Return the arguments that the checkpoint was written with; read without executing code in the file.

    Raises:
        UserError: the file holds none.
    """
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    common: dict[str, Any] = load_common_state_dict(str(checkpoint))
    if "args" not in common:
        raise UserError(f"{checkpoint} does not hold the arguments it was written with")
    return common["args"]


MODEL_ARGUMENTS = (
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_experts",
    "swiglu",
    "normalization",
    "qk_layernorm",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "untie_embeddings_and_output_weights",
    "moe_router_topk",
)
"""Arguments that change the model's function; those that change only shapes may be derived and are left to Megatron."""


def check_fits(args: argparse.Namespace, checkpoint: Path) -> None:
    """Check that the model described by `args` is the one in the checkpoint.

    Megatron compares shapes, so a gate of the same size in another place would load without a word.

    Raises:
        UserError: names the first argument that differs and both values.
    """
    saved = checkpoint_arguments(checkpoint)
    differences: list[tuple[str, Any, Any]] = [
        ("gate", gate_config_from_args(saved), gate_config_from_args(args)),
        ("layers", _layers(saved), _layers(args)),
    ]
    for name in MODEL_ARGUMENTS:
        if getattr(args, name, None) is not None and hasattr(saved, name):
            differences.append((f"--{name.replace('_', '-')}", getattr(saved, name), getattr(args, name)))
    for name, saved_value, value in differences:
        if saved_value != value:
            raise UserError(
                f"{checkpoint} was written with {name} {saved_value}, but this run has {value}: use the same"
            )


def check_vocabulary(args: argparse.Namespace, checkpoint: Path) -> None:
    """Check that the run's tokenizer has as many tokens as that of the checkpoint.

    Raises:
        UserError: the sizes differ.
    """
    saved = getattr(checkpoint_arguments(checkpoint), "tokenizer_vocab_size", None)
    if saved is not None and saved != args.tokenizer_vocab_size:
        raise UserError(
            f"{checkpoint} was written with a tokenizer of {saved} tokens, but {args.tokenizer_model or 'this one'} "
            f"has {args.tokenizer_vocab_size}: use the same --tokenizer-model"
        )


def _layers(args: argparse.Namespace) -> str | None:
    """Return the layer pattern without its pipeline boundaries, or None where a GPT model was saved."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    return None if pattern is None else pattern.replace("|", "")
