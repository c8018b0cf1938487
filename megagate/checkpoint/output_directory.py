"""A directory that appears complete or not at all."""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from megagate.errors import UserError


@contextlib.contextmanager
def complete_or_nothing(
    target: Path, known_by: tuple[str, ...], overwrite: bool = False, needed: tuple[Path, ...] = ()
) -> Iterator[Path]:
    """Yield an empty directory beside `target`, which takes its place when the body ends and is removed if it fails.

    It fails on SIGTERM too, as on an exception.

    Args:
        target: what shall appear.
        known_by: only a directory that has one of these files is replaced.
        overwrite: whether a directory that is there may be replaced.
        needed: what must not be lost when it is.

    Raises:
        UserError: `target` is there and may not be replaced, or nothing can be written beside it.
    """
    target = target.absolute()
    if target.is_symlink() or target.is_mount():
        raise UserError(f"{target} is a link or a mount point, which cannot be replaced: give a directory inside it")
    for path in needed:
        if path.resolve().is_relative_to(target.resolve()):
            raise UserError(f"{target} holds {path}, which is read: give another directory")
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
        with _exit_on_sigterm():
            yield staging
        replaced = staging.with_name(f"{staging.name}.replaced")
        if target.exists():
            target.rename(replaced)
        try:
            staging.rename(target)
        except OSError:
            if replaced.exists():
                replaced.rename(target)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM, which schedulers send, raise SystemExit meanwhile, so that what is unfinished is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
