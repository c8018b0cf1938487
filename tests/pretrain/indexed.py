"""Small .bin/.idx datasets, and Megatron's datasets over them without a trainer."""

from pathlib import Path
from typing import Any

import numpy

from megagate.pretrain.datasets import CheckedBuilder, CheckedGPTDataset, DatasetConfig
from megagate.pretrain.train import use_prebuilt_index_builder
from tests.data import datasets
from tests.model.training import Case


class Tokenizer:
    """What Megatron's dataset asks of a tokenizer."""

    vocab_size, eod, pad, unique_identifiers = 300, 0, 299, {"class": "test"}


class DataCase(Case):
    """A case that reads files."""

    @property
    def argv(self) -> list[str]:
        """The command line."""
        return [flag for flag in super().argv if flag != "--mock-data"]


def write_dataset(prefix: Path, documents: int = 100, seed: int = 1) -> int:
    """Write documents of 1 to 29 random tokens, and return how many tokens there are."""
    generator = numpy.random.default_rng(seed)
    lengths = generator.integers(1, 30, documents)
    datasets.write_dataset(prefix, [generator.integers(1, 255, length) for length in lengths])
    return int(lengths.sum())


def training_dataset(samples: int, sequence_length: int = 8, **options: Any) -> Any:
    """Return the training part of what Megatron's builder makes for this many samples."""
    use_prebuilt_index_builder()
    settings: dict[str, Any] = {
        "random_seed": 1,
        "split": "1,0,0",
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    config = DatasetConfig(
        sequence_length=sequence_length, tokenizer=Tokenizer(), mid_level_dataset_surplus=0.005, **settings | options
    )
    return CheckedBuilder(CheckedGPTDataset, [samples, 0, 0], lambda: True, config).build()[0]
