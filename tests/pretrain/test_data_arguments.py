"""Data flags that would do nothing, or that end in a traceback when they are missing, are refused."""

import pytest

from megagate.errors import UserError
from megagate.pretrain.arguments import parse, read
from tests.training import TINY


def test_position_reset_needs_absolute_positions() -> None:
    with pytest.raises(UserError, match="--reset-position-ids has no effect"):
        read([*TINY, "--reset-position-ids", "--position-embedding-type", "rope"])


def test_missing_evaluation_interval() -> None:
    at = TINY.index("--eval-interval")
    with pytest.raises(UserError, match="--eval-interval is not given"):
        parse([*TINY[:at], *TINY[at + 2 :]])
