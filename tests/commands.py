"""Runs a program of this project as a shell would, without the seconds that its imports take.

The process is forked from the template of `tests.distributed`, which has torch and Megatron already; from there on it
is the program's own: its entry point, its arguments, its environment, its standard streams and its exit status. What
depends on the order of imports, or on what they print, needs a process of its own: tests/pretrain/test_train.py starts
the trainer so too.
"""

import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.distributed import start_from_template


def run(
    program: str | Path,
    argv: list[str],
    *,
    directory: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = 180,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m program`` or, for a path, ``python program``, and return what it printed and its exit status.

    Args:
        program: name of a module, or path of a script.
        argv: its arguments.
        directory: its working directory.
        environment: its environment variables; those of this process if left out.
        timeout: in seconds.

    Raises:
        subprocess.TimeoutExpired: it was still running when the time was over, and has been killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        for stream in streams:
            stream.touch()
        process = start_from_template(
            _main, program, argv, str(directory), dict(os.environ if environment is None else environment), streams
        )
        process.join(timeout)
        if process.exitcode is None:
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            raise subprocess.TimeoutExpired([str(program), *argv], timeout, *(path.read_bytes() for path in streams))
        stdout, stderr = (path.read_text(encoding="utf-8", errors="replace") for path in streams)
        return subprocess.CompletedProcess([str(program), *argv], process.exitcode, stdout, stderr)


def _main(
    program: str | Path, argv: list[str], directory: str, environment: dict[str, str], streams: list[Path]
) -> None:
    os.setsid()
    for number, path in enumerate([Path(os.devnull), *streams]):
        descriptor = os.open(path, os.O_RDWR)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    # The template's imports have logged, and what logged first has taken the standard error of that time.
    logging.getLogger().handlers.clear()
    sys.argv = [str(program), *argv]
    if isinstance(program, Path):
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
