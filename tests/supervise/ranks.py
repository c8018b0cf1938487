"""Stands for the ranks: `python ranks.py SCRIPT -m megagate.pretrain --save SAVE`, which does what SCRIPT says.

SCRIPT is a JSON list, one entry for each attempt: {"steps": N, "save": M, "end": ...}. The real ranks take many seconds
to start; what is tested here is the supervisor.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

from megagate.supervise import records


def main() -> int:
    folder = records.directory()
    save = Path(sys.argv[sys.argv.index("--save") + 1])
    script = json.loads(Path(sys.argv[1]).read_text())
    attempt = int(os.environ[records.ATTEMPT_VARIABLE])
    entry = script[min(attempt, len(script)) - 1]
    tracker = save / "latest_checkpointed_iteration.txt"
    start = int(tracker.read_text()) if tracker.exists() else 0
    assert ("--load" in sys.argv) and ("--allow-fresh-start" in sys.argv)
    told: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    (folder / "stacks").mkdir(exist_ok=True)
    stacks = open(folder / "stacks" / "rank_0.txt", "w", buffering=1)  # noqa: SIM115
    stacks.write("node7\n")
    faulthandler.register(signal.SIGUSR2, file=stacks)
    print("ranks started", flush=True)
    for _ in range(entry.get("print", 0)):
        print("megagate: a line of the ranks", flush=True)
    if entry.get("end") == "user_error":
        records.write_outcome("user_error", 0, "UserError: no such flag")
        print("error: no such flag", flush=True)
        return 2
    if "steps" in entry:
        progress = records.ProgressFile(folder, start)
        for step in range(start + 1, entry["steps"] + 1):
            progress.step(step)
        if "save" in entry:
            tracker.write_text(str(entry["save"]))
            print(f"megagate: saved step {entry['save']} in 2.5 s, in which training waited", flush=True)
    end = entry["end"]
    if end == "wait":
        while not told:
            time.sleep(0.05)
        tracker.write_text(str(entry["steps"]))
        records.write_outcome("stopped", 0, "SIGUSR1")
        return 0
    if end == "hang":
        while True:
            time.sleep(0.05)
    if end == "spike":
        records.write_outcome("spike", 0, "NaN", first=3, last=4, target=2)
        return 76
    if end == "loading":
        records.write_outcome("failed", 0, "CheckpointException: the checkpoint cannot be read")
        return 1
    if end == "failed":
        records.write_outcome("failed", 3, "ValueError: bad", step=entry["steps"])
        return 1
    if isinstance(end, str) and end.startswith("log:"):
        print(end.removeprefix("log:"), flush=True)
        return 1
    records.write_outcome(end, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
