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


def pytest_sessionfinish() -> None:
    distributed.shutdown()
