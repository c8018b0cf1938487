"""Rebuild a model from a Megatron checkpoint alone, on one process or more, whatever layout it was trained on.

    with load_model(Path("runs/quickstart/gated")) as loaded:
        logits = loaded.model(tokens, position_ids, None)

A checkpoint holds every argument of the run that wrote it, so nothing about the model has to be said again. The weights
come through Megatron's own `load_checkpoint`, which puts tensor-, pipeline- and expert-parallel parts together.
"""

import argparse
import contextlib
import copy
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megagate.checkpoint.load import TRACKER, checkpoint_arguments, find_complete
from megagate.data.tokenizer import add_tokenizer_arguments, build_tokenizer, quiet
from megagate.errors import UserError
from megagate.evaluate.extension import Extension
from megagate.evaluate.layout import Layout
from megagate.evaluate.vocabulary import leave_out_padding
from megagate.model.pattern import as_hybrid
from megagate.platform import cpu, on_cpu

ONE_PROCESS: dict[str, Any] = {
    # One rank holds the whole model.
    "rank": 0,
    "local_rank": 0,
    "world_size": 1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "transformer_pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "tensor_parallel_num_weight_shards": 1,
    "expert_tensor_parallel_num_weight_shards": 1,
    "data_parallel_size": 1,
    "num_distributed_optimizer_instances": 1,
    "sequence_parallel": False,
    "tp_comm_overlap": False,
    "distributed_backend": "nccl",
    "use_cpu_initialization": False,
    # It masks as generation needs, and a model of either backend loads into it.
    "transformer_impl": "local",
}

FASTER: dict[str, Any] = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_flex_dispatcher_backend": "deepep",
    "moe_enable_deepep": False,
    "moe_expert_rank_capacity_factor": None,
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "defer_embedding_wgrad_compute": False,
    "moe_single_grouped_weight": False,
    "moe_single_grouped_bias": False,
    "moe_paged_stash": False,
    "batch_invariant_mode": False,
    "cuda_graph_impl": "none",
    "use_te_activation_func": False,
    "qk_clip": False,
    "hybrid_context_parallel": False,
    "symmetric_ar_type": None,
    "nccl_ub": False,
    "nccl_communicator_config_path": None,
    "use_sharp": False,
    "sharp_enabled_group": None,
}
"""Ways to be fast on many GPUs, which refuse one rank, a CPU or torch's layers, as they are left out."""

STATE = ("expert_bias",)
"""Ends of the names of tensors that are no parameters."""

