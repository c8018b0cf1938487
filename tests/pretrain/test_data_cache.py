"""The index cache is built wherever it is missing, and a file in it is always whole; reads are exact."""

import pickle
from pathlib import Path

import pytest
import torch
from megatron.core.datasets.indexed_dataset import _MMapBinReader

from megagate.pretrain.checked_datasets import ExactReader
from tests.distributed import run_distributed
from tests.pretrain.indexed import training_dataset, write_dataset


def samples_in_rank(blend: tuple[list[str], list[float] | None], caches: list[Path]) -> list[list[int]]:
    train = training_dataset(50, blend=blend, path_to_cache=str(caches[torch.distributed.get_rank()]))
    for dataset in getattr(train, "datasets", [train]):
        assert len(dataset.indices) == 0  # a number per document, in every process, would be all that it owns
    return [train[index]["tokens"].tolist() for index in range(50)]


@pytest.mark.parametrize(("weights", "files"), [(None, 4), ([0.7, 0.3], 4 + 4 + 3)])
def test_two_ranks_without_a_common_cache(tmp_path: Path, weights: list[float] | None, files: int) -> None:
    prefixes = [str(tmp_path / name) for name in ("a", "b")][: len(weights or [1])]
    for seed, prefix in enumerate(prefixes):
        write_dataset(Path(prefix), seed=seed)
    caches = [tmp_path / "first", tmp_path / "second"]
    first, second = run_distributed(samples_in_rank, 2, (prefixes, weights), caches, timeout=60)
    assert first == second
    names = [sorted(path.name for path in cache.iterdir()) for cache in caches]
    assert names[0] == names[1] and len(names[0]) == files  # no part is left
    for name in names[0]:
        if "sample_index" in name:
            caches[0].joinpath(name).unlink()  # as a killed job leaves it
    assert run_distributed(samples_in_rank, 2, (prefixes, weights), caches, timeout=60) == [first, first]


@pytest.mark.parametrize("weights", [None, [0.7, 0.3]])
def test_a_dataset_can_be_sent_to_another_process(tmp_path: Path, weights: list[float] | None) -> None:
    prefixes = [str(tmp_path / name) for name in ("a", "b")][: len(weights or [1])]
    for seed, prefix in enumerate(prefixes):
        write_dataset(Path(prefix), seed=seed)
    train = training_dataset(50, blend=(prefixes, weights), path_to_cache=str(tmp_path / "cache"))
    received = pickle.loads(pickle.dumps(train))
    for dataset in getattr(received, "datasets", [received]):
        assert type(dataset.dataset.bin_reader) is ExactReader
    assert [received[place]["tokens"].tolist() for place in range(50)] == [
        train[place]["tokens"].tolist() for place in range(50)
    ]


def test_exact_reads_are_megatrons(tmp_path: Path) -> None:
    tokens = torch.randint(0, 1 << 15, (40000,), dtype=torch.int16).numpy()
    tokens.tofile(tmp_path / "a.bin")
    readers = [kind(str(tmp_path / "a.bin")) for kind in (ExactReader, _MMapBinReader)]
    for offset, count in ((0, 40000), (0, 1), (2 * 39999, 1), (4094, 3), (4096, 2048), (8000, 0)):
        exact, megatrons = (reader.read(tokens.dtype.type, count, offset) for reader in readers)
        assert exact.tolist() == megatrons.tolist() == tokens[offset // 2 : offset // 2 + count].tolist()
        del exact, megatrons  # views of what the readers close
