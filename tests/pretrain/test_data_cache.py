"""The index cache is built wherever it is missing, and a file in it is always whole."""

from pathlib import Path

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megagate.pretrain.datasets import CheckedGPTDataset, DatasetConfig
from megagate.pretrain.train import use_prebuilt_index_builder
from tests.distributed import run_distributed


class Tokenizer:
    """What Megatron's dataset asks of a tokenizer."""

    vocab_size, eod, pad, unique_identifiers = 300, 0, 299, {"class": "test"}


def write_dataset(prefix: Path) -> None:
    generator = numpy.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for length in generator.integers(1, 30, 100):
        builder.add_document(torch.from_numpy(generator.integers(0, 299, length)), [int(length)])
    builder.finalize(f"{prefix}.idx")


def samples(rank: int, prefix: Path, caches: list[Path]) -> list[list[int]]:
    use_prebuilt_index_builder()
    config = DatasetConfig(
        random_seed=1,
        sequence_length=8,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(caches[rank]),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    train = BlendedMegatronDatasetBuilder(CheckedGPTDataset, [50, 0, 0], lambda: True, config).build()[0]
    assert len(train.indices) == 0  # a number per document, in every process, would be all that it owns
    return [train[index]["tokens"].tolist() for index in range(50)]


def samples_in_rank(prefix: Path, caches: list[Path]) -> list[list[int]]:
    return samples(torch.distributed.get_rank(), prefix, caches)


def test_two_ranks_without_a_common_cache(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data")
    caches = [tmp_path / "first", tmp_path / "second"]
    first, second = run_distributed(samples_in_rank, 2, tmp_path / "data", caches, timeout=60)
    assert first == second
    names = [sorted(path.name for path in cache.iterdir()) for cache in caches]
    assert names[0] == names[1] and len(names[0]) == 4  # no part is left
    caches[0].joinpath(next(name for name in names[0] if "sample_index" in name)).unlink()  # as a killed job leaves it
    assert run_distributed(samples_in_rank, 2, tmp_path / "data", caches, timeout=60) == [first, first]
