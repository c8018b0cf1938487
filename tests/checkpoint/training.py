"""A small model for the real trainer, run inside the ranks of `tests.distributed`, and what its checkpoints hold."""

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.training import EXPERTS, MODEL, RUN

SMALL = [
    *(flag for flag in [*MODEL, *EXPERTS, *RUN] if flag != "--use-distributed-optimizer"),
    *"--num-layers 4 --num-query-groups 2 --vocab-size 127 --gate-preset sdpa-headwise".split(),
    *"--train-iters 4 --lr-decay-style cosine --min-lr 1e-4 --lr-warmup-iters 1 --weight-decay 0.1".split(),
]
DISTRIBUTED = ["--use-distributed-optimizer"]


def train_in_rank(argv: list[str], without: str | None = None) -> None:
    """Train as the command line `argv` says.

    Args:
        argv: the command line.
        without: a mend of the optimizer or of the builder, or a patch of the platform, to do without.
    """
    from contextlib import nullcontext
    from unittest import mock

    from megagate.checkpoint import torch_adam
    from megagate.model import builder
    from megagate.platform import cpu
    from megagate.pretrain.arguments import parse
    from megagate.pretrain.train import train

    cpu.activate_training()
    args = parse(argv)
    torch_adam.apply()
    if without in torch_adam.MENDS:
        torch_adam.restore(without)
        try:
            train(args)
        finally:
            torch_adam.reapply(without)
        return
    context: Any = nullcontext()
    if without is not None and hasattr(builder, without):
        context = mock.patch.object(builder, without, lambda model: model)
    elif without is not None:
        context = cpu.without(without)
    with context:
        train(args)


def parse_in_rank(argv: list[str]) -> dict[str, Any]:
    """Parse the command line `argv`, and return which checkpoint it loads, and how."""
    from megagate.pretrain.arguments import parse

    args = vars(parse(argv))
    return {name: args[name] for name in ("load", "ckpt_step", "warm_start_from", "finetune", "no_load_optim")}


COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
OF_THE_LAYOUT = ("rng_state", "rerun_state_machine")
"""Beginnings of the keys that exist once for each rank, or are reset where the layout changes."""


def differences(reference: Path, checkpoint: Path, tolerance: float | None = None) -> list[str]:
    """Return in what two checkpoints differ, a line for each difference.

    Args:
        reference: directory of a checkpoint in Megatron's distributed format.
        checkpoint: another one.
        tolerance: None to compare bit for bit; else what the layouts have of their own is left out, and numbers may
            differ by this much of the largest in the same tensor.
    """
    first, second = dict(_leaves(contents(reference))), dict(_leaves(contents(checkpoint)))
    if tolerance is not None:
        first, second = (
            {key: leaf for key, leaf in leaves.items() if not key.startswith(OF_THE_LAYOUT)}
            for leaves in (first, second)
        )
    lines = [f"{key} is only in one" for key in sorted(first.keys() ^ second.keys())]
    for key in sorted(first.keys() & second.keys()):
        problem = _difference(key, first[key], second[key], tolerance)
        if problem:
            lines.append(f"{key}: {problem}")
    assert sum(isinstance(leaf, torch.Tensor) for leaf in first.values()) > 30, "the model is missing"
    return lines


def contents(checkpoint: Path) -> dict[str, Any]:
    """Return everything that the checkpoint holds by its key there, and of its arguments the counters."""
    import megatron.core.dist_checkpointing.serialization  # noqa: F401  # allows torch.load what checkpoints hold
    from torch.distributed import checkpoint as distributed_checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = distributed_checkpoint.FileSystemReader(checkpoint)
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else io.BytesIO()
        for key, entry in reader.read_metadata().state_dict_metadata.items()
    }
    distributed_checkpoint.load(state, storage_reader=reader, no_dist=True)
    # In the format by buckets, what lies between the parameters is memory that nobody has written to; a step taken from
    # wrong moments shows in the weights.
    state = {key: value for key, value in state.items() if ".gbuf_idx_" not in key}
    for key, value in state.items():
        if isinstance(value, io.BytesIO):
            state[key] = torch.load(value, weights_only=True)
    (common,) = state.pop("common_state/shard_0_1")
    args = vars(common.pop("args"))
    return {**state, **common, "args": {name: args[name] for name in COUNTERS}}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of nested dicts and sequences."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, entry in items:
        yield from _leaves(entry, f"{path}/{key}" if path else str(key))


def _difference(key: str, first: Any, second: Any, tolerance: float | None) -> str | None:
    if isinstance(first, np.ndarray):
        first, second = torch.from_numpy(first), torch.from_numpy(second)
    if isinstance(first, torch.Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return f"{first.dtype} {tuple(first.shape)} and {second.dtype} {tuple(second.shape)}"
        if tolerance is None:
            return None if torch.equal(first, second) else f"differs by {(first - second).abs().max()}"
        if ".exp_avg_sq." in key:
            first, second = first.sqrt(), second.sqrt()  # of the size of gradients, like the first moment
        error = (first - second).abs().max() / first.abs().max().clamp(min=1e-30)
        return f"differs by {error:.1e} of the largest" if error > tolerance else None
    if tolerance is not None and isinstance(first, float):
        return None if math.isclose(first, second, rel_tol=tolerance) else f"{first} and {second}"
    return None if first == second else f"{first} and {second}"
