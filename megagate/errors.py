"""Errors that a user can mend, and the one place that turns them into a sentence and an exit status.

Code anywhere in megagate raises :class:`UserError` when the cause lies in what the user gave: a flag, a file, a
layout. Its text is one sentence that says what is wrong, where, and how to mend it. Every command runs its ``main``
through :func:`run_command`, which prints that sentence without a traceback and exits with status 2.
Any other exception is a fault of the program and keeps its traceback.
"""

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterable

EXIT_USER_ERROR = 2


class UserError(Exception):
    """A mistake in the user's input; the message says what, where and how to mend it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean a, b?"`` for the known names closest to `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(matches)}?" if matches else ""


def reason(error: BaseException) -> str:
    """Return what an error of a library says, in one line; where it says nothing, the line of code that raised it."""
    text = " ".join(str(error).split())
    if text:
        return text
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {frames[-1].line}" if frames else type(error).__name__


def run_command(main: Callable[[], int | None], once: bool = False) -> None:
    """Run `main` and exit with its status; a `UserError` becomes one line on stderr and status 2.

    Args:
        main: the command.
        once: whether all of torchrun's processes find the same mistakes, which then one on each machine says.
    """
    try:
        status = main()
    except UserError as error:
        if not once or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)
    except BrokenPipeError:  # the reader of our output went away, as in `tool | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    sys.exit(status or 0)
