"""One cluster for all tests of this folder."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.cluster import Cluster, missing, running


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    lacking = missing()
    if lacking and os.environ.get("CI") == "true":
        pytest.fail(f"{', '.join(lacking)} not found: .ci/run installs slurm-wlm and munge")
    if lacking:
        pytest.skip(f"{', '.join(lacking)} not found: install slurm-wlm and munge to run this test")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, running(Path(folder)) as started:
        yield started
