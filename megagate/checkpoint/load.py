"""Which checkpoint a run loads, decided before any process group exists.

Megatron trains from scratch, with a line among hundreds, when `--load` names a directory without a checkpoint, and
fails on every rank when one is incomplete. Here the first is an error unless asked for, and an incomplete checkpoint is
passed over for the last complete one.
"""

import argparse
import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from megagate.checkpoint.pickles import read_index, refuse_code
from megagate.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
ITERATION_DIRECTORY = re.compile(r"iter_(\d{7,})$")


def choose_checkpoint(args: argparse.Namespace) -> Path | None:
    """Decide which checkpoint the run starts from and return its directory, or None to train from scratch.

    Sets `args.ckpt_step` where the last complete checkpoint is not the one the tracker names, and unsets `args.load`
    where there is none and a fresh start was asked for.

    Raises:
        UserError: there is nothing to load, or nothing complete.
    """
    flag, source = "--load", args.load
    if args.pretrained_checkpoint is not None and (source is None or not (Path(source) / TRACKER).is_file()):
        flag, source = "--pretrained-checkpoint", args.pretrained_checkpoint
    if source is None:
        return None
    directory = Path(source)
    with _reading(directory):
        never_saved = not (directory / TRACKER).is_file() and args.ckpt_step is None
        left = [directory / _name(iteration) for iteration in _iterations(directory)] if never_saved else []
    is_empty = never_saved and not left
    if left and args.allow_fresh_start and flag == "--load" and all(missing_piece(path) for path in left):
        is_empty = True  # the first save of the run was interrupted
    if is_empty and args.allow_fresh_start and flag == "--load":
        args.load = None
        return None
    if is_empty:
        hint = ", or add --allow-fresh-start to train from scratch when there is none" if flag == "--load" else ""
        raise UserError(f"{flag} {directory} holds no checkpoint ({TRACKER} is missing): correct the path{hint}")
    checkpoint = find_complete(directory, args.ckpt_step)
    iteration = ITERATION_DIRECTORY.search(checkpoint.name)
    if args.ckpt_step is None and iteration and int(iteration[1]) != _tracked(directory):
        args.ckpt_step = int(iteration[1])
    return checkpoint


@contextlib.contextmanager
def _reading(directory: Path) -> Iterator[None]:
    """Turn what an unreadable file raises into a UserError."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the checkpoints in {directory}: {error}") from error


def _iterations(directory: Path) -> list[int]:
    """Return the iterations that have a directory, newest first."""
    if not directory.is_dir():
        return []
    matches = (ITERATION_DIRECTORY.match(entry.name) for entry in directory.iterdir() if entry.is_dir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _tracked(directory: Path) -> int | str | None:
    """Return what the tracker file names: an iteration or `RELEASE`; None where there is no such file.

    Raises:
        UserError: the tracker file holds something else.
    """
    tracker = directory / TRACKER
    if not tracker.is_file():
        return None
    with _reading(directory):
        text = tracker.read_text(encoding="utf-8").strip()
    if text == RELEASE:
        return RELEASE
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{tracker} must hold an iteration or '{RELEASE}', not {text[:40]!r}: write the one to load")
    return int(text)


def find_complete(directory: Path, step: int | None = None) -> Path:
    """Return the checkpoint to load: the one at iteration `step`, else the newest complete one.

    A checkpoint newer than the tracker says was not finished and is not considered. Passing over an incomplete one is
    said on the first rank.

    Raises:
        UserError: none is complete; the message says what is missing in the one that was wanted.
    """
    tracked = _tracked(directory)
    with _reading(directory):
        iterations = _iterations(directory)
    if step is not None:
        wanted = [_name(step)]
    elif tracked == RELEASE:
        wanted = [RELEASE]
    elif isinstance(tracked, int):
        wanted = [_name(tracked), *(_name(iteration) for iteration in iterations if iteration < tracked)]
    else:
        wanted = [_name(iteration) for iteration in iterations]
    problems: list[str] = []
    for name in wanted:
        problem = missing_piece(directory / name)
        if problem is None:
            if problems and os.environ.get("RANK", "0") == "0":
                print(f"megagate: {problems[0]}; loading {name} instead", flush=True)
            return directory / name
        problems.append(problem)
    reason = problems[0] if problems else f"{directory} has no iter_ directory"
    raise UserError(f"no complete checkpoint in {directory}: {reason}; restore the file or load another checkpoint")


def _name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def missing_piece(checkpoint: Path) -> str | None:
    """Return what a checkpoint directory lacks, as a clause that names the path, or None if it is complete.

    For Megatron's distributed format every shard must reach as far as the index says; other formats are only looked
    at for presence.

    Raises:
        UserError: something in the directory cannot be read.
    """
    with _reading(checkpoint):
        if not checkpoint.is_dir():
            return f"{checkpoint} does not exist"
        if any(checkpoint.glob("mp_rank_*")):
            return None
        for name in ("metadata.json", ".metadata"):
            if not (checkpoint / name).is_file():
                return f"{checkpoint} is incomplete: {name} is missing"
        try:
            json.loads((checkpoint / "metadata.json").read_bytes())
        except ValueError as error:
            return f"{checkpoint} is incomplete: metadata.json cannot be read ({error})"
        try:
            index = read_index(checkpoint)
        except OSError:
            raise
        except Exception as error:  # whatever unpickling a damaged file raises
            return f"{checkpoint} is incomplete: .metadata cannot be read ({type(error).__name__}: {error})"
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


def common_state(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint in Megatron's distributed format holds besides tensors.

    Raises:
        UserError: the file is damaged.
    """
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    refuse_code()
    try:
        return load_common_state_dict(str(checkpoint))
    except (Exception, CheckpointException) as error:  # whatever unpickling a damaged file raises
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = str(cause).strip().partition("\n")[0]
        raise UserError(
            f"{checkpoint} cannot be read ({type(cause).__name__}: {reason}): restore it, or choose one by --ckpt-step"
        ) from error


def checkpoint_arguments(checkpoint: Path) -> argparse.Namespace:
    """Return the arguments that the checkpoint was written with.

    Raises:
        UserError: the file is damaged or holds none.
    """
    common = common_state(checkpoint)
    if not isinstance(common.get("args"), argparse.Namespace):
        raise UserError(f"{checkpoint} does not hold the arguments it was written with")
    return common["args"]
