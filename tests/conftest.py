"""What every test gets: one thread per process, repeatable property tests, and ranks that end with the session."""

import os

# Before anything imports torch. Parallel tests on few cores only lose time to more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

# Before anything imports Megatron, in whatever order the test modules import.
import megagate.platform  # noqa: F401
from tests import distributed, help_texts

# The same examples on every run and machine; a slow machine is no failure.
hypothesis.settings.register_profile("megagate", deadline=None, derandomize=True)
hypothesis.settings.load_profile("megagate")


PAIRS = "preset on layout"
"""The property under which a test records which gate presets it compared on which layouts."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a name that differs from process to process, which would keep the tests from being shared out."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid} is named after an address: give it ids")


def pytest_runtest_setup() -> None:
    help_texts.remember()


def pytest_terminal_summary(terminalreporter) -> None:
    passed = terminalreporter.stats.get("passed", [])
    lists = [value for report in passed for name, value in report.user_properties if name == PAIRS]
    if lists:
        pairs = {pair for compared in lists for pair in compared}
        terminalreporter.write_line(f"{len(pairs)} pairs of gate preset and layout agree with one process")


def pytest_sessionfinish() -> None:
    distributed.shutdown()
