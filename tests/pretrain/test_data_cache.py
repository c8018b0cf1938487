"""The index cache is built wherever it is missing, and a file in it is always whole."""

from pathlib import Path

import torch

from tests.distributed import run_distributed
from tests.pretrain.indexed import training_dataset, write_dataset


def samples_in_rank(prefix: Path, caches: list[Path]) -> list[list[int]]:
    cache = str(caches[torch.distributed.get_rank()])
    train = training_dataset(50, blend=([str(prefix)], None), path_to_cache=cache)
    assert len(train.indices) == 0  # a number per document, in every process, would be all that it owns
    return [train[index]["tokens"].tolist() for index in range(50)]


def test_two_ranks_without_a_common_cache(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data")
    caches = [tmp_path / "first", tmp_path / "second"]
    first, second = run_distributed(samples_in_rank, 2, tmp_path / "data", caches, timeout=60)
    assert first == second
    names = [sorted(path.name for path in cache.iterdir()) for cache in caches]
    assert names[0] == names[1] and len(names[0]) == 4  # no part is left
    caches[0].joinpath(next(name for name in names[0] if "sample_index" in name)).unlink()  # as a killed job leaves it
    assert run_distributed(samples_in_rank, 2, tmp_path / "data", caches, timeout=60) == [first, first]
