"""A directory that appears complete or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megagate.errors import UserError


@contextlib.contextmanager
def complete_or_nothing(target: Path, known_by: tuple[str, ...], overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory beside `target`, which takes its place when the body ends and is removed if it fails.

    Args:
        target: what shall appear.
        known_by: only a directory that has one of these files is replaced.
        overwrite: whether a directory that is there may be replaced.

    Raises:
        UserError: `target` is there and may not be replaced, or nothing can be written beside it.
    """
    target = target.absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        if not overwrite:
            raise UserError(f"{target} is not empty: give another directory, or --overwrite to replace it")
        if not any((target / name).exists() for name in known_by):
            raise UserError(f"{target} has no {' or '.join(known_by)}: --overwrite does not replace anything else")
    staging = target.with_name(f".{target.name}.incomplete-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from error
    try:
        yield staging
        replaced = staging.with_suffix(".replaced")
        if target.exists():
            target.rename(replaced)
        staging.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
