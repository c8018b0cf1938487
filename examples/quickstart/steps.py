"""Steps that are done once: each leaves a stamp of what it depended on, and is skipped while that stays the same.

A step depends on its command and on the contents of its input files. It is done again when any of these changes, when
one of its outputs is gone, and when it was interrupted, for its stamp is written at the very end.
"""

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import megagate
from megagate.errors import UserError
from megagate.processes import ROOT, environment, iteration_of, run_logged


def shown(path: Path) -> str:
    """Return the path as commands and messages have it: relative where it lies below the working directory."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


class Steps:
    """Runs the steps of one demo in one folder.

    Args:
        output: the folder; stamps and logs lie in it.
        total: how many steps there will be, for the numbers that are printed.
        fresh: forget what was done before.
    """

    def __init__(self, output: Path, total: int, fresh: bool = False) -> None:
        self.output = output
        self.total = total
        self.number = 0
        self.seconds = 0.0
        """What the steps took when they were done, also those that are reused now."""
        self.all_new = True
        """Whether no step was reused."""
        self.stamps = output / "stamps"
        self.logs = output / "logs"
        for folder in (self.stamps, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        if fresh:
            for stamp in self.stamps.iterdir():
                stamp.unlink()

    def run(
        self,
        name: str,
        title: str,
        work: Sequence[str] | Callable[[], object],
        *,
        inputs: Sequence[Path] = (),
        outputs: Sequence[Path] = (),
        folder: Path | None = None,
        report: Callable[[str], str | None] | None = None,
        settings: object = None,
    ) -> None:
        """Do a step, unless it has been done.

        Args:
            name: of the stamp and the log.
            title: what the terminal says of it.
            work: a command line, or a function.
            inputs: files that it reads.
            outputs: files that it must leave behind.
            folder: what it fills; emptied first, unless the same step was interrupted and takes up what it finds.
            report: turns a line of the command's output into what the terminal shows, or None.
            settings: what else it depends on.

        Raises:
            UserError: the command failed; names its log.
        """
        self.number += 1
        key = self._key(work, inputs, settings)
        stamp, begun = self.stamps / f"{name}.json", self.stamps / f"{name}.begun"
        head = f"[{self.number}/{self.total}] {title}"
        done = json.loads(stamp.read_text()) if stamp.is_file() else {}
        if done.get("key") == key and all(path.exists() for path in outputs):
            self.seconds += done["seconds"]
            self.all_new = False
            print(f"{head}: reused", flush=True)
            return
        print(head, end="\n" if report else "", flush=True)
        stamp.unlink(missing_ok=True)
        interrupted = begun.is_file() and begun.read_text() == key
        if folder is not None and not interrupted and folder.exists():
            shutil.rmtree(folder)
        begun.write_text(key)
        started = time.monotonic()
        if callable(work):
            work()
        else:
            self._execute(name, work, report)
        missing = [shown(path) for path in outputs if not path.exists()]
        if missing:
            raise UserError(f"the step {name!r} left no {missing[0]}; its log is {shown(self.logs / name)}.log")
        seconds = time.monotonic() - started
        self.seconds += seconds
        stamp.write_text(json.dumps({"key": key, "seconds": seconds}))
        begun.unlink()
        print(f"{'    done' if report else ':'} {'in ' if report else ''}{seconds:.1f} s", flush=True)

    def _key(self, work: Sequence[str] | Callable[[], object], inputs: Sequence[Path], settings: object) -> str:
        """Return a digest of all that a step depends on, the same wherever the folders lie."""
        words = [] if callable(work) else [self._without_place(word) for word in work]
        contents = [hashlib.sha256(path.read_bytes()).hexdigest() for path in inputs]
        depends = [megagate.__version__, sys.version, words, contents, settings]
        return hashlib.sha256(json.dumps(depends).encode()).hexdigest()

    def _without_place(self, word: str) -> str:
        for place in (self.output, ROOT):
            word = word.replace(str(place), "").replace(shown(place), "") if place != Path.cwd() else word
        return word.removeprefix("/")

    def _execute(self, name: str, command: Sequence[str], report: Callable[[str], str | None] | None) -> None:
        """Run a command, its output in a log and what `report` makes of it on the terminal."""
        log = self.logs / f"{name}.log"

        def show(line: str) -> None:
            news = report(line) if report else None
            if news:
                print(f"    {news}", flush=True)

        # No GPU, and one thread for each process.
        variables = environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        status = run_logged(command, log, variables, show)
        if status:
            print(flush=True)
            raise UserError(f"the step {name!r} failed with exit status {status}: its log {shown(log)} says why")


def training_report(tokens_per_iteration: int) -> Callable[[str], str | None]:
    """Return a function that shortens Megatron's line of an iteration, which has some twenty numbers."""

    def report(line: str) -> str | None:
        seen = iteration_of(line)
        if seen is None:
            return line.strip() if line.startswith("megagate: gate") or "loading" in line[:40] else None
        speed = tokens_per_iteration / seen.milliseconds * 1000
        return f"iteration {seen.number:>4} of {seen.total}   loss {seen.loss:.3f}   {speed:>6.0f} tokens/s"

    return report