FORWARD_ONLY: dict[str, Any] = {
    "load": None,
    "save": None,
    "async_save": False,
    "tensorboard_dir": None,
    "pretrained_checkpoint": None,
    "finetune": False,
    "no_load_optim": True,
    "no_load_rng": True,
    "use_distributed_optimizer": False,
    "ckpt_fully_parallel_load": False,
    "override_ckpt_iteration": None,
    # A parameter that the checkpoint lacks is an error, not a warning.
    "dist_ckpt_strictness": "raise_unexpected",
    "recompute_gate": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "moe_layer_recompute": False,
    "gradient_accumulation_fusion": False,
    # Experts that drop what exceeds their capacity would make a token's loss depend on its batch.
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    # Megatron adds this noise in evaluation too, and the next two make routing one that is for benchmarks only.
    "moe_input_jitter_eps": None,
    "moe_router_force_load_balancing": False,
    "moe_router_force_biased": None,
    "rampup_batch_size": None,
    "step_batch_size_schedule": None,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, and where it comes from."""

    model: torch.nn.Module
    """Megatron's HybridModel, in the dtype of training (wrapped by Float16Module for bf16 and fp16), which gives no
    probability to the rows that pad its vocabulary."""
    args: argparse.Namespace
    """The run's arguments, changed to the ranks of this evaluation and no training."""
    checkpoint: Path
    iteration: int


def find_checkpoint(directory: Path, step: int | None = None) -> Path:
    """Return the checkpoint that `--load directory --ckpt-step step` means: at `step`, else the newest complete one.

    Raises:
        UserError: there is none, or it is incomplete or in a format that cannot be read here.
    """
    if not directory.is_dir():
        raise UserError(f"--load {directory} does not exist: give the directory that training saved to")
    if step is None and not (directory / TRACKER).is_file() and not any(directory.glob("iter_*")):
        raise UserError(
            f"--load {directory} holds no checkpoint ({TRACKER} is missing): give the directory that training saved to"
        )
    checkpoint = find_complete(directory, step)
    if not (checkpoint / "metadata.json").is_file():
        raise UserError(f"{checkpoint} is not in Megatron's torch_dist format: save it with --ckpt-format torch_dist")
    return checkpoint


def one_process_arguments(checkpoint: Path) -> argparse.Namespace:
    """Return the arguments that `checkpoint` was written with, changed so that one process loads and evaluates it.

    Raises:
        UserError: the checkpoint holds no arguments, or was not written by megagate.
    """
    saved = as_hybrid(checkpoint_arguments(checkpoint))
    if getattr(saved, "hybrid_layer_pattern", None) is None:
        raise UserError(f"{checkpoint} does not hold a hybrid model: it was not written by megagate.pretrain")
    with quiet():
        from megagate.checkpoint.fit import check_delta_net_norm
    check_delta_net_norm(saved, checkpoint)
    args = for_one_process(saved)
    args.load = str(checkpoint.parent)
    suffix = checkpoint.name.removeprefix("iter_")
    args.ckpt_step = int(suffix) if suffix.isdigit() else None  # None for a release checkpoint
    return args


def for_one_process(saved: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments of a run, changed so that one process builds its model and evaluates it."""
    args = copy.copy(saved)
    with quiet():
        from megagate.model.backends import torch_backend
        from megagate.pretrain.backend import WITHOUT_FP8
    platform = WITHOUT_FP8 | torch_backend.ARGUMENTS | (cpu.ARGUMENTS if on_cpu() else {})
    for name, value in (ONE_PROCESS | FASTER | FORWARD_ONLY | platform).items():
        setattr(args, name, value)
    args.hybrid_layer_pattern = args.hybrid_layer_pattern.replace("|", "")
    args.micro_batch_size = args.global_batch_size = 1  # read by Megatron's batch bookkeeping only
    return args


def tokenizer_of(args: argparse.Namespace, tokenizer_model: str | None = None) -> Any:
    """Build the tokenizer that the run used; `tokenizer_model` is where its file is now, if it has moved.

    Raises:
        UserError: it cannot be built.
    """
    names = add_tokenizer_arguments(argparse.ArgumentParser())
    options: dict[str, Any] = {name: getattr(args, name, None) for name in names} | {"trust_remote_code": False}
    if tokenizer_model is not None:
        options["tokenizer_model"] = tokenizer_model
    return build_tokenizer(**options)


def check_tokenizer(tokenizer: Any, args: argparse.Namespace, moved_to: str | None) -> None:
    """Raise UserError if a tokenizer is another one than the checkpoint's, or that one with tokens added."""
    rows = args.tokenizer_vocab_size
    # Older checkpoints do not say how many of the embedding's rows the tokenizer used.
    own = getattr(args, "tokenizer_own_vocab_size", 0 if args.vocab_size == rows else rows)
    if not own <= tokenizer.vocab_size <= rows:
        raise UserError(
            f"the checkpoint was written with a tokenizer of {own or rows} tokens, but "
            f"{moved_to or args.tokenizer_model} has {tokenizer.vocab_size}: give its own with --tokenizer-model"
        )


@contextlib.contextmanager
def load_model(
    directory: Path,
    step: int | None = None,
    *,
    in_fp32: bool = False,
    layout: Layout | None = None,
    extension: Extension | None = None,
) -> Iterator[LoadedModel]:
    """Load a checkpoint for evaluation; leaving the context takes down what Megatron keeps per process.

    For a process of its own: it also takes down what a training run in the same process has set up.

    Args:
        directory: what `--save` named in training.
        step: the iteration to load, the newest complete one if None.
        in_fp32: compute in fp32, whatever the model was trained in.
        layout: the ranks, which must all call this; one process if None.
        extension: to a longer context than that of training.

    Raises:
        UserError: there is no such checkpoint, or it does not fit the layout.
    """
    checkpoint = find_checkpoint(directory, step)
    args = one_process_arguments(checkpoint)
    if in_fp32:
        args.bf16 = args.fp16 = False
        args.params_dtype = torch.float32
    if extension is not None:
        extension.apply(args)
    if layout is not None:
        layout.apply(args)
    with one_process(args):
        with quiet(), hidden_output():
            model, iteration = _build_and_load(args)
        yield LoadedModel(model, args, checkpoint, iteration)
        if args.world_size > 1:
            torch.distributed.barrier()  # none ends, or removes the checkpoint, while another is at work


@contextlib.contextmanager
def one_process(args: argparse.Namespace) -> Iterator[None]:
    """Set Megatron up for a model on this process or its ranks, and take down what it keeps afterwards.

    Args:
        args: from `for_one_process`, and of a layout.
    """
    starts_group = not torch.distributed.is_initialized()
    try:
        with quiet(), hidden_output():
            _initialize(args)
        yield
    finally:
        take_down(starts_group)


def _initialize(args: argparse.Namespace) -> None:
    """Make `args` Megatron's global arguments, and a process group of its ranks unless there is one."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training.global_vars import set_args
    from megatron.training.initialize import initialize_megatron

    from megagate.pretrain.train import use_prebuilt_index_builder

    if on_cpu():
        cpu.activate_training()
    use_prebuilt_index_builder()
    set_args(args)
    data_parallel = args.data_parallel_size
    init_num_microbatches_calculator(args.rank, None, args.global_batch_size, args.micro_batch_size, data_parallel)
    store = torch.distributed.HashStore() if args.world_size == 1 else None  # else torchrun's
    initialize_megatron(allow_no_cuda=on_cpu(), store=store)


def _build_and_load(args: argparse.Namespace) -> tuple[torch.nn.Module, int]:
    """Build the model with Megatron's builder, fill it from the checkpoint, and return it with its iteration."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.checkpointing import load_checkpoint

    from megagate.checkpoint.names import translate_on_load
    from megagate.model.builder import model_config

    translate_on_load()
    config = model_config(args)
    config.pre_wrap_hooks.clear()  # initial weights, and marks for the optimizer
    config.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    models = config.get_builder_cls()(config).build_distributed_models(groups, wrap_with_ddp=False)
    for parameter in models[0].parameters():
        parameter.data.fill_(float("nan"))
    iteration, _ = load_checkpoint(models, None, None)
    for name, parameter in models[0].named_parameters():
        if parameter.isnan().any():
            raise UserError(f"the checkpoint in {args.load} has no values, or NaN, for {name}")
    leave_out_padding(models[0], args)
    return models[0].eval().requires_grad_(False), iteration


def count_parameters(loaded: LoadedModel) -> tuple[int, int]:
    """Return the number of parameters, and of those that one token passes through, on whatever layout.

    Both count embeddings, the padding of the vocabulary, and shared experts in full; the second counts the routed
    experts' parameters at top-k / experts of their number.
    """
    from megagate.checkpoint.torch_dist import TensorReader

    tensors = TensorReader(loaded.checkpoint).tensors
    sizes = {name: math.prod(stored.shape) for name, stored in tensors.items() if name.rpartition(".")[2] not in STATE}
    total = sum(sizes.values())
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    if not routed:
        return total, total
    return total, total - routed + routed * loaded.args.moe_router_topk // loaded.args.num_experts


def take_down(ends_group: bool) -> None:
    """Free Megatron's per-process state, so that another checkpoint can be loaded."""
    from megatron.core import mpu
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training.global_vars import destroy_global_vars

    destroy_global_vars()
    unset_num_microbatches_calculator()
    destroy_rerun_state_machine()
    mpu.destroy_model_parallel()
    if ends_group and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def hidden_output() -> Iterator[None]:
    """Keep back what is written to standard output, also from C++; it is shown on standard error if the body fails."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 1)
        try:
            yield
        except UserError:
            raise
        except BaseException:
            sys.stdout.flush()
            hidden.seek(0)
            sys.stderr.write(hidden.read().decode(errors="replace"))
            raise
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
