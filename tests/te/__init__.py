"""Tests with the real Transformer Engine: `make te-env` installs it beside .venv, `make test-te` runs these."""

from importlib.metadata import distributions

import pytest

INSTALLED = {distribution.name.lower().replace("_", "-") for distribution in distributions()}
NEEDED = pytest.mark.skipif(
    "transformer-engine-torch" not in INSTALLED,
    reason="Transformer Engine is not installed here: make te-env && make test-te",
)
