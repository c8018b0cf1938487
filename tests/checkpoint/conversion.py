"""What the tests of conversions do in the ranks of `tests.distributed`."""

import argparse
import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

from tests.model.training import GLOBAL_BATCH, SEQUENCE, Case

RUN = (
    f"--seq-length {SEQUENCE} --micro-batch-size 2 --global-batch-size {GLOBAL_BATCH} --train-iters 1 --lr 1e-3 "
    "--mock-data --rerun-mode disabled --logging-level 40 --attention-dropout 0 --hidden-dropout 0"
)


@dataclass(frozen=True, kw_only=True)
class Imported(Case):
    """A model from an imported checkpoint, loaded as the trainer does and described by the recipe beside it."""

    checkpoint: str
    initial: bool = True

    @property
    def argv(self) -> list[str]:
        """The command line."""
        start = f"--recipe {self.checkpoint}/recipe.yaml --load {self.checkpoint} --finetune"
        return f"{start} {RUN} {self.flags}".split()


def convert(*commands: str) -> list[str]:
    """Run `tools/convert_checkpoint.py` or, for words that begin with inspect, `tools/inspect_checkpoint.py`.

    Returns:
        What each command has printed, or its error.
    """
    return [_run(command.split()) for command in commands]


def _run(words: list[str]) -> str:
    from megagate.checkpoint import convert, inspect
    from megagate.errors import UserError

    parser = argparse.ArgumentParser()
    module = inspect if words[0] == "inspect" else convert
    module.add_arguments(parser)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            module.run(parser.parse_args(words[1:] if module is inspect else words))
    except UserError as error:
        return f"error: {error}"
    return printed.getvalue()


def verify_in_rank(hugging_face: Path, checkpoint: Path) -> str:
    """Compare two models as `--verify` does, and return the line or the error."""
    from megagate.checkpoint.verify import verify
    from megagate.errors import UserError

    try:
        return verify(hugging_face, checkpoint)
    except UserError as error:
        return str(error)
