"""A run's checkpoints as the supervisor knows them, by their names and the tracker.

What is in them is looked at by the trainer. Nothing here needs torch: see `records`.
"""

import time
from pathlib import Path

from megagate.supervise.records import say, write_whole

TRACKER = "latest_checkpointed_iteration.txt"


def saved(save: Path) -> int:
    """Return the step of the checkpoint that the tracker names, 0 without one."""
    try:
        return int((save / TRACKER).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def exist(save: Path) -> bool:
    """Whether there is a checkpoint, or something of one."""
    return (save / TRACKER).is_file() or any(save.glob("iter_*"))


def put_aside_damaged_tracker(save: Path) -> None:
    """Let the trainer look for the newest complete checkpoint where the tracker names none: a node has crashed."""
    tracker = save / TRACKER
    try:
        text = tracker.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return
    if not text.isdigit() and text != "release":
        say(f"megagate: {tracker} holds {text[:40]!r}: put aside, for the newest complete checkpoint")
        tracker.replace(tracker.with_name(f"damaged_{TRACKER}"))


def go_back(save: Path) -> int:
    """Make the checkpoint before the last one that from which the run goes on; return its step."""
    try:
        from megagate.checkpoint.keep import roll_back
    except ImportError:  # outside of a container there may be no torch; the trainer looks at what it loads
        last = saved(save)
        earlier = [int(path.parent.name[5:]) for path in save.glob("iter_*/.metadata")]
        target = max((step for step in earlier if step < last), default=last)
        if target < last:
            write_whole(save / TRACKER, str(target))
            aside = save / "rolled_back"
            aside.mkdir(exist_ok=True)
            (save / f"iter_{last:07d}").rename(aside / f"iter_{last:07d}.{time.time():.0f}")
        return target
    return roll_back(save, 1)
