"""Which checkpoints of a run stay: retention, going back, and what an interrupted save left.

Everything here runs on one rank. A directory is renamed before it is removed, so that a part of a checkpoint never
carries a checkpoint's name.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from megagate.checkpoint.load import ITERATION_DIRECTORY, TRACKER, missing_piece
from megagate.supervise.records import write_whole

REMOVED = ".removed_"
ASIDE = "rolled_back"


def steps(save: Path) -> list[int]:
    """Return the steps that have a directory, newest first, complete or not."""
    if not save.is_dir():
        return []
    matches = (ITERATION_DIRECTORY.match(path.name) for path in save.iterdir() if path.is_dir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def complete_steps(save: Path) -> Iterator[int]:
    """Yield the steps of complete checkpoints that the tracker has reached, newest first."""
    last = tracked(save)
    for step in steps(save):
        if last is not None and step <= last and missing_piece(directory(save, step)) is None:
            yield step


def directory(save: Path, step: int) -> Path:
    """Return the directory of a checkpoint."""
    return save / f"iter_{step:07d}"


def tracked(save: Path) -> int | None:
    """Return the step that the tracker names, or None."""
    try:
        return int((save / TRACKER).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def size(checkpoint: Path) -> int:
    """Return the bytes of a checkpoint's files."""
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def prune(save: Path, last: int | None, every: int | None) -> list[int]:
    """Remove complete checkpoints, but keep the newest `last` of them and those at multiples of `every`.

    Returns:
        The steps that were removed. Nothing is removed where `last` is None.
    """
    if last is None:
        return []
    newest = tracked(save)
    removed: list[int] = []
    kept = 0
    for step in steps(save):
        if newest is None or step > newest:
            continue  # not finished yet
        if kept < max(1, last):
            kept += missing_piece(directory(save, step)) is None
        elif not (every and step % every == 0):
            _remove(directory(save, step))
            removed.append(step)
    return removed


def clean(save: Path) -> list[int]:
    """Remove what an interrupted save left: parts of checkpoints beyond the tracker. No save may be in progress.

    Returns:
        The steps that were removed.
    """
    for path in save.glob(f"{REMOVED}*"):
        shutil.rmtree(path, ignore_errors=True)
    last = 0 if not (save / TRACKER).is_file() else tracked(save)
    if last is None:
        return []
    left = [step for step in steps(save) if step > last and missing_piece(directory(save, step)) is not None]
    for step in left:
        _remove(directory(save, step))
    return left


def _remove(checkpoint: Path) -> None:
    removed = checkpoint.with_name(REMOVED + checkpoint.name)
    shutil.rmtree(removed, ignore_errors=True)
    checkpoint.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def roll_back(save: Path, count: int, before: int | None = None) -> int:
    """Make an older checkpoint the one that the run goes on from; newer ones are moved to SAVE/rolled_back.

    Args:
        save: the folder of checkpoints.
        count: 0 for the newest complete checkpoint, 1 for the one before it, and so on; the oldest at most.
        before: only checkpoints of earlier steps count.

    Returns:
        The step, 0 if there is no checkpoint to go on from.
    """
    whole = [step for step in complete_steps(save) if before is None or step < before]
    target = whole[min(count, len(whole) - 1)] if whole else 0
    if target:
        write_whole(save / TRACKER, str(target))
    else:
        (save / TRACKER).unlink(missing_ok=True)
    aside = save / ASIDE
    for step in steps(save):
        if step > target:
            aside.mkdir(exist_ok=True)
            source = directory(save, step)
            names = (aside / f"{source.name}.{number}" for number in range(1, 10**6))
            source.rename(next(name for name in names if not name.exists()))
    return target
