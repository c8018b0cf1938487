"""The processes of an attempt: how they are started, sent signals, and where they are when they hang."""

import contextlib
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from megagate import processes
from megagate.errors import UserError
from megagate.supervise import slurm

LAUNCHER = re.compile(r"torch\.distributed\.run|torchrun")
"""What would end the ranks when it is told to end."""
COMMUNICATION = re.compile(r'File ".*(distributed_c10d|torch/distributed/).*"')
NAMED = 8
"""Ranks that a message names."""


def start(command: Sequence[str], environment: Mapping[str, str], lock: int | None = None) -> subprocess.Popen[str]:
    """Start what starts the ranks; with the file `lock`, which they then keep open, in a session of its own.

    Raises:
        UserError: it cannot be started.
    """
    inherited = () if lock is None else (lock,)
    try:
        return processes.start(command, environment, inherited=inherited, own_session=lock is not None)
    except OSError as error:
        raise UserError(f"cannot start {command[0]}: {error.strerror}; correct the command after --") from error


def send(child: subprocess.Popen, name: str) -> None:
    """Send a signal, such as "USR1", to the ranks that `child` has started, and to what they have started."""
    if str(cast(list[str], child.args)[0]).endswith("srun"):
        slurm.signal_ranks(name)
        return
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(child.pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if name == "KILL" or not LAUNCHER.search(" ".join(process.cmdline())):
                    process.send_signal(signal.Signals[f"SIG{name}"])


def where_they_hang(folder: Path) -> tuple[str, int | None]:
    """Return in words where the ranks were when they were asked for their stacks, and the one at fault if it is one."""
    silent, busy = _stacks(folder)
    parts = []
    if silent:
        parts.append(f"no answer from rank {_some(silent)}")
    if busy:
        parts.append(f"outside of communication: {_some(busy)}")
    nothing = "all ranks wait in communication" if any(folder.glob("stacks/rank_*.txt")) else "no rank is there"
    suspects = [text.split(" ")[0] for text in silent] or [text.split(" ")[0] for text in busy]
    return "; ".join(parts) or nothing, int(suspects[0]) if len(suspects) == 1 else None


def _stacks(folder: Path) -> tuple[list[str], list[str]]:
    """Return the ranks that gave no stack, and those whose main thread is not in communication, with where it is."""
    silent, busy = [], []
    for path in sorted((folder / "stacks").glob("rank_*.txt"), key=lambda path: int(path.stem.split("_")[1])):
        rank = path.stem.split("_")[1]
        text = path.read_text(encoding="utf-8", errors="replace")
        _, found, dump = text.rpartition("Current thread ")
        if not found:
            silent.append(rank)
            continue
        frames = re.findall(r"^  (File .*)$", dump.partition("\n\n")[0], flags=re.MULTILINE)
        if not any(COMMUNICATION.search(frame) for frame in frames[:4]):
            busy.append(f"{rank} ({frames[0] if frames else 'no Python frame'})")
    return silent, busy


def _some(names: Sequence[str]) -> str:
    """Return the first of many names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
