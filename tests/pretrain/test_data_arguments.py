"""Data flags that would do nothing are refused, and one whose absence Megatron does not expect has a default."""

import pytest

from megagate.errors import UserError
from megagate.pretrain.arguments import read
from tests.training import TINY


def test_position_reset_needs_absolute_positions() -> None:
    with pytest.raises(UserError, match="--reset-position-ids has no effect"):
        read([*TINY, "--reset-position-ids", "--position-embedding-type", "rope"])


def test_no_sharding_is_refused() -> None:
    with pytest.raises(UserError, match="--no-data-sharding has no effect"):
        read([*TINY, "--no-data-sharding"])


def test_the_evaluation_interval_has_a_default() -> None:
    at = TINY.index("--eval-interval")
    assert read([*TINY[:at], *TINY[at + 2 :]]).eval_interval == 1000
    assert read([*TINY, "--eval-interval", "7"]).eval_interval == 7
