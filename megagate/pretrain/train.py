"""Hand the model, the data and the forward step to Megatron's training loop."""

import argparse
import contextlib
from types import SimpleNamespace

import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.enums import ModelType
from megatron.training import ft_integration, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from megagate.checkpoint import background, save, torch_adam
from megagate.gate.config import describe, gate_config_from_args
from megagate.model.builder import model_config
from megagate.model.pattern import layer_pattern
from megagate.pretrain import flops, gate_optimizer, sampler, spikes, stop, supervised, validation
from megagate.pretrain.batch import forward_step
from megagate.pretrain.datasets import dataset_provider
from megagate.telemetry import loop as telemetry


def use_prebuilt_index_builder() -> None:
    """Keep Megatron from running make for its dataset index builder, which its wheel ships compiled."""
    import megatron.core.datasets.helpers_cpp  # noqa: F401  # fails here, not in the middle of the data's set-up

    dataset_utils.compile_helpers = lambda: None


def fork_loader_workers() -> None:
    """Have workers of data loaders forked, also under a Python whose default is another.

    Megatron's loader gives them a function that cannot be sent to a process that does not inherit it.
    """
    torch.multiprocessing.set_start_method("fork", force=True)


def give_parsed_arguments(args: argparse.Namespace) -> None:
    """Have Megatron's fault tolerance take `args`.

    It parses the command line a second time, by a parser that knows neither recipes nor what megagate adds to flags.
    """
    ft_integration.arguments = SimpleNamespace(parse_args=lambda **_: args)


def train(args: argparse.Namespace) -> None:
    """Train as `args` says, from initialisation or a checkpoint, and save.

    Returns also where a flag such as `--exit-interval` or a signal ends the run early.

    Raises:
        RuntimeError: Megatron gave up on the checkpoint it should load.
    """
    use_prebuilt_index_builder()
    fork_loader_workers()
    give_parsed_arguments(args)
    torch_adam.apply()
    gate_optimizer.apply()
    flops.apply()
    sampler.apply()
    asked_duration = args.exit_duration_in_mins
    with contextlib.ExitStack() as until_end:
        validation.apply(args, until_end)
        telemetry.apply(args, until_end)
        stop.apply(args, until_end)
        save.apply(until_end)
        background.apply(args, until_end)
        spikes.apply(args, until_end)
        supervised.apply(args, until_end)
        ended_early = _pretrain(args)
    stop.over()
    supervised.finished(args, args.rank, asked_duration, ended_early)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _pretrain(args: argparse.Namespace) -> bool:
    """Run Megatron's `pretrain`; return whether training ended before its last step."""
    config = pretrain_cfg_container_from_args(args, model_config(args))
    if args.rank == 0:
        gate = gate_config_from_args(args)
        print(f"megagate: gate {describe(gate)}, layers {layer_pattern(args)}", flush=True)
    try:
        pretrain(config, dataset_provider, ModelType.encoder_or_decoder, forward_step)
    except SystemExit as ending:
        if ending.code is None:  # would count as success; where training ends early the code is a number
            raise RuntimeError("Megatron gave up loading the checkpoint: its last message says why") from ending
        if ending.code:
            stop.over()
            spikes.go_back(args)
            supervised.failed(args.rank, ending.code)
            raise
        return True
    return False
