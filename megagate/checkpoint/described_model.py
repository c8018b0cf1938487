"""From what a family says of a model to a recipe, to a run's arguments, and to the tensors that Megatron has for it."""

import argparse
import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import megagate.platform  # noqa: F401  # before Megatron
from megagate.checkpoint.huggingface import StoredTensor
from megagate.data.tokenizer import quiet
from megagate.evaluate.load import for_one_process, hidden_output, one_process

RUN: dict[str, Any] = {
    "mock-data": True,
    "micro-batch-size": 1,
    "global-batch-size": 1,
    "train-iters": 1,
    "lr": 1e-4,
    "no-save-optim": True,
}
"""What a run must say besides the model, for arguments that no run is started with."""

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
LARGEST_DIVISOR = 128
"""Megatron's default for --make-vocab-size-divisible-by."""

LONGEST_SEQUENCE = 4096
"""Of a recipe that an import writes; models can be made for far more than one wants to train with."""


@dataclass(frozen=True)
class ModelState:
    """What Megatron's checkpoint of a model consists of."""

    tensors: dict[str, StoredTensor]
    objects: list[str]
    """Keys of what is no tensor; without FP8 it is None."""


def recipe_flags(arguments: Mapping[str, Any], dtype: torch.dtype, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe (flag name -> value) of a model.

    Args:
        arguments: from a family, by a flag's name with underscores, or by an argument's; None is as good as absent.
        dtype: of the weights.
        tokenizer: by flags' names.

    Raises:
        ValueError: an argument has no flag that gives it its value.
    """
    with quiet():
        from megagate.pretrain.arguments import build_parser

    chosen = {name: value for name, value in arguments.items() if value is not None}
    positions = chosen.setdefault("max_position_embeddings", LONGEST_SEQUENCE)
    chosen.setdefault("seq_length", min(positions, LONGEST_SEQUENCE))
    chosen.setdefault("make_vocab_size_divisible_by", math.gcd(chosen["vocab_size"], LARGEST_DIVISOR))
    parser, _ = build_parser()
    flags: dict[str, Any] = {}
    for name, value in chosen.items():
        flag = name.replace("_", "-")
        if f"--{flag}" in parser._option_string_actions:
            flags[flag] = value
            continue
        if value == parser.get_default(name):
            continue
        for action in parser._actions:
            if action.dest == name and (action.nargs != 0 or action.const == value):
                flag = next(option for option in action.option_strings if option.startswith("--"))
                flags[flag.removeprefix("--")] = value if action.nargs != 0 else True
                break
        else:
            raise ValueError(f"no flag gives {name} the value {value!r}")
    flags |= {"bf16": True} if dtype == torch.bfloat16 else {"fp16": True} if dtype == torch.float16 else {}
    return flags | dict(tokenizer)


def complete_arguments(flags: Mapping[str, Any]) -> argparse.Namespace:
    """Return the arguments that a run with this recipe on one process would save in its checkpoints.

    Raises:
        UserError: Megatron or megagate refuses the model.
    """
    with quiet():
        from megagate.pretrain.arguments import build_parser, read, validate
    from megagate.recipe import recipe_tokens

    tokens = recipe_tokens({**flags, **RUN}, build_parser()[0], "of the model")
    with mock.patch.dict(os.environ, ALONE), quiet(), hidden_output(), _own_global_arguments():
        args = read(tokens)
        validate(args)
    args.warm_start_from = None  # set where a checkpoint to start from is chosen
    return args


def model_state(args: argparse.Namespace) -> ModelState:
    """Return what Megatron saves of the model that `args` describe; its tensors get no memory."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megagate.model.builder import model_config

    args = for_one_process(args)
    args.perform_initialization = False
    with one_process(args), quiet(), hidden_output():
        config = model_config(args)
        config.pre_wrap_hooks.clear()  # initial weights, and marks for the optimizer
        config.finalize()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        with torch.device("meta"):
            (model,) = config.get_builder_cls()(config).build_distributed_models(groups, wrap_with_ddp=False)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = model.sharded_state_dict(metadata={"dp_cp_group": group})
        apply_factories(state)
    tensors, objects = {}, []
    for part in nested_values(state):
        if isinstance(part, ShardedTensor):
            tensors[part.key] = StoredTensor(tuple(part.global_shape), part.dtype)
        elif isinstance(part, ShardedObject):
            objects.append(part.unique_key)
    return ModelState(tensors, objects)


@contextlib.contextmanager
def _own_global_arguments() -> Iterator[None]:
    """Take down Megatron's global arguments when the body ends."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.global_vars import destroy_global_vars

    try:
        yield
    finally:
        destroy_global_vars()
        unset_num_microbatches_calculator()
