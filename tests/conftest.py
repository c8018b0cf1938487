"""What every test gets: one thread per process, repeatable property tests, and ranks that end with the session."""

import os

# Before anything imports torch. Parallel tests on few cores only lose time to more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis

# Before anything imports Megatron, in whatever order the test modules import.
import megagate.platform  # noqa: F401
from tests import distributed

# The same examples on every run and machine; a slow machine is no failure.
hypothesis.settings.register_profile("megagate", deadline=None, derandomize=True)
hypothesis.settings.load_profile("megagate")


PAIRS = "preset on layout"
"""The property under which a test records which gate presets it compared on which layouts."""


def pytest_terminal_summary(terminalreporter) -> None:
    passed = terminalreporter.stats.get("passed", [])
    lists = [value for report in passed for name, value in report.user_properties if name == PAIRS]
    if lists:
        pairs = {pair for compared in lists for pair in compared}
        terminalreporter.write_line(f"{len(pairs)} pairs of gate preset and layout agree with one process")


def pytest_sessionfinish() -> None:
    distributed.shutdown()
