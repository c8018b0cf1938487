"""The datasets that the training loop reads: Megatron's blended .bin/.idx files, or its mock data."""

import argparse
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from megatron.core import mpu
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megagate.errors import UserError, reason


@dataclass
class DatasetConfig(GPTDatasetConfig):
    """Megatron's configuration of the datasets, with what tells their contents apart."""

    fingerprints: list[str] = field(default_factory=list)
    """One for each dataset of the blends; part of the key of Megatron's index cache, which knows only their paths."""


def dataset_prefixes(args: argparse.Namespace) -> list[str]:
    """Return the prefix of every dataset that the arguments name, each once; empty for mock data."""
    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [entry for entry in [blend, *(per_split or [])] if entry is not None]
    return list(dict.fromkeys(prefix for prefixes, _ in blends for prefix in prefixes))


def _common_record(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the first rank found out about the data, on every rank; only the first call communicates.

    Raises:
        UserError: the data are others on this machine.
    """
    if not args.data_record_is_common:
        own, box = args.data_record, [args.data_record]
        torch.distributed.broadcast_object_list(box)
        args.data_record, args.data_record_is_common = box[0], True
        for path, found in (own or {"fingerprints": {}})["fingerprints"].items():
            expected = args.data_record["fingerprints"].get(path)
            if found != expected:
                raise UserError(
                    f"{path} is of size and digest {found} on {os.uname().nodename}, but {expected} on the first "
                    "machine: copy the same files to all of them"
                )
    record: dict[str, Any] = args.data_record
    return record


def dataset_config() -> DatasetConfig:
    """Return the dataset configuration for the global arguments."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return DatasetConfig(
        fingerprints=list(_common_record(args)["fingerprints"].values()),
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        object_storage_cache_path=args.object_storage_cache_path,
    )


def _reads_data(vp_stage: int | None) -> bool:
    """Whether this rank reads samples: the first tensor-parallel rank of the pipeline's ends."""
    at_an_end = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage) or mpu.is_pipeline_last_stage(
        ignore_virtual=False, vp_stage=vp_stage
    )
    return at_an_end and mpu.get_tensor_model_parallel_rank() == 0


class CheckedGPTDataset(GPTDataset):
    """Megatron's dataset, which counts epochs without end where its part of the split has no tokens.

    Its index cache also goes stale, without a word, when data are preprocessed again to the same path.
    """

    config: DatasetConfig

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # The number of each document, which Megatron reads to build the index and never after.
        self.indices: numpy.ndarray = self.indices[:0].copy()

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


def dataset_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Build the train, validation and test datasets.

    Args:
        num_samples: how many samples each is asked for.
        vp_stage: the virtual pipeline stage that reads them.

    Returns:
        Three datasets, None on ranks that read none.

    Raises:
        UserError: a dataset is too small for what is asked of it.
    """
    config = dataset_config()
    kind = MockGPTDataset if config.mock else CheckedGPTDataset
    try:
        datasets = CheckedBuilder(kind, num_samples, lambda: _reads_data(vp_stage), config).build()
    except (AssertionError, ValueError, IndexError) as error:
        raise UserError(
            f"the datasets cannot be built: {reason(error)} (sequences of "
            f"{config.sequence_length} tokens, split {config.split}; a part of the split may hold too few documents)"
        ) from error
    # Of a blend of which no sample is asked, as with --eval-iters 0, Megatron could not make a loader.
    return [None if isinstance(dataset, BlendedDataset) and not len(dataset) else dataset for dataset in datasets]


dataset_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it; it decides who builds
