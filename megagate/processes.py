"""Programs that are run as steps of something larger: their whole output in a log, what matters of it to the caller.

Also, on their side, processes that do not outlive the one that started them.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
"""The repository."""

_ITERATION = re.compile(r"iteration +(\d+)/ *(\d+) .*elapsed time per iteration \(ms\): ([\d.]+) .*lm loss: ([\w.+-]+)")


@dataclass(frozen=True)
class Iteration:
    """What the trainer's line of an iteration says."""

    number: int
    total: int
    milliseconds: float
    loss: float


def iteration_of(line: str) -> Iteration | None:
    """Return what a line of the trainer's output says of an iteration, or None for another line."""
    match = _ITERATION.search(line)
    if match is None:
        return None
    number, total, milliseconds, loss = match.groups()
    return Iteration(int(number), int(total), float(milliseconds), float(loss))


def environment(*, one_machine: bool = True) -> dict[str, str]:
    """Return an environment in which this tree's megagate is found, and output comes at once.

    Args:
        one_machine: all processes are here, so that gloo need ask no resolver, unless it is told what to use.
    """
    variables = {"PYTHONUNBUFFERED": "1"}
    if one_machine and any(name == "lo" for _, name in socket.if_nameindex()):
        variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start(
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    inherited: Collection[int] = (),
    own_session: bool = False,
) -> subprocess.Popen[str]:
    """Start a program without input, and what it prints in one pipe.

    Args:
        command: program and arguments.
        variables: the program's whole environment.
        inherited: file descriptors that the program keeps open.
        own_session: signals to this process's group do not reach it.

    Raises:
        OSError: it cannot be started.
    """
    return subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        pass_fds=inherited,
        start_new_session=own_session,
    )


def run_logged(
    command: Sequence[str],
    log: Path,
    variables: Mapping[str, str],
    on_line: Callable[[str], object] | None = None,
    *,
    on_start: Callable[[subprocess.Popen[str]], object] | None = None,
    inherited: Collection[int] = (),
) -> int:
    """Run a command, its output added to a log, and return its exit status.

    Args:
        command: program and arguments.
        log: file whose first line is the command.
        variables: the program's whole environment.
        on_line: is given each line of the output.
        on_start: is given the process, which then leads a group of its own: who takes it sends it signals.
        inherited: file descriptors that the program keeps open.
    """
    with open(log, "a" if on_start else "w", encoding="utf-8") as stream:
        stream.write(f"$ {shlex.join(command)}\n")
        stream.flush()
        process = start(command, variables, inherited=inherited, own_session=on_start is not None)
        assert process.stdout is not None
        try:
            if on_start is not None:
                on_start(process)
            for line in process.stdout:
                stream.write(line)
                stream.flush()
                if on_line is not None:
                    on_line(line)
            return process.wait()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()


def end_with(pid: int) -> None:
    """Have this process end when the process `pid` has, however that ended, and even if nobody has reaped it.

    Raises:
        psutil.NoSuchProcess: it has ended already.
    """
    import psutil

    threading.Thread(target=_wait_for_end, args=(psutil.Process(pid),), daemon=True).start()


def _wait_for_end(process: Any) -> None:
    import psutil

    try:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(1)
    finally:
        os._exit(1)
