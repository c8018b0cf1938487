"""The supervisor's side of the checks before an attempt: they are started as the ranks will be, and judged.

`preflight` has what they look at.
"""

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megagate.errors import EXIT_USER_ERROR
from megagate.supervise import preflight, ranks, slurm
from megagate.supervise.decide import Attempt, Kind
from megagate.supervise.log import Log
from megagate.supervise.records import History, say
from megagate.supervise.watch import END_SECONDS

NOT_STARTED = (EXIT_USER_ERROR, 126, 127)
"""Exit statuses of launch/node.sh, of a shell and of srun for what cannot be started."""


def check_nodes(
    command: Sequence[str],
    environment: Mapping[str, str],
    history: History,
    limit: float,
    stop: Callable[[], str | None],
    has_trained: bool,
) -> tuple[Attempt, dict[str, Any]] | None:
    """Check the nodes; return the end of the attempt, and its details, if there it ends.

    Args:
        command: starts the checks on all nodes.
        environment: for the command.
        history: gets a line.
        limit: seconds that they may take.
        stop: returns the signal that told the supervisor to end, if one did.
        has_trained: whether ranks have been started by these flags before.
    """
    folder = history.path.parent
    _clear(folder)
    started = time.monotonic()
    child = ranks.start(command, environment)
    log = Log(child.stdout)
    late = False
    while child.poll() is None:
        late = time.monotonic() - started > limit
        if late or stop() is not None:
            ranks.send(child, "KILL")
            try:
                child.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()  # what it has started on a broken node may never end
        time.sleep(0.1)
    log.close()
    told = stop()
    if told is not None:
        return Attempt(Kind.STOPPED, signal=told, began=False), {"message": "during the checks of the nodes"}
    nodes = slurm.nodes() if slurm.job() else []
    found = unfit(folder, nodes)
    history.add("preflight", seconds=round(time.monotonic() - started, 3), unfit=found)
    if child.returncode == 0 and not (folder / preflight.SUMMARY).is_file():
        said = f"what the ranks write into {folder} is not seen here: mount it in their container (--mounts)"
        say(f"error: {said}")
        return Attempt(Kind.USER_ERROR, began=False), {"message": said}
    if child.returncode == 0 and not found:
        return None
    if child.returncode in NOT_STARTED and not has_trained:
        return Attempt(Kind.USER_ERROR, began=False), {
            "message": "the checks of the nodes did not start: the log says why"
        }
    problems = "; ".join(f"{node}: {', '.join(problems)}" for node, problems in found.items())
    message = problems or f"the checks ended with status {child.returncode}{' after their time' if late else ''}"
    if 1 < len(nodes) < 2 * len(found):
        message, found = f"most nodes do not pass, so it is not theirs: {message}", {}
    return Attempt(Kind.PREFLIGHT, host=",".join(found) or None, began=False), {"message": message[:1000]}


def unfit(folder: Path, nodes: Sequence[str]) -> dict[str, list[str]]:
    """Return the unfit nodes and why, after a preflight that failed: its summary, or the nodes that never answered."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / preflight.SUMMARY).read_text(encoding="utf-8"))
    reports = {path.stem: path for path in (folder / "preflight").glob("*.json")}
    found = {node: ["it did not answer"] for node in nodes if node not in reports}
    for node, path in reports.items():
        with contextlib.suppress(OSError, ValueError):
            problems = json.loads(path.read_text(encoding="utf-8"))["problems"]
            if problems:
                found[node] = problems
    return found


def _clear(folder: Path) -> None:
    """Remove what an earlier preflight left."""
    shutil.rmtree(folder / "preflight", ignore_errors=True)
    (folder / preflight.SUMMARY).unlink(missing_ok=True)
