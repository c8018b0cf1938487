"""From parsed arguments to Megatron's model configuration, which the training loop builds the model from."""

import argparse
from functools import partial

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args, hybrid_config_from_args
from megatron.training.models import HybridModelConfig

from megagate.gate.config import GateConfig, gate_config_from_args
from megagate.model.initialization import initialize_by_name
from megagate.model.specs import hybrid_stack_spec


def transformer_config(args: argparse.Namespace, gate: GateConfig) -> TransformerConfig:
    """Return Megatron's transformer configuration, told whether the attention carries a gate.

    `attention_output_gate` is set here and not in `args`: there Megatron's FLOPs formula reads it, for which it is
    true of the elementwise gate only.
    """
    config = core_transformer_config_from_args(args)
    config.attention_output_gate = gate.has_gate
    return config


def separate_expert_parameters(model: list[MegatronModule]) -> list[MegatronModule]:
    """Let expert weights have an optimizer of their own on every layout; returns `model`.

    Megatron gives them one only where expert groups differ from dense ones, and a checkpoint written with one optimizer
    does not load into two. `allreduce` false is Megatron's mark for parameters that reduce over the expert groups,
    which always exist.
    """
    for chunk in model:
        for module in chunk.modules():
            if getattr(module, "is_expert", False):
                for parameter in module.parameters(recurse=False):
                    parameter.allreduce = False
    return model


def model_config(args: argparse.Namespace) -> HybridModelConfig:
    """Return the configuration that Megatron's HybridModelBuilder builds the model from.

    Args:
        args: validated arguments; `hybrid_layer_pattern` is set.
    """
    gate = gate_config_from_args(args)
    config = transformer_config(args, gate)
    model = hybrid_config_from_args(args, config)
    model.hybrid_stack_spec = hybrid_stack_spec(config, gate)
    model.pre_wrap_hooks.append(separate_expert_parameters)
    if args.use_cpu_initialization:
        model.pre_wrap_hooks.append(partial(initialize_by_name, seed=args.seed))
    return model
