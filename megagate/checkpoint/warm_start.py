"""Start a gated model from a checkpoint of an ungated one (`--gate-warm-start`).

The gate keeps its initial values, everything else is the checkpoint's, bit for bit, and optimizer, random state and
iteration start anew, as with Megatron's `--finetune`. Only the first start of a run is a warm one: once the run has
saved a checkpoint of its own, the same command line goes on from that.

The gate lies inside each KV group's block of linear_qkv (see `megagate.gate.layout`), so a rank's rows of the gated
weight are not a range of the checkpoint's. Each rank therefore reads the blocks of whole groups, one where several
ranks share it, and puts their rows into the places that are not the gate's.

Letters in shapes: q query heads, g KV groups, r = q/g, d channels per head, H hidden size.
"""

import argparse
import os
import re
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor

from megagate.checkpoint.load import TRACKER, checkpoint_arguments, choose_checkpoint, find_complete
from megagate.errors import UserError
from megagate.gate.config import GateInput, describe, gate_config_from_args
from megagate.gate.layout import QKVLayout, layout_from_args
from megagate.model.pattern import ATTENTION, layer_pattern

LINEAR_QKV = re.compile(r"\.self_attention\.linear_qkv\.(weight|bias)$")
GATE_PARAMETER = re.compile(r"\.self_attention\.(gate_constant|sdpa_norm_weight|linear_gate\.\w+)$")
"""Keys of what only gates have that are no rows of linear_qkv; see `megagate.model.attention`."""


def choose_start(args: argparse.Namespace) -> Path | None:
    """Decide which checkpoint the run starts from, as `choose_checkpoint` does, and whether it is a warm start.

    With `--gate-warm-start`, a gated checkpoint in `--load` or else in `--save` is the run's own, and the run goes on
    from it; `--ckpt-step` names a step of the ungated model. For a warm start, sets `args.warm_start_from` to the
    checkpoint, and `args.finetune`.

    Raises:
        UserError: there is nothing to start from, or `--save` is where the ungated model's checkpoints are.
    """
    args.warm_start_from = None
    if not args.gate_warm_start:
        return choose_checkpoint(args)
    if gate_config_from_args(args).is_baseline:
        raise UserError("--gate-warm-start has no effect without a gate: choose a --gate-preset, or leave it out")
    if gate_config_from_args(args).is_switch_head:
        raise UserError(
            "--gate-warm-start cannot make several experts of an ungated model's one projection: train a Switch-Head "
            "model from scratch, or choose another --gate-preset"
        )
    if args.finetune:
        raise UserError(
            "--finetune would start the gated run anew at each restart, and is implied at the first: leave it out "
            "beside --gate-warm-start"
        )
    directories = [Path(directory) for directory in (args.load, args.save) if directory is not None]
    held = {directory: _holds_gate(directory) for directory in directories if (directory / TRACKER).is_file()}
    own = next((directory for directory, is_gated in held.items() if is_gated), None)
    if own is not None:
        if args.ckpt_step is not None:
            _say(f"going on in {own}; --ckpt-step {args.ckpt_step} is for the warm start, which is over")
        args.load, args.ckpt_step = str(own), None
        return choose_checkpoint(args)
    checkpoint = choose_checkpoint(args)
    if checkpoint is None:
        raise UserError("--gate-warm-start needs a checkpoint of an ungated model: name it by --pretrained-checkpoint")
    if not _is_ungated_checkpoint(checkpoint):
        return checkpoint
    if args.save is not None and Path(args.save) in held:
        raise UserError(
            f"--save {args.save} holds checkpoints of an ungated model, among which the gated model's would lie: give "
            "another --save"
        )
    args.finetune = True
    args.warm_start_from = str(checkpoint)
    return checkpoint


def _holds_gate(directory: Path) -> bool:
    """Whether the newest complete checkpoint in a directory is of a gated model."""
    return not _is_ungated_checkpoint(find_complete(directory))


def _is_ungated_checkpoint(checkpoint: Path) -> bool:
    if not (checkpoint / "metadata.json").is_file():
        raise UserError(f"--gate-warm-start reads Megatron's torch_dist format, which {checkpoint} does not have")
    return gate_config_from_args(checkpoint_arguments(checkpoint)).is_baseline


def _say(sentence: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"megagate: {sentence}", flush=True)


_planned: dict[Path, QKVLayout] = {}
"""The checkpoint of this process's warm start, and the layout of the gated model."""


