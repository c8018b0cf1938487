"""A model's directory as a checkpoint, whether training or transformers wrote it."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megagate.evaluate.load import find_checkpoint


def is_hugging_face(directory: Path) -> bool:
    """Return whether a directory holds a model as Hugging Face has it."""
    return (directory / "config.json").is_file()


def check_directory(directory: Path, step: int | None = None) -> None:
    """Check that a directory holds a model, before anything slow begins; `step` is that of a checkpoint.

    Raises:
        UserError: it holds neither a checkpoint nor a Hugging Face model.
    """
    if not is_hugging_face(directory):
        find_checkpoint(directory, step)


@contextlib.contextmanager
def as_checkpoint(directory: Path) -> Iterator[Path]:
    """Give the directory itself, or, for a Hugging Face directory, a temporary checkpoint of the same model."""
    if not is_hugging_face(directory):
        yield directory
        return
    from megagate.checkpoint.convert import import_checkpoint

    with tempfile.TemporaryDirectory(prefix="megagate-") as temporary:
        print(f"converting {directory} in {temporary}", file=sys.stderr, flush=True)
        checkpoint = Path(temporary) / "checkpoint"
        import_checkpoint(directory, checkpoint)
        yield checkpoint
