"""Megatron's set-up for the parts: process groups of one rank, and the model, optimizer and step of the trainer."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import megagate.platform  # noqa: F401  # before Megatron

# isort: split
import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from megagate.evaluate.load import hidden_output, take_down
from megagate.gpu_check.machine import Machine
from megagate.platform import cpu, on_cpu

SEED = 1234


@contextlib.contextmanager
def process_group(machine: Machine) -> Iterator[None]:
    """Megatron's groups, of this process alone."""
    backend = "nccl" if machine.is_cuda else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(SEED)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@dataclass
class Trainer:
    """What the trainer trains with, for a command line of one rank."""

    args: argparse.Namespace
    models: list[Any]
    step: Callable[[Iterator[dict[str, Tensor]]], float]
    """Takes one optimizer step on micro batches, as `batches` yields them, and returns the mean loss."""


@contextlib.contextmanager
def trainer(argv: Sequence[str]) -> Iterator[Trainer]:
    """Set up as `megagate.pretrain` does, on mock data and without files; taken down afterwards.

    Raises:
        UserError: the arguments are refused.
    """
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import setup_model_and_optimizer

    from megagate.checkpoint import torch_adam
    from megagate.model.builder import model_config
    from megagate.pretrain import gate_optimizer
    from megagate.pretrain.arguments import parse
    from megagate.pretrain.train import use_prebuilt_index_builder

    if on_cpu():
        cpu.activate_training()
    torch_adam.apply()
    gate_optimizer.apply()
    use_prebuilt_index_builder()
    try:
        with hidden_output():
            args = parse([*argv, "--mock-data", "--tokenizer-type", "NullTokenizer", "--rerun-mode", "disabled"])
            initialize_megatron(allow_no_cuda=on_cpu(), store=torch.distributed.HashStore())
            config = model_config(args)
            models, optimizer, scheduler = setup_model_and_optimizer(
                ModelType.encoder_or_decoder,
                cfg_container=pretrain_cfg_container_from_args(args, config),
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            )
        yield Trainer(args, models, _step_of(models, optimizer, scheduler))
    finally:
        take_down(True)


def _step_of(models: list[Any], optimizer: Any, scheduler: Any) -> Callable[[Iterator[dict[str, Tensor]]], float]:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training.training import train_step

    from megagate.pretrain.batch import forward_step

    config = models[0].config
    config.grad_scale_func = optimizer.scale_loss  # these two are set at the start of Megatron's loop
    config.finalize_model_grads_func = finalize_model_grads

    def step(batches: Iterator[dict[str, Tensor]]) -> float:
        function = get_forward_backward_func()
        losses = train_step(forward_step, batches, models, optimizer, scheduler, config, function)[0]
        return float(losses["lm loss"])

    return step


def batches(args: argparse.Namespace, draw: Callable[[tuple[int, int]], Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield micro batches without end.

    Args:
        args: give the sizes.
        draw: returns tokens of a shape [b, s + 1].
    """
    size, length = args.micro_batch_size, args.seq_length
    while True:
        tokens = draw((size, length + 1))
        yield {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(size, length),
            "position_ids": torch.arange(length).expand(size, -1).contiguous(),
        }
