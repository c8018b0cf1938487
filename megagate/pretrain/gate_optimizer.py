"""Learning rate and weight decay of the gate's own, and Muon's view of a gated linear_qkv.

Rows of linear_qkv are the gate's, so Megatron's groups of whole parameters cannot treat the gate on its own. AdamW with
decoupled decay (Loshchilov and Hutter 2019) changes a number p by

    -lr * u - lr * wd * p,

where u depends on gradients only. With M * lr and W * wd in place of lr and wd that is

    M * (change + lr * wd * (1 - W) * p),

so what the optimizer has done to the gate's numbers is corrected after each step. Nothing is kept between steps:
checkpoints, gradient norm and clipping are as without it.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule
from megatron.training import get_args, training
from torch import Tensor, nn

from megagate.model.attention import GatedSelfAttention
from megagate.model.gate_parameters import gate_elements

_original = training.get_megatron_optimizer


def apply() -> None:
    """Let Megatron's training loop build its optimizer with the gate in mind; idempotent.

    Without `--gate-lr-mult` and `--gate-wd-mult` the optimizer is Megatron's, untouched.
    """
    training.get_megatron_optimizer = _get_megatron_optimizer


@functools.wraps(_original)
def _get_megatron_optimizer(
    config: Any, model_chunks: list[MegatronModule], *args: Any, **kwargs: Any
) -> MegatronOptimizer:
    with _gated_qkv_split(model_chunks):
        optimizer = _original(config, model_chunks, *args, **kwargs)
    settings = get_args()
    lr_mult, wd_mult = getattr(settings, "gate_lr_mult", 1), getattr(settings, "gate_wd_mult", 1)
    if (lr_mult, wd_mult) != (1, 1):
        scale_gate_updates(optimizer, model_chunks, lr_mult, wd_mult)
    return optimizer


@contextlib.contextmanager
def _gated_qkv_split(model_chunks: list[MegatronModule]) -> Iterator[None]:
    """Tell Muon which rows of linear_qkv form a matrix of their own, which Megatron knows for its own gate only."""
    modules = (module for chunk in model_chunks for module in chunk.modules())
    attention = next((module for module in modules if isinstance(module, GatedSelfAttention)), None)
    if attention is None:
        yield
        return
    layout = attention.layout
    experts = layout.gate.key_experts + layout.gate.value_experts
    rows = [*layout.sections[:3], *[layout.kv_channels] * experts]  # each expert of Switch-Head by itself
    original = megatron_optimizer._get_qkv_split_shapes
    megatron_optimizer._get_qkv_split_shapes = lambda config: [count for count in rows if count]
    try:
        yield
    finally:
        megatron_optimizer._get_qkv_split_shapes = original


def scale_gate_updates(
    optimizer: MegatronOptimizer, model_chunks: list[MegatronModule], lr_mult: float, wd_mult: float
) -> None:
    """Multiply the learning rate and the weight decay of all gate parameters, from the next step on.

    Exact to the rounding of a parameter, for AdamW with decoupled weight decay; the learning rate alone also for other
    optimizers whose change is proportional to it.

    Args:
        optimizer: Megatron's, for torch's or a fused optimizer in fp32.
        model_chunks: what it optimizes.
        lr_mult: M, at least 0.
        wd_mult: W, at least 0.
    """
    elements = list(gate_elements(model_chunks))
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:  # nothing to optimize on this rank
            continue
        updates = GateUpdates(lr_mult, wd_mult)
        for parameter, slices in elements:
            updates.add(part, parameter, slices)
        if updates.slices:
            part.optimizer.register_step_pre_hook(updates.before)
            part.optimizer.register_step_post_hook(updates.after)


class _Saved(NamedTuple):
    now: Tensor  # a view of the parameter
    before: Tensor  # a copy
    decay: float  # lr * wd * (1 - W)


class GateUpdates:
    """The hooks around the step of one optimizer.

    Needs memory for one more copy of this rank's gate parameters, during the step.
    """

    def __init__(self, lr_mult: float, wd_mult: float) -> None:
        self.lr_mult, self.wd_mult = lr_mult, wd_mult
        self.slices: dict[Tensor, list[slice]] = {}
        self.saved: list[_Saved] = []

    def add(self, optimizer: MegatronOptimizer, parameter: nn.Parameter, slices: list[slice]) -> None:
        """Take in slices of a parameter of the model, as far as `optimizer` updates them on this rank."""
        start = 0
        if isinstance(optimizer, DistributedOptimizer):
            if parameter not in optimizer.model_param_gbuf_map:
                return
            start = optimizer._get_model_param_range_map(parameter)["param"].start
            group, index = optimizer.model_param_group_index_map[parameter]
            updated = optimizer.optimizer.param_groups[group]["params"][index]
        else:
            main = getattr(parameter, "main_param", None)  # the fp32 copy of a 16-bit parameter
            updated = parameter if main is None else main
        slices = [slice(max(part.start - start, 0), min(part.stop - start, updated.numel())) for part in slices]
        slices = [part for part in slices if part.start < part.stop]
        if slices and any(updated is other for group in optimizer.optimizer.param_groups for other in group["params"]):
            self.slices[updated] = slices

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep what the step is about to change."""
        seen = 0
        for group in optimizer.param_groups:
            decay = group["lr"] * group["weight_decay"] * (1 - self.wd_mult)
            for parameter in group["params"]:
                slices = self.slices.get(parameter, [])
                seen += bool(slices)
                if parameter.grad is not None:
                    views = [parameter.detach().view(-1)[part] for part in slices]
                    self.saved += [_Saved(view, view.clone(), decay) for view in views]
        if seen != len(self.slices):
            raise RuntimeError("the optimizer no longer has the gate's parameters that it was built with")

    def after(self, *_: Any) -> None:
        """Correct what the step has changed: p = before + M * (now - before + lr * wd * (1-W) * before)."""
        for now, before, decay in self.saved:
            now.sub_(before).add_(before, alpha=decay).mul_(self.lr_mult).add_(before)
        self.saved.clear()
