"""From parsed arguments to Megatron's model configuration, which the training loop builds the model from."""

import argparse
from functools import partial
from typing import Any

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args, hybrid_config_from_args
from megatron.training.models import GPTModelConfig, HybridModelConfig

from megagate.gate.config import GateConfig, GatePrecision, gate_config_from_args
from megagate.model import yarn
from megagate.model.gate_parameters import initialize_gates
from megagate.model.gpt import gpt_config
from megagate.model.initialization import initialize_by_name
from megagate.model.pattern import is_gpt
from megagate.model.specs import hybrid_stack_spec


def transformer_config(args: argparse.Namespace, gate: GateConfig) -> TransformerConfig:
    """Return Megatron's transformer configuration, told whether to call the layer for the attention output.

    `attention_output_gate` is set here and not in `args`, where it says which gate the user means.
    """
    config = core_transformer_config_from_args(args)
    config.attention_output_gate = gate.acts_on_sdpa_output
    return config


def separate_expert_parameters(model: list[MegatronModule]) -> list[MegatronModule]:
    """Let experts have an optimizer of their own on every layout; returns `model`.

    Megatron gives them one only where expert groups differ from dense ones, and a checkpoint written with one optimizer
    does not load into two. `allreduce` false is Megatron's mark for parameters that reduce over the expert groups,
    which always exist.
    """
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, SequentialMLP | TEGroupedMLP):
                for parameter in module.parameters():
                    parameter.allreduce = False
    return model


EXPERT_METRICS: dict[str, dict[str, Any]] = {
    "load_balancing_loss": {"reduce_group": "tp_cp"},
    "seq_load_balancing_loss": {"reduce_group": "tp_cp"},
    "global_load_balancing_loss": {"reduce_group": "tp_dp_cp", "needs_dp_avg": False},
    "z_loss": {"avg_group": "tp_dp_cp"},
}
"""The metrics that Megatron's router records, and how it has them reduced: groups are named as in its collection."""


def size_expert_metrics(model: list[MegatronModule]) -> list[MegatronModule]:
    """Let pipeline stages with and without experts add up Megatron's expert metrics; returns `model`.

    A stage with experts keeps one value for each layer of the model. Megatron gives a stage without any only as many as
    there are expert layers, and the sum over the stages then fails or hangs. Nor does such a stage learn from a router
    over which ranks to reduce; where it is the last one, which logs, it would log a part of the loss.
    """
    tracker = get_moe_metrics_tracker()
    for name, reduction in EXPERT_METRICS.items():
        tracker.ensure_initialized(name, model[0].config.num_layers)
        for field, value in reduction.items():
            group = getattr(model[0].pg_collection, value) if isinstance(value, str) else value
            setattr(tracker.metrics[name], field, group)
    return model


def model_config(args: argparse.Namespace) -> HybridModelConfig | GPTModelConfig:
    """Return the configuration that Megatron's builder of `--model-impl` builds the model from.

    Args:
        args: validated arguments; for a hybrid model `hybrid_layer_pattern` is set.
    """
    yarn.apply()
    gate = gate_config_from_args(args)
    config = transformer_config(args, gate)
    precision = getattr(args, "gate_precision", None)  # a checkpoint's arguments can be older
    stack = hybrid_stack_spec(
        config,
        gate,
        recompute_gate=args.recompute_gate,
        gate_fusion=getattr(args, "gate_fusion", True),
        precision=None if precision is None else GatePrecision(precision),
    )
    model: HybridModelConfig | GPTModelConfig
    if is_gpt(args):
        model = gpt_config(args, config, stack)
    else:
        model = hybrid_config_from_args(args, config)
        model.hybrid_stack_spec = stack
    model.pre_wrap_hooks.append(separate_expert_parameters)
    if args.num_experts:
        model.pre_wrap_hooks.append(size_expert_metrics)
    if args.use_cpu_initialization:
        model.pre_wrap_hooks.append(partial(initialize_by_name, seed=args.seed))
    # A checkpoint's arguments can be older than these two, as above.
    std, bias = getattr(args, "gate_init_std", None), getattr(args, "gate_init_bias", None)
    if std is not None or bias is not None:
        model.pre_wrap_hooks.append(partial(initialize_gates, std=std, bias=bias))
    return model
