"""The datasets that the training loop reads: Megatron's blended .bin/.idx files, or its mock data."""

import argparse
import os
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import MockGPTDataset
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megagate.errors import UserError, reason
from megagate.pretrain import fim
from megagate.pretrain.checked_datasets import CheckedBuilder, CheckedGPTDataset, DatasetConfig


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
        drop_last_partial_validation_sequence=not args.full_validation,
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
        **(fim.settings(args) if args.fim_data else {}),
    )


def _reads_data(vp_stage: int | None) -> bool:
    """Whether this rank reads samples: the first tensor-parallel rank of the pipeline's ends."""
    at_an_end = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage) or mpu.is_pipeline_last_stage(
        ignore_virtual=False, vp_stage=vp_stage
    )
    return at_an_end and mpu.get_tensor_model_parallel_rank() == 0


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
    kind = MockGPTDataset if config.mock else fim.FimDataset if get_args().fim_data else CheckedGPTDataset
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
