"""Megatron's dataset and blend, with an index cache that is whole and never stale, and reads of what is asked for."""

import copy
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, _MMapBinReader
from megatron.training.datasets.fim_dataset import GPTFIMDatasetConfig


@dataclass
class DatasetConfig(GPTFIMDatasetConfig):
    """Megatron's configuration of the datasets, with what tells their contents apart."""

    fingerprints: list[str] = field(default_factory=list)
    """One for each dataset of the blends; part of the key of Megatron's index cache, which knows only their paths."""


class CheckedGPTDataset(GPTDataset):
    """Megatron's dataset, which counts epochs without end where its part of the split has no tokens.

    Its index cache also goes stale, without a word, when data are preprocessed again to the same path.
    """

    config: DatasetConfig

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if not self.config.drop_last_partial_validation_sequence:
            # The loss mask differs between samples, and Megatron keeps that of the first.
            self.masks_and_position_ids_are_cacheable = False
        # The number of each document, which Megatron reads to build the index and never after.
        self.indices: numpy.ndarray = self.indices[:0].copy()
        read_exactly(self.dataset)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the files again in a process that does not inherit them, a loader worker that is spawned."""
        self.__dict__.update(state)
        read_exactly(self.dataset)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "fingerprints"]

    def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
        if num_tokens_per_epoch < 1:
            raise ValueError(f"the {self.index_split.name} part of {self.dataset_path} holds no document")
        return super()._get_num_epochs(num_tokens_per_epoch)

    def _build_document_sample_shuffle_indices(self) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """Complete the index cache where it lacks a file, on any rank, then load it as Megatron does.

        Megatron writes on rank 0 only, so that a rank on another file system finds nothing, and writes in place, so
        that a job killed meanwhile leaves a part of a file that the next one takes for a whole one.
        """
        kind = type(self).__name__
        folder = self.config.path_to_cache or os.path.join(self.dataset.path_prefix, "cache", f"{kind}_indices")
        build = super()._build_document_sample_shuffle_indices
        _complete_cache(self, folder, self.index_split.name, ("document_index", "sample_index", "shuffle_index"), build)
        return build()


class ExactReader(_MMapBinReader):
    """Reads of a .bin file what is asked for.

    At the first touch of a mapped page the kernel reads around it, on some disks megabytes for a sample of kilobytes.
    """

    def read(self, dtype: type[numpy.number], count: int, offset: int) -> numpy.ndarray:
        """Return `count` tokens from byte `offset` on, as Megatron does, once all of them are on their way."""
        start = offset - offset % mmap.PAGESIZE
        size = int(offset + count * DType.size(dtype) - start)
        self._bin_buffer_mmap._mmap.madvise(mmap.MADV_WILLNEED, int(start), size)
        tokens: numpy.ndarray = super().read(dtype, count, offset)
        return tokens


def read_exactly(dataset: IndexedDataset) -> None:
    """Have `dataset`, if it is mapped into memory, read by `ExactReader`."""
    if type(dataset.bin_reader) is _MMapBinReader:
        dataset.bin_reader = ExactReader(f"{dataset.path_prefix}.bin")


class CheckedBlendedDataset(BlendedDataset):
    """Megatron's blend, whose index cache has the same weaknesses."""

    def _build_indices(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        folder, build = self.config.path_to_cache, super()._build_indices
        if folder:  # else it is built in memory
            _complete_cache(self, folder, self.split.name, ("dataset_index", "dataset_sample_index"), build)
        return build()


class CheckedBuilder(BlendedMegatronDatasetBuilder):
    """Megatron's builder, with `CheckedBlendedDataset`."""

    @staticmethod
    def build_generic_dataset(cls: Any, *args: Any) -> Any:
        """Build `cls` where Megatron does."""
        kind = CheckedBlendedDataset if cls is BlendedDataset else cls
        return BlendedMegatronDatasetBuilder.build_generic_dataset(kind, *args)


def _complete_cache(
    dataset: CheckedGPTDataset | CheckedBlendedDataset,
    folder: str,
    split: str,
    names: tuple[str, ...],
    build: Callable[[], tuple[numpy.ndarray, ...]],
) -> None:
    """Write the files `names` of a dataset's index cache, whole, unless all are there."""
    config = dataset.config
    if config.defer_npy_index_mmap or config.fast_cache_load:
        return
    base = os.path.join(folder, f"{dataset.unique_description_hash}-{type(dataset).__name__}-{split}")
    arrays = [f"{base}-{name}.npy" for name in names]
    description = f"{base}-description.txt"
    if all(map(os.path.isfile, [description, *arrays])):
        return
    dataset.config = copy.copy(config)
    dataset.config.path_to_cache = ""  # Megatron then builds in memory, on every rank
    built = build()
    dataset.config = config
    os.makedirs(folder, exist_ok=True)
    for path, array in zip(arrays, built, strict=True):
        _write_whole(path, array)
    _write_whole(description, dataset.unique_description)


def _write_whole(path: str, content: numpy.ndarray | str) -> None:
    """Write beside `path` and rename, so that a file of this name is never a part of one."""
    part = f"{path}.{os.uname().nodename}.{os.getpid()}.part"
    with open(part, "wb") as stream:
        if isinstance(content, str):
            stream.write(content.encode())
        else:
            numpy.save(stream, content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, path)
