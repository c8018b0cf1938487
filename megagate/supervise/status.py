"""The state of a run on one screen, and its goodput."""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagate.errors import UserError
from megagate.supervise import alive
from megagate.supervise.checkpoints import TRACKER
from megagate.supervise.decide import Action
from megagate.supervise.records import FOLDER, PROGRESS, History, Progress, read_progress

SHOWN_ATTEMPTS = 10


@dataclass(frozen=True)
class Goodput:
    """How the time went, in seconds."""

    useful: float
    """Spent on steps that a checkpoint kept, or that are being done now."""
    allocated: float
    """During which the run had its nodes."""
    calendar: float
    """From the first start until now, waiting in the queue included."""

    @property
    def of_allocated(self) -> float:
        """Return the share of the allocated time that was useful."""
        return self.useful / self.allocated if self.allocated else 0.0

    @property
    def of_calendar(self) -> float:
        """Return the share of all time that was useful."""
        return self.useful / self.calendar if self.calendar else 0.0


def goodput(events: list[dict[str, Any]], progress: Progress | None, now: float) -> Goodput:
    """Return how the time of a run went, from its history and the progress of an attempt that is not over."""
    attempts = {event["attempt"]: event for event in events if event["event"] == "attempt"}
    ends = {event["attempt"]: event for event in events if event["event"] == "end"}
    if not attempts:
        return Goodput(0.0, 0.0, 0.0)
    useful = sum(end["seconds"] - end["seconds_lost"] for end in ends.values())
    spans: dict[Any, list[float]] = {}
    for number, begun in attempts.items():
        end = ends.get(number)
        over = begun["time"] + end["seconds"] if end else max(now, begun["time"])
        if end is None and progress is not None and progress.first_time >= begun["time"]:
            useful += progress.time - progress.first_time
        job = (begun.get("job"), begun.get("restart"))
        span = spans.setdefault(job if job[0] else number, [begun["time"], over])
        span[1] = max(span[1], over)
    first = min(begin for begin, _ in spans.values())
    last = max(over for _, over in spans.values())
    return Goodput(useful, sum(over - begin for begin, over in spans.values()), last - first)


def screen(save: Path) -> str:
    """Return what `python -m megagate.supervise status SAVE` prints.

    Raises:
        UserError: no supervisor has written there.
    """
    folder = save / FOLDER
    history = History(folder)
    events = list(history.events())
    begun = [event for event in events if event["event"] == "attempt"]
    ends = {end["attempt"]: end for end in history.ends()}
    if not begun:
        raise UserError(f"{save} has no history of a supervised run: give the folder that --save names")
    progress = read_progress(folder)
    last = begun[-1]
    end = ends.get(last["attempt"])
    sign = alive.age(folder / alive.FILE)
    lost = sign is None or sign > alive.LOST_AFTER
    time_spent = goodput(events, progress, time.time() - (sign if sign and lost else 0.0))
    lines = [f"run        {save}"]
    if end is None:
        since = alive.age(folder / PROGRESS)
        step = "before its first step" if progress is None else f"step {progress.step}, {_duration(since or 0.0)} ago"
        lines.append(f"now        attempt {last['attempt']} on {_nodes(last)}: {step}")
    else:
        lines.append(f"now        not running; last decision: {end['decision']} ({end['reason']})")
    if end is None or end["decision"] in (Action.RESTART, Action.ROLL_BACK):
        lines.append(f"supervisor {_supervisor(sign, lost, last.get('job'))}")
    lines.append(f"saved      {_saved(save)}")
    again = sum(end["steps_lost"] for end in ends.values())
    lines.append(f"attempts   {len(begun)}: {_counts(ends.values())}; {again} steps done again")
    lines.append(
        f"goodput    {100 * time_spent.of_allocated:.1f} % of {_duration(time_spent.allocated)} with nodes, "
        f"{100 * time_spent.of_calendar:.1f} % of {_duration(time_spent.calendar)} in all"
    )
    skips = [event for event in events if event["event"] == "skip"]
    if skips:
        ranges = ", ".join(f"{event['first']}-{event['last']}" for event in skips)
        lines.append(f"skipped    steps {ranges}")
    excluded = [node for end in ends.values() for node in end["exclude"]]
    if excluded:
        lines.append(f"excluded   {', '.join(sorted(set(excluded)))}")
    lines.append("")
    lines.append(f"{'attempt':>7} {'began':<16} {'steps':>15} {'lost':>6} {'time':>8}  end")
    for event in begun[-SHOWN_ATTEMPTS:]:
        lines.append(_row(event, ends.get(event["attempt"]), "lost, it seems" if lost else "running"))
    return "\n".join(lines)


def _supervisor(sign: float | None, lost: bool, job: str | None) -> str:
    """Say whether the supervisor is there, from the age of its sign of life."""
    if not lost:
        return f"gave a sign of life {_duration(sign or 0.0)} ago"
    last = "there is no sign of life of it" if sign is None else f"its last sign of life is {_duration(sign)} old"
    where = f"if squeue --job {job} does not show its job, " if job else ""
    return f"seems lost: {last}, and it gives one each minute; {where}start the run again as before"


def _row(begun: dict[str, Any], end: dict[str, Any] | None, unended: str) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(begun["time"]))
    if end is None:
        return f"{begun['attempt']:>7} {when:<16} {begun['from']:>15} {'':>6} {'':>8}  {unended}"
    steps = f"{end['started_at']}-{end['step']}"
    where = f" on {end['host']}" if end.get("host") else ""
    said = f": {end['message'][:60]}" if end.get("message") else ""
    return (
        f"{begun['attempt']:>7} {when:<16} {steps:>15} {end['steps_lost']:>6} {_duration(end['seconds']):>8}  "
        f"{end['kind']}{where}{said} -> {end['decision']}"
    )


def _counts(ends: Any) -> str:
    counts = Counter(end["kind"] for end in ends)
    return ", ".join(f"{number} {kind}" for kind, number in counts.most_common()) or "none has ended"


def _nodes(begun: dict[str, Any]) -> str:
    nodes = begun.get("nodes") or [begun["host"]]
    return nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes from {nodes[0]}"


def _saved(save: Path) -> str:
    try:
        text = (save / TRACKER).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return "nothing"
    return f"step {text}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s")]
    first = next((index for index, (value, _) in enumerate(parts) if value), 3)
    return " ".join(f"{value}{unit}" for value, unit in parts[first : first + 2])
