"""Runs of the trainer that several tests start from, each made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.training import SMALL, train_in_rank
from tests.distributed import run_distributed

Trained = Callable[..., Path]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A function that trains 4 steps and returns the directory with the checkpoints of steps 2 and 4."""
    made: dict[str, Path] = {}

    def train(world_size: int, flags: list[str], **options: Any) -> Path:
        key = repr((world_size, flags, options))
        if key not in made:
            directory = tmp_path_factory.mktemp("straight")
            argv = [*SMALL, *flags, "--save", str(directory), "--save-interval", "2"]
            run_distributed(train_in_rank, world_size, argv, timeout=100, **options)
            made[key] = directory
        return made[key]

    return train
