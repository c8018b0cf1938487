"""A model's directory as a checkpoint, whether training or transformers wrote it."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megagate.errors import UserError
from megagate.evaluate.extension import Extension
from megagate.evaluate.layout import Layout
from megagate.evaluate.load import (
    LoadedModel,
    check_tokenizer,
    find_checkpoint,
    load_model,
    one_process_arguments,
    tokenizer_of,
)

LONGEST_CONVERSION = timedelta(hours=6)
"""For which other ranks wait."""


def is_hugging_face(directory: Path) -> bool:
    """Return whether a directory holds a model as Hugging Face has it."""
    return (directory / "config.json").is_file()


def check_directory(directory: Path, step: int | None = None) -> None:
    """Check that a directory holds a model, before anything slow begins; `step` is that of a checkpoint.

    Raises:
        UserError: it holds neither a checkpoint nor a Hugging Face model, or one that has no steps.
    """
    if not is_hugging_face(directory):
        find_checkpoint(directory, step)
    elif step is not None:
        raise UserError(f"--ckpt-step has no effect: {directory} is Hugging Face's and holds one model. Leave it out")


@contextlib.contextmanager
def as_checkpoint(directory: Path, family: str | None = None, layout: Layout | None = None) -> Iterator[Path]:
    """Give the directory itself, or, for a Hugging Face directory, a temporary checkpoint of the same model.

    Args:
        directory: a checkpoint's or a Hugging Face model's.
        family: to read the latter as, recognised if None.
        layout: the ranks, which must all call this; the first of each machine makes the temporary checkpoint. One
            process if None.

    Raises:
        UserError: the model cannot be converted, here or on another machine.
    """
    if not is_hugging_face(directory):
        yield directory
        return
    from megagate.checkpoint.convert import import_checkpoint

    layout, made = layout or Layout(), ""
    keys = [f"megagate: checkpoint of rank {rank}" for rank in range(layout.world_size)]
    store: torch.distributed.Store = torch.distributed.HashStore()
    if layout.world_size > 1:  # there is no process group yet, and the first rank may be who keeps this store
        wait = {"timeout": LONGEST_CONVERSION}
        store, *_ = next(torch.distributed.rendezvous("env://", layout.rank, layout.world_size, **wait))
    with contextlib.ExitStack() as until_end:
        try:
            if layout.local_rank == 0:
                temporary = until_end.enter_context(tempfile.TemporaryDirectory(prefix="megagate-"))
                print(f"converting {directory} in {temporary}", file=sys.stderr, flush=True)
                checkpoint = Path(temporary) / "checkpoint"
                import_checkpoint(directory, checkpoint, family_name=family)
                made = str(checkpoint)
            else:
                made = store.get(keys[layout.rank - layout.local_rank]).decode()
        finally:
            store.set(keys[layout.rank], made)  # nothing where this has failed, for which none waits
        if not all(store.multi_get(keys)):
            raise UserError(f"{directory} is not evaluated: another process, which says why, cannot convert it")
        yield Path(made)


@contextlib.contextmanager
def opened(
    directory: Path,
    step: int | None = None,
    tokenizer_model: str | None = None,
    extension: Extension | None = None,
    layout: Layout | None = None,
) -> Iterator[tuple[LoadedModel, Any]]:
    """Give the model of a directory, and its tokenizer.

    Args:
        directory: a checkpoint's or a Hugging Face model's.
        step: the iteration of a checkpoint, the newest complete one if None.
        tokenizer_model: where the tokenizer is now, if it has moved.
        extension: to a longer context than that of training.
        layout: the ranks, which must all call this; one process if None.

    Raises:
        UserError: there is no such model, it cannot be extended or divided so, or the tokenizer is another one than its
            own.
    """
    with as_checkpoint(directory, layout=layout) as checkpoint:
        step = None if is_hugging_face(directory) else step
        args = one_process_arguments(find_checkpoint(checkpoint, step))
        tokenizer = tokenizer_of(args, tokenizer_model)
        check_tokenizer(tokenizer, args, tokenizer_model)
        if layout is None or layout.rank == 0:
            print(f"loading {directory}", file=sys.stderr, flush=True)
        with load_model(checkpoint, step, extension=extension, layout=layout) as loaded:
            yield loaded, tokenizer
