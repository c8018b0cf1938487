"""Keep the progress readable: the terminal gets the lines that tell of it, a log file gets everything.

Megatron prints each of some 900 arguments, and torch, Megatron and TensorBoard warn at import. From `quiet` on, what
this process prints or warns goes to a buffer, and from `open_log` on to a file; lines that match `SHOWN` also appear on
the terminal, as do all of megagate's own (they begin with its name). Standard error stays as it is, so that tracebacks
and crashes are seen.
"""

import contextlib
import io
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any, TextIO

from megagate.errors import UserError

SHOWN = re.compile(
    r"^megagate"
    r"|^ ?\[?.{0,40}\biteration +\d+/"  # the training log line
    r"|validation loss at|^ ?loading .*checkpoint from|successfully (loaded|saved) checkpoint|saving checkpoint at"
    r"|exiting program"
)


class Terminal(io.TextIOBase):
    """Stands for sys.stdout: writes every line to the log, and those that match `SHOWN` to the terminal too."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal
        self.log: TextIO = io.StringIO()
        self._line = ""

    def write(self, text: str) -> int:
        """Take text; a line is dealt with when its end has come."""
        self._line += text
        *lines, self._line = self._line.split("\n")
        for line in lines:
            with contextlib.suppress(OSError):  # a full disk ends no training; checkpoints wait for room by themselves
                self.log.write(line + "\n")
            if SHOWN.search(line):
                self.terminal.write(line.strip() + "\n")
                self.terminal.flush()
        return len(text)

    def flush(self) -> None:
        """Flush the log; the terminal is flushed line by line."""
        with contextlib.suppress(OSError):
            self.log.flush()

    def isatty(self) -> bool:
        """Return False: what reads this is a program."""
        return False

    def fileno(self) -> int:
        """Return the terminal's descriptor, for callers that insist on one."""
        return self.terminal.fileno()


def quiet() -> Terminal:
    """Begin to hold back output; warnings and the logging module go where it goes."""
    stream = Terminal(sys.stdout)
    sys.stdout = stream
    # torch tells on standard error, at import, of a CUDA toolkit without a device.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    logging.basicConfig(stream=stream, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")

    def show_warning(
        message: Any, category: Any, filename: Any, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        stream.log.write(warnings.formatwarning(message, category, filename, lineno, line))

    warnings.showwarning = show_warning
    return stream


def open_log(stream: Terminal, directory: Path, rank: int) -> Path:
    """Write what was held back, and all that follows, to `directory`/rank_N.log (appending, for a resumed run).

    The process's standard output at the operating system's level goes there too: gloo writes to it from C++.
    """
    path = directory / f"rank_{rank}.log"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        log = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open until the process ends
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; correct --save or --tensorboard-dir") from error
    held_back = stream.log
    assert isinstance(held_back, io.StringIO)
    log.write(held_back.getvalue())
    stream.log = log
    sys.__stdout__.flush()  # type: ignore[union-attr]
    stream.terminal = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(log.fileno(), 1)
    return path
