"""One rank of any layout, built without memory on one CPU process: what the cluster would refuse is refused here.

    python -m megagate.pretrain --recipe examples/moe_1t/recipe.yaml --dry-run --world-size 2048 --rank 2047

The arguments go the trainer's way, with all its checks. Then a process group that only pretends to have the other ranks
takes the place of theirs, and Megatron sets up model, buffers and optimizer of the rank on torch's meta device, whose
tensors have shapes but no contents.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import megagate.platform  # noqa: F401  # before Megatron
from megagate.errors import UserError, reason
from megagate.evaluate.load import FASTER, take_down
from megagate.model.pattern import as_hybrid
from megagate.plan.fp8 import fp8_weights
from megagate.plan.gpus import GIB
from megagate.plan.layout import layout_of
from megagate.plan.memory import rank_memory
from megagate.plan.parameters import count
from megagate.plan.uncounted import uncounted
from megagate.platform import cpu
from megagate.pretrain.arguments import build_parser, finish, read
from megagate.pretrain.backend import stand_in
from megagate.pretrain.datasets import dataset_prefixes
from megagate.recipe import merge_recipe

LARGEST_WORLD_SIZE = 1 << 20
NO_WRITERS = ("tensorboard_dir", "wandb_project")
"""Arguments for which Megatron opens files or connections as soon as it has validated them."""


@dataclass(frozen=True)
class Rank:
    """What one rank of a run would hold; its tensors are on the meta device."""

    args: argparse.Namespace
    chunks: list[Any]
    """The wrapped model chunks, one for each pipeline stage of this rank."""
    optimizer: Any

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters of all chunks by name; that of chunk i begins with `i.`."""
        return {
            f"{index}.{name}": parameter
            for index, chunk in enumerate(self.chunks)
            for name, parameter in chunk.module.named_parameters()
        }


def arguments_for(argv: Sequence[str], world_size: int, rank: int = 0) -> tuple[argparse.Namespace, list[str]]:
    """Return the validated arguments of one rank of a run, and sentences on what stood in for what is not given.

    They are Megatron's global arguments afterwards. Changes the environment variables that tell of the rank.

    Args:
        argv: the command line, without the flags of the dry run itself.
        world_size: ranks of the run.
        rank: which of them.

    Raises:
        UserError: the run would be refused.
    """
    if not 1 <= world_size <= LARGEST_WORLD_SIZE:
        raise UserError(f"a run cannot have {world_size} ranks here: give 1 to {LARGEST_WORLD_SIZE:,}")
    if not 0 <= rank < world_size:
        raise UserError(f"--rank {rank} is not one of {world_size} ranks: give 0 <= rank < --world-size")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    parser, gate_flags = build_parser()
    given = parser.parse_args(merge_recipe(argv, parser, gate_flags))
    stand_ins: list[str] = []
    notes: list[str] = []
    if not given.mock_data and not dataset_prefixes(given):
        stand_ins.append("--mock-data")
        notes.append("no data are given: the run needs --data-path")
    if given.tokenizer_type is None and given.vocab_size is not None:
        stand_ins += ["--tokenizer-type", "NullTokenizer"]
        notes.append("no tokenizer is given: the run needs --tokenizer-type")
    args = read([*argv, *stand_ins], elsewhere=True)
    # Of which nothing is left in what stands in, nor all of it in what has been read.
    args.fp8_weights, args.uncounted = fp8_weights(args), uncounted(given)
    note = stand_in(args)
    if note is not None:
        notes.append(note)
    for name in NO_WRITERS:
        setattr(args, name, None)
    _set_recompute(finish(args))
    return args, notes


def _set_recompute(args: argparse.Namespace) -> None:
    """Say in arguments which modules Megatron's configuration takes where flags do not name them."""
    if args.recompute_modules is None and args.recompute_granularity == "selective":
        args.recompute_modules = ["core_attn"]
    if args.moe_layer_recompute:
        args.recompute_granularity = "selective"
        args.recompute_modules = [*(args.recompute_modules or ["core_attn"]), "moe"]


def forget() -> None:
    """Take down what Megatron keeps of the arguments, so that others can follow."""
    take_down(False)


