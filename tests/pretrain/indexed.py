"""Small .bin/.idx datasets, and Megatron's datasets over them without a trainer."""

from pathlib import Path
from typing import Any

import numpy
import torch

from megagate.pretrain.checked_datasets import CheckedBuilder, CheckedGPTDataset, DatasetConfig
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
        """The command line; a length in samples replaces that in iterations."""
        argv = [flag for flag in super().argv if flag != "--mock-data"]
        while "--train-samples" in argv and "--train-iters" in argv:
            at = argv.index("--train-iters")
            del argv[at : at + 2]
        return argv


def whole_sequences(part: torch.Tensor) -> torch.Tensor:
    """Return [b, S] of what each context-parallel rank has as [b, s]."""
    from megatron.core import parallel_state

    from megagate.model.backends.attention import zigzag_to_sequence

    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(size)]
    torch.distributed.all_gather(parts, part.contiguous(), group=parallel_state.get_context_parallel_group())
    return zigzag_to_sequence(torch.cat(parts, dim=1).T, size).T


def write_dataset(prefix: Path, documents: int = 100, seed: int = 1) -> int:
    """Write documents of 1 to 29 random tokens, and return how many tokens there are."""
    generator = numpy.random.default_rng(seed)
    lengths = generator.integers(1, 30, documents)
    datasets.write_dataset(prefix, [generator.integers(1, 255, length) for length in lengths])
    return int(lengths.sum())


def training_dataset(
    samples: int, sequence_length: int = 8, kind: type[CheckedGPTDataset] = CheckedGPTDataset, **options: Any
) -> Any:
    """Return the training part of what Megatron's builder makes for this many samples."""
    use_prebuilt_index_builder()
    settings: dict[str, Any] = {
        "random_seed": 1,
        "split": "1,0,0",
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "tokenizer": Tokenizer(),
    }
    config = DatasetConfig(sequence_length=sequence_length, mid_level_dataset_surplus=0.005, **settings | options)
    return CheckedBuilder(kind, [samples, 0, 0], lambda: True, config).build()[0]