def prepare(args: argparse.Namespace) -> None:
    """Have `adapt_for` do the warm start that `choose_start` has found, if it has, and say so on the first rank.

    Args:
        args: validated.
    """
    _planned.clear()
    if args.warm_start_from is not None:
        layout = layout_from_args(args)
        _planned[Path(args.warm_start_from)] = layout
        _announce(args, layout)


def _announce(args: argparse.Namespace, layout: QKVLayout) -> None:
    """Say what is new, and what to expect of it."""
    gate, heads, groups = layout.gate, layout.num_attention_heads, layout.num_query_groups
    layers = layer_pattern(args).count(ATTENTION)
    each = gate.added_parameters(args.hidden_size, heads, groups, layout.kv_channels)
    place = f"{layout.gate_rows * groups} rows of linear_qkv" if layout.gate_rows else f"{each} of its own"
    if gate.input == GateInput.CONSTANT:
        values = f"{args.gate_init_bias or 0:g} at first"
    elif gate.sdpa_output_norm:
        values = "one at first"
    elif args.init_method_xavier_uniform:
        values = "drawn as in a new model"
    else:
        std = args.init_method_std if args.gate_init_std is None else args.gate_init_std
        values = f"drawn as in a new model, with standard deviation {std}"
    if gate.is_fused and args.gate_init_bias is not None:
        values += f", biases {args.gate_init_bias:g}"
    parameters = f"{layers * each:,} parameters in {layers} layers ({place} in each, {values})" if each else "none"
    found = " The paper found that a gate added late does not remove attention sinks (arXiv 2505.06708, A.7)"
    _say(
        f"warm start from {args.warm_start_from}; new parameters of {describe(gate)}: {parameters}; all other weights "
        f"are the checkpoint's; optimizer, random state and iteration start anew.{found if gate.has_gate else ''}"
    )


def adapt_for(state: dict[Any, Any], checkpoint: Path) -> None:
    """Let a gated model's sharded state dict ask for what an ungated one has, in place; the gate keeps its values.

    Args:
        state: Megatron's, with the keys of the checkpoint.
        checkpoint: what it is loaded from; any but that of the warm start needs nothing.
    """
    layout = _planned.get(checkpoint)
    if layout is None:
        return

    def entry(value: Any) -> Any:
        if isinstance(value, ShardedBase) and GATE_PARAMETER.search(value.key):
            return LocalNonpersistentObject(value.data)
        if layout.gate_rows and isinstance(value, ShardedTensor) and LINEAR_QKV.search(value.key):
            return _ungated_rows(value, layout)
        return value

    dict_list_map_inplace(entry, state)


def _ungated_rows(shard: ShardedTensor, layout: QKVLayout) -> ShardedTensorFactory:
    """Return what loads a rank's rows of linear_qkv, all but the gate's, from a checkpoint of an ungated model.

    Args:
        shard: a rank's rows [rows, H] (weight) or [rows] (bias) of the gated parameter; rows are whole groups' blocks,
            or a part of one.
        layout: the gated model's.
    """
    ungated = QKVLayout(layout.num_attention_heads, layout.num_query_groups, layout.kv_channels)
    stacked = shard.prepend_axis_num
    rows, start = shard.local_shape[0], shard.global_offset[stacked]
    groups = max(1, rows // layout.rows_per_group)
    part = start // (groups * layout.rows_per_group)  # of the `parts` that the groups are read in
    parts = layout.num_query_groups // groups
    sharer = start % layout.rows_per_group // rows  # which of the ranks that share a group's block

    is_kept = ~(layout.gate_row_mask() | layout.padding_row_mask())
    sources = is_kept.cumsum(0) - 1 - part * groups * ungated.rows_per_group
    is_kept, sources = is_kept[start : start + rows], sources[start : start + rows]

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: slice | None) -> ShardedTensor:
        if rows < layout.rows_per_group:
            replica_id = (replica_id[0], sharer, replica_id[2])
        layers = zip(range(stacked), shard.global_offset, shard.axis_fragmentations or (), strict=False)
        return ShardedTensor.from_rank_offsets(
            key,
            data.new_empty(groups * ungated.rows_per_group, *data.shape[1:]),  # [groups * (r+2) * d, H]
            *layers,
            (stacked, part, parts),
            replica_id=replica_id,
            prepend_axis_num=stacked,
        )

    @torch.no_grad()
    def merge(loaded: Tensor) -> Tensor:
        merged = shard.data.detach().clone()
        merged[is_kept.to(merged.device)] = loaded[sources[is_kept].to(loaded.device)].to(merged)
        return merged

    return ShardedTensorFactory(shard.key, shard.data, build, merge, shard.replica_id)
