"""What a checkpoint calls the run's parameters, where Megatron has several names for the same one.

- Transformer Engine's fused layers, and Megatron's local layers for its GPTModel, keep the weight of a norm under the
  linear layer that follows it. Norms of its own have an extra state, which torch's do not have.
- A GPTModel whose layers are alike stacks them; Megatron itself loads such a checkpoint into a HybridModel. One with
  `--moe-layer-freq` as a list, or above 1, numbers its layers.

Megatron reads a checkpoint through `dist_checkpointing.load`, whose requests are renamed here to what the checkpoint's
index holds, those for optimizer states too.
"""

import functools
import re
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import gpt_checkpoint_interop
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import GPTCompatLayerMaps
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from megagate.checkpoint import warm_start
from megagate.checkpoint.pickles import read_index
from megagate.model.pattern import BOUNDARY
from megagate.model.specs import NORM_NAMES

NUMBERED_LAYER = re.compile(r"\bdecoder\.layers\.(\d+)\.")

_gpt_states: list[tuple[dict[Any, Any], GPTCompatLayerMaps]] = []
"""State dicts that Megatron wants from a GPTModel's checkpoint, until the load that reads them."""


@functools.cache
def translate_on_load() -> None:
    """Have Megatron ask for what a checkpoint holds, and do warm starts, for the rest of the process."""
    load = dist_checkpointing.load
    layer_maps = gpt_checkpoint_interop.gpt_compatible_layer_maps
    retarget = gpt_checkpoint_interop.retarget_sharded_state_dict_to_gpt_checkpoint

    @functools.wraps(load)
    def translated_load(sharded_state_dict: dict[Any, Any], checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        checkpoint = Path(checkpoint_dir)
        keys = set(read_index(checkpoint).state_dict_metadata)
        while _gpt_states:
            state, maps = _gpt_states.pop()
            if any(NUMBERED_LAYER.search(key) for key in keys):
                number_as_gpt(state, maps)
            else:
                retarget(state, maps)
        rename_norms(sharded_state_dict, keys)
        keep_absent_extra_states(sharded_state_dict, keys)
        warm_start.adapt_for(sharded_state_dict, checkpoint)
        return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    @functools.wraps(layer_maps)
    def maps_of_blocks(hybrid_layer_pattern: str) -> GPTCompatLayerMaps:
        return block_maps(hybrid_layer_pattern) or layer_maps(hybrid_layer_pattern)

    def retarget_later(sharded_state_dict: dict[Any, Any], layer_maps: GPTCompatLayerMaps) -> None:
        _gpt_states.append((sharded_state_dict, layer_maps))  # only the load knows the checkpoint's format

    dist_checkpointing.load = translated_load
    gpt_checkpoint_interop.gpt_compatible_layer_maps = maps_of_blocks
    gpt_checkpoint_interop.retarget_sharded_state_dict_to_gpt_checkpoint = retarget_later


def block_maps(hybrid_layer_pattern: str) -> GPTCompatLayerMaps | None:
    """Return which layers of a GPTModel a pattern of blocks (attention, then dense or experts) has; else None.

    Megatron's own function refuses patterns with both kinds of blocks.
    """
    layers = hybrid_layer_pattern.replace(BOUNDARY, "")
    blocks = len(layers) // 2
    if not re.fullmatch(r"(\*[E-])+", layers):
        return None
    return GPTCompatLayerMaps(
        attention_to_gpt={2 * block: block for block in range(blocks)},
        mlp_to_gpt={2 * block + 1: block for block in range(blocks)},
        fresh_init=frozenset(),
        num_gpt_layers=blocks,
    )


def number_as_gpt(state: dict[Any, Any], maps: GPTCompatLayerMaps) -> None:
    """Rename a hybrid model's entries to those of a GPTModel with numbered layers, in place."""
    layers = {**maps.attention_to_gpt, **maps.mlp_to_gpt}

    def entry(value: Any) -> Any:
        if not isinstance(value, ShardedBase):
            return value
        if value.key.endswith("output_layer._extra_state"):  # empty, and not saved by a GPTModel
            return LocalNonpersistentObject(value.data)
        key = NUMBERED_LAYER.sub(lambda match: f"decoder.layers.{layers[int(match[1])]}.", value.key)
        value.key = key.replace("decoder.final_norm.", "decoder.final_layernorm.")
        return value

    dict_list_map_inplace(entry, state)


def rename_norms(state: dict[Any, Any], keys: set[str]) -> None:
    """Rename entries of norms to their fused names where the checkpoint has those, in place."""

    def entry(value: Any) -> Any:
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.key not in keys:
            for own, fused in NORM_NAMES:
                renamed = value.key.replace(own, fused)
                if renamed in keys:
                    value.key = renamed
        return value

    dict_list_map_inplace(entry, state)


def keep_absent_extra_states(state: dict[Any, Any], keys: set[str]) -> None:
    """Let extra states (of FP8) that the checkpoint lacks stay as they are, in place; without FP8 they are empty."""

    def entry(value: Any) -> Any:
        if isinstance(value, ShardedObject) and value.key.endswith("_extra_state") and value.unique_key not in keys:
            return LocalNonpersistentObject(value.data)
        return value

    dict_list_map_inplace(entry, state)