@contextlib.contextmanager
def build(args: argparse.Namespace) -> Iterator[Rank]:
    """Build the rank that validated arguments are about; what Megatron keeps per process is taken down afterwards.

    Args:
        args: from `arguments_for`; changed.

    Raises:
        UserError: Megatron refuses to build it.
    """
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import setup_model_and_optimizer

    from megagate.checkpoint import torch_adam
    from megagate.model.builder import model_config
    from megagate.pretrain import gate_optimizer
    from megagate.pretrain.train import use_prebuilt_index_builder

    cpu.activate_training()
    use_prebuilt_index_builder()
    torch_adam.apply()
    gate_optimizer.apply()
    args.use_cpu_initialization = args.perform_initialization = False  # else some tensors lie on the CPU and get values
    args.load = args.pretrained_checkpoint = None
    vars(args).update(FASTER)  # which want packages and machines, and of which a rank holds the same
    # As --fake-process-group would, which refuses token dispatchers that a model can be built with.
    args.fake_process_group, args.use_gloo_process_groups = True, False
    meta = "meta"  # by name, with which Transformer Engine compares
    try:
        initialize_megatron(allow_no_cuda=True)
        config = model_config(args)
        container = pretrain_cfg_container_from_args(args, config)
        with torch.device(meta), mock.patch.object(torch.cuda, "current_device", lambda: meta):
            chunks, optimizer, _ = setup_model_and_optimizer(
                ModelType.encoder_or_decoder,
                cfg_container=container,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            )
        yield Rank(args, chunks, optimizer)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise UserError(f"Megatron refuses the model: {reason(error)}") from error
    finally:
        take_down(True)


def run(argv: Sequence[str]) -> None:
    """Do what the command line with --dry-run asks for, and print what came out.

    Raises:
        UserError: the run would be refused.
    """
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--dry-run", action="store_true")
    own.add_argument("--world-size", type=int)
    own.add_argument("--rank", type=int, default=0)
    chosen, rest = own.parse_known_args(argv)
    if chosen.world_size is None:
        raise UserError("--dry-run needs --world-size: say for how many ranks")
    args, notes = arguments_for(rest, chosen.world_size, chosen.rank)
    for note in notes:
        print(f"megagate: {note}")
    with build(args) as rank:
        for line in describe(rank):
            print(f"megagate: {line}")
    sys.stdout.flush()


def describe(rank: Rank) -> Iterator[str]:
    """Yield lines on the layout of the run and on what the rank holds."""
    from megatron.core import parallel_state as groups

    args = as_hybrid(rank.args)
    places = {
        "tensor": (groups.get_tensor_model_parallel_rank(), args.tensor_model_parallel_size),
        "pipeline": (groups.get_pipeline_model_parallel_rank(), args.pipeline_model_parallel_size),
        "context": (groups.get_context_parallel_rank(), args.context_parallel_size),
        "data": (groups.get_data_parallel_rank(), args.data_parallel_size),
    }
    if args.num_experts:
        places |= {
            "expert": (groups.get_expert_model_parallel_rank(), args.expert_model_parallel_size),
            "expert data": (groups.get_expert_data_parallel_rank(), groups.get_expert_data_parallel_world_size()),
        }
    described = ", ".join(f"{name} {place} of {size}" for name, (place, size) in places.items() if size > 1)
    yield f"rank {args.rank} of {args.world_size}{': ' + described if described else ''}"
    yield f"layers {args.hybrid_layer_pattern}"
    held = rank.parameters().values()
    yield f"this rank holds {sum(parameter.numel() for parameter in held):,} parameters in {len(held)} tensors"
    for chunk in rank.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            yield (
                f"a buffer of {buffer.numel:,} elements, gradients in {buffer.grad_dtype}, over "
                f"{buffer.data_parallel_world_size} ranks, in {len(buffer.buckets)} buckets"
            )
    total, active = count(args)
    yield f"the model has {total:,} parameters, {active:,} of them active"
    layout = layout_of(args)
    memory = rank_memory(args, layout, layout.pipeline_rank(args.rank))
    kinds = {
        "weights": memory.static.weights + memory.static.fp8_copies,
        "gradients": memory.static.gradients,
        "optimizer": memory.static.main_weights + memory.static.moments,
        "activations": memory.activations,
        "in all": memory.total,
    }
    sizes = ", ".join(f"{name} {size / GIB:.2f}" for name, size in kinds.items())
    yield f"memory in GiB as tools/plan.py counts it: {sizes}"
    if args.fp8_weights is not None:
        yield args.fp8_weights.note
    if args.uncounted:
        yield f"not counted there: {', '.join(args.uncounted)}"
