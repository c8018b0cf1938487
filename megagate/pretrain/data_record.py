"""What decides which samples a run sees and in which order, kept in its checkpoints, and what of it has changed.

A run that is resumed goes on after the samples that it has consumed, counted in an order that is built anew. With
another seed, blend, split or sequence length, or with more epochs, it would repeat some samples and never see others.
"""

import argparse
import math
import os
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import _get_size_per_split_per_dataset
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import normalize
from megatron.training.utils import get_blend_and_blend_per_split

from megagate.data.index_file import open_index
from megagate.data.validate import REMOTE, fingerprint
from megagate.pretrain import fim

Change = tuple[str, str]
"""What something was and what it is now, in words."""
PARTS = ("train", "valid", "test")
KINDS = {0: "mock data", 1: "one blend that --split divides", 3: "a blend for each part of the split"}
LAST_EPOCH_APART = 0.8
"""Megatron shuffles a last epoch apart of which it needs less than this (GPTDataset)."""


def record(args: argparse.Namespace) -> dict[str, Any]:
    """Return what `args`, validated, say about the data, in plain types, for the checkpoints' arguments."""
    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [blend] if blend is not None else list(per_split or [])
    local = [([_absolute(path) for path in entry[0]], entry[1]) if entry else ([], None) for entry in blends]
    settings = {
        "--seq-length": args.seq_length,
        "--seed": args.seed,
        "--split": args.split and args.split.replace(" ", ""),
        "--dataloader-type": args.dataloader_type,
        "--fim-data": fim.describe(args),
    }
    return {
        "settings": settings,
        "blends": [[paths, weights] for paths, weights in local],
        "fingerprints": {path: fingerprint(path) for paths, _ in local for path in paths},
        "length": f"--train-samples {args.train_samples}"
        if args.train_samples
        else f"--train-iters {args.train_iters} x {args.global_batch_size}",
        "samples": _samples(args, *local[0]) if local else None,
    }


def _absolute(path: str) -> str:
    return path if path.startswith(REMOTE) else os.path.abspath(path)


def _samples(args: argparse.Namespace, paths: list[str], weights: list[float] | None) -> list[int | None] | None:
    """Return how many training samples Megatron asks of each dataset: None for one epoch."""
    if args.phase_transition_iterations or not (args.train_samples or args.train_iters):
        return None
    total = args.train_samples or args.train_iters * args.global_batch_size
    is_shared = args.data_path is not None or args.data_args_path is not None
    if len(paths) == 1 and (weights is None or not is_shared):
        return [total]
    if weights is None:
        return [None] * len(paths)
    sizes = _get_size_per_split_per_dataset(normalize(weights), [total], surplus=args.mid_level_dataset_surplus)
    return [size for (size,) in sizes]


def changes(saved: dict[str, Any], here: dict[str, Any]) -> list[Change]:
    """Return what differs between two records, the most telling first."""
    found = [
        (f"{name} {value}", str(here["settings"][name]))
        for name, value in saved["settings"].items()
        if here["settings"][name] != value and not (name == "--split" and _same_split(value, here["settings"][name]))
    ]
    found += _blend_changes(saved, here)
    return found or _order_changes(saved, here)


def _same_split(first: str | None, second: str | None) -> bool:
    return None not in (first, second) and parse_and_normalize_split(first) == parse_and_normalize_split(second)


def _blend_changes(saved: dict[str, Any], here: dict[str, Any]) -> list[Change]:
    counts = len(saved["blends"]), len(here["blends"])
    if counts[0] != counts[1]:
        return [(KINDS[counts[0]], KINDS[counts[1]])]
    found = []
    for part, (paths, weights), (paths_here, weights_here) in zip(PARTS, saved["blends"], here["blends"], strict=False):
        of = f"of the {part} blend" if counts[0] > 1 else "of the blend"
        if len(paths) != len(paths_here):
            found.append((f"{len(paths)} datasets {of}", str(len(paths_here))))
            continue
        for number, (path, path_here) in enumerate(zip(paths, paths_here, strict=True)):
            contents = saved["fingerprints"][path], here["fingerprints"][path_here]
            if contents[0] and contents[0] == contents[1]:
                continue  # the same data, wherever they are now
            if path != path_here:
                found.append((f"{path} as dataset {number + 1} {of}", path_here))
            elif contents[0] != contents[1]:
                found.append((f"{path} of size and digest {contents[0]}", contents[1]))
        if (weights and normalize(weights)) != (weights_here and normalize(weights_here)):
            found.append((f"the weights {_words(weights)} {of}", _words(weights_here)))
    return found


def _words(weights: list[float] | None) -> str:
    return "none" if weights is None else " ".join(f"{weight:g}" for weight in weights)


def _order_changes(saved: dict[str, Any], here: dict[str, Any]) -> list[Change]:
    """Return the first dataset that another length of the run would shuffle otherwise."""
    counts = saved["samples"], here["samples"]
    if counts[0] is None or counts[1] is None or counts[0] == counts[1]:
        return []
    split = here["settings"]["--split"] if len(here["blends"]) == 1 else "1,0,0"
    first, last = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))[0] or (0.0, 0.0)
    for path, before, now in zip(here["blends"][0][0], *counts, strict=True):
        if before == now or before is None or now is None or path.startswith(REMOTE):
            continue
        index = open_index(path)
        begin, end = (round(part * len(index.lengths)) for part in (first, last))
        tokens = index.tokens_of_first(end) - index.tokens_of_first(begin)
        plans = [epochs(count, tokens, here["settings"]["--seq-length"]) for count in (before, now)]
        if plans[0] != plans[1]:
            return [
                (
                    f"{saved['length']}, for which the {tokens} training tokens of {path} are shuffled as "
                    f"{_describe(plans[0])}",
                    f"{here['length']} and {_describe(plans[1])}, which changes the order of samples already seen",
                )
            ]
    return []


def epochs(samples: int, tokens: int, sequence_length: int) -> tuple[int, bool]:
    """Return over how many epochs Megatron shuffles a dataset, and whether it shuffles the last of them apart.

    The order of all samples follows from these two, the documents and the seed (GPTDataset, `_get_num_epochs` and
    `_build_document_sample_shuffle_indices`).

    Args:
        samples: how many are asked for.
        tokens: how many one epoch has.
        sequence_length: tokens of a sample, which reads one more.
    """
    count = max(1, math.ceil((samples * sequence_length + 1) / tokens)) if tokens else 1
    if count == 1:
        return 1, False
    before_last = ((count - 1) * tokens - 1) // sequence_length
    return count, samples - before_last < int(LAST_EPOCH_APART * ((tokens - 1) // sequence_length))


def _describe(plan: tuple[int, bool]) -> str:
    count, is_apart = plan
    return f"{count} epoch{'s' * (count > 1)}{' with the last one apart' if is_apart else ''}"
