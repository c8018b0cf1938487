"""The supervisor's side of Slurm: time left, signals to the ranks, and back into the queue without a bad node."""

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence

from megagate.supervise.records import say

TRIES = 60
"""How often, half a second apart, a change is tried that Slurm refuses while the job is being requeued."""


def job() -> str | None:
    """Return the number of the job whose batch script this process is, or None outside of Slurm."""
    return os.environ.get("SLURM_JOB_ID") if "SLURM_JOB_NODELIST" in os.environ else None


def nodes() -> list[str]:
    """Return the names of the job's nodes, or none where Slurm does not say."""
    status, text = _run("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"])
    return text.split() if status == 0 else []


def seconds_left() -> float | None:
    """Return how long the job may still run, or None without a limit."""
    status, text = _run("squeue", "--noheader", "--job", os.environ["SLURM_JOB_ID"], "--format", "%L")
    if status == 0:
        return parse_time(text.strip())
    end = os.environ.get("SLURM_JOB_END_TIME", "")  # as it was at the start; of newer versions
    return max(0.0, int(end) - time.time()) if end.isdigit() else None


def parse_time(text: str) -> float | None:
    """Return the seconds of Slurm's [days-][[hours:]minutes:]seconds, or None for anything else, such as UNLIMITED."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


def parse_limit(text: str) -> float | None:
    """Return the seconds of a time limit as sbatch takes it, infinite for none; None for anything else.

    minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *parts = (None if part is None else int(part) for part in match.groups())
    if days is None and parts[2] is None:  # without days or a third number the first are minutes
        parts = [0, *parts[:2]]
    hours, minutes, seconds = (part or 0 for part in parts)
    return (((days or 0) * 24 + hours) * 60 + minutes) * 60.0 + seconds or math.inf


def signal_ranks(name: str) -> None:
    """Send a signal, such as "USR1", to every process of the job's steps; the batch script gets none."""
    number = os.environ["SLURM_JOB_ID"]
    # Step by step: SIGKILL to the job would cancel it, batch script and all.
    steps = _run("squeue", "--noheader", "--steps", "--job", number, "--format", "%i")[1].split()
    for step in steps:
        if re.fullmatch(rf"{number}\.\d+", step):
            _run("scancel", f"--signal={name}", step)


def requeue(exclude: Sequence[str] = ()) -> str | None:
    """Put the job back into the queue, never again on the nodes in `exclude`; Slurm then ends this process.

    Returns:
        Why the job is not requeued, or None. One that is, but may come to the same nodes, says so in the log.
    """
    number = os.environ["SLURM_JOB_ID"]
    before = re.search(r"ExcNodeList=(\S+)", _run("scontrol", "show", "job", number)[1]) if exclude else None
    status, text = _run("scontrol", "requeue", number)
    if status and status != -signal.SIGTERM:  # which Slurm sends to all of a job that it requeues, scontrol too
        return text
    if exclude:
        # Only a job that does not run can be given other nodes. It cannot start again before this process has ended,
        # so it need not be held, which would be for ever if this process were killed between hold and release.
        listed = [] if before is None or before[1] == "(null)" else [before[1]]
        problem = _insist("scontrol", "update", f"JobId={number}", f"ExcNodeList={','.join([*listed, *exclude])}")
        if problem is not None:
            say(f"megagate: Slurm does not leave out {','.join(exclude)} ({problem})")
    return None


def _insist(*words: str) -> str | None:
    text = ""
    for _ in range(TRIES):
        status, text = _run(*words)
        if status == 0:
            return None
        time.sleep(0.5)
    return text


def _run(*words: str) -> tuple[int, str]:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout if done.returncode == 0 else " ".join(done.stderr.split())
