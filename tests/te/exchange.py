"""Writes a checkpoint of one backend's model and reads it with the other's, and says whether they are equal.

    python -m tests.te.exchange DIRECTORY PRESET FROM TO

FROM and TO are values of --transformer-impl; Transformer Engine's model is one for FP8. The initial weights that do not
depend on the layout are compared too. Nothing of a layer is computed.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.te import describe, machine

# isort: split
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, apply_factories
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.initialize import initialize_megatron
from megatron.training.training import setup_model_and_optimizer

from megagate.checkpoint import names
from megagate.evaluate.load import take_down
from megagate.model.builder import model_config
from megagate.platform import cpu
from megagate.pretrain import arguments
from megagate.pretrain.train import use_prebuilt_index_builder


@contextlib.contextmanager
def built(implementation: str, preset: str, *more: str, tensor: int = 1) -> Iterator[torch.nn.Module]:
    """Build the model, or the last of `tensor` ranks' part of it, with memory."""
    os.environ |= {"RANK": str(tensor - 1), "LOCAL_RANK": "0", "WORLD_SIZE": str(tensor)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    recipe = "delayed" if implementation == "transformer_engine" else ""
    flags = [*describe.flags_for(implementation, preset, recipe, tensor), "--expert-model-parallel-size", "1", *more]
    args = arguments.finish(arguments.read([*describe.MODEL, *describe.HYBRID, *flags]))
    args.distributed_backend = "gloo"
    if tensor > 1:  # the others are pretended
        args.fake_process_group, args.use_gloo_process_groups = True, False
    initialize_megatron(allow_no_cuda=True)
    try:
        chunks, _, _ = setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            cfg_container=pretrain_cfg_container_from_args(args, model_config(args)),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        yield chunks[0].module.module
    finally:
        take_down(True)


def state_of(model: torch.nn.Module) -> ShardedStateDict:
    """Return what Megatron saves of the model."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the weights, named by their places in a checkpoint."""
    state = state_of(model)
    apply_factories(state)
    tensors = (value for value in nested_values(state) if isinstance(value, ShardedTensor))
    return {f"{tensor.key} {tensor.global_offset}": tensor.data.detach().clone() for tensor in tensors}


def marks_of(model: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return what Megatron reads on each parameter, by the place in a checkpoint of what comes first in it.

    That is whether and how it is cut over tensor-parallel ranks, whether its gradient is summed over them under
    sequence parallelism, and whether it is not an expert's.
    """
    state = state_of(model)
    apply_factories(state)
    keys = {
        value.data.data_ptr(): f"{value.key} {value.global_offset}"
        for value in nested_values(state)
        if isinstance(value, ShardedTensor)
    }
    marks: dict[str, tuple[Any, ...]] = {}
    for parameter in model.parameters():
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        marks[keys[parameter.data_ptr()]] = (
            is_cut,
            parameter.partition_dim if is_cut else None,
            bool(getattr(parameter, "sequence_parallel", False)),
            getattr(parameter, "allreduce", True),
        )
    assert len(marks) == len(list(model.parameters()))
    return marks


def main(directory: str, preset: str, source: str, target: str) -> None:
    """Save, load, compare."""
    machine.pretend(machine.HOPPER)
    cpu.activate_training()
    use_prebuilt_index_builder()
    with built(source, preset, tensor=2) as model:
        marks = marks_of(model)
    with built(target, preset, tensor=2) as model:
        actual = marks_of(model)
    different = {name: (marks.get(name), actual.get(name)) for name in {*marks, *actual}}
    different = {name: pair for name, pair in different.items() if pair[0] != pair[1]}
    assert not different, different
    with built(source, preset) as model:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        expected = weights_of(model)
        Path(directory).mkdir()
        dist_checkpointing.save(state_of(model), directory)
    names.translate_on_load()
    with built(target, preset) as model:
        model.load_state_dict(dist_checkpointing.load(state_of(model), directory))
        check_equal(weights_of(model), expected)
    with built(source, preset, "--use-cpu-initialization") as model:
        initial = weights_of(model)
    with built(target, preset, "--use-cpu-initialization") as model:
        check_equal(weights_of(model), initial)
    print(f"{len(expected)} tensors are equal", file=sys.__stdout__)


def check_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raise AssertionError with the names of weights that differ."""
    assert actual.keys() == expected.keys()
    different = [name for name, weight in expected.items() if not torch.equal(weight, actual[name])]
    assert not different, different


if __name__ == "__main__":
    main(*sys.argv[1:])
