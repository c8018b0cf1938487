"""Exact resume with torch's AdamW under Megatron's optimizers.

Without Transformer Engine and Apex, Megatron falls back to torch.optim.AdamW, whose state differs from theirs in one
thing: each parameter has a `step` tensor of its own. Megatron mishandles it in the ways listed at each function;
`apply` mends them and does nothing where a fused optimizer is used. `tests/checkpoint/test_torch_adam.py` shows that
each is still needed.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

MAIN_PARAMETERS = "fp32_from_fp16_params"
"""Where Megatron's optimizer that is not distributed saves the fp32 copies of 16-bit parameters, a list per group."""

_originals: dict[str, Any] = {}


def apply() -> None:
    """Mend Megatron's optimizers in place, if torch's AdamW is what they wrap; idempotent."""
    if distrib_optimizer.HAVE_APEX_OR_TE or _originals:
        return
    for name, (owner, _) in MENDS.items():
        _originals[name] = getattr(owner, name)
        reapply(name)


def restore(name: str) -> None:
    """Put Megatron's own method `name` back; for the tests that show what it does wrong."""
    owner, _ = MENDS[name]
    setattr(owner, name, _originals[name])


def reapply(name: str) -> None:
    """Undo `restore`."""
    owner, mend = MENDS[name]
    setattr(owner, name, mend(_originals[name]))


def initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters without state the state that AdamW gives them at its first step: zero moments, step 0."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _mend_state_dict(original: Any) -> Any:
    """A fresh optimizer, or one whose shard holds no parameter, has no step to save: the original asserts."""

    @functools.wraps(original)
    def state_dict(self: DistributedOptimizer) -> dict[str, Any]:
        if self.is_stub_optimizer:
            return original(self)
        initialize_state(self.optimizer)
        if self.optimizer.state:
            return original(self)
        # The step that counts is that of the first rank, which holds parameters or shares the step of those that do.
        placeholder = torch.nn.Parameter(torch.empty(0))
        self.optimizer.state[placeholder] = {"step": torch.tensor(0.0)}
        self.optimizer.param_groups[0]["params"].append(placeholder)
        try:
            return original(self)
        finally:
            del self.optimizer.state[placeholder]
            self.optimizer.param_groups[0]["params"].pop()

    return state_dict


def _mend_load_state_dict(original: Any) -> Any:
    """The original gives one step tensor to all parameters, which AdamW then increments once for each of them."""

    @functools.wraps(original)
    def load_state_dict(self: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return load_state_dict


def _mend_set_states(original: Any) -> Any:
    """The step is loaded elsewhere; the original looks for one here too.

    A fully reshardable checkpoint passes none, which fails. One that is not (Megatron's default, dp_reshardable) passes
    that of the fresh optimizer, which would set the loaded step back to 0; and it is copied under autograd, which fp32
    parameters do not allow.
    """

    @torch.no_grad()
    @functools.wraps(original)
    def set_states(self: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        original(self, model_param, {**tensors, "step": None})

    return set_states


def _mend_sharded_state_dict(original: Any) -> Any:
    """A pipeline stage without experts has an expert optimizer without parameters, hence without step and fp32 copies.

    What is not a tensor is saved by the first rank for all. With such a first stage, the experts of the others would
    resume at step 0, or fail on the fp32 copies; with such a later stage, that one would miss its empty list of copies.
    All optimizers of a chain have taken the same number of steps, and an empty list is each rank's own.
    """

    @functools.wraps(original)
    def sharded_state_dict(self: ChainedOptimizer, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        state = original(self, *args, **kwargs)
        if len(self.chained_optimizers) > 1:
            _share_step(list(state.values()))
            for part in state.values():
                if not any(part.get(MAIN_PARAMETERS, [True])):
                    part[MAIN_PARAMETERS] = LocalNonpersistentObject(part[MAIN_PARAMETERS])
        return state

    return sharded_state_dict


def _share_step(states: list[dict[str, Any]]) -> None:
    """Give the state dicts of chained optimizers the highest step among them."""
    inner = [state.get("optimizer", state) for state in states]
    inner = [state for state in inner if isinstance(state, dict)]  # else sharded: each stage loads its own
    # The distributed optimizer keeps the step in its groups, the others next to the moments, and only when above 0.
    groups = [group for state in inner for group in state["param_groups"] if "step" in group]
    moments = [state["state"] for state in inner if "state" in state]
    for holders, key in ((groups, "step"), (moments, "common_step")):
        step = max((holder.get(key, 0) for holder in holders), default=0)
        if step:
            for holder in holders:
                holder[key] = step


MENDS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "state_dict": (DistributedOptimizer, _mend_state_dict),
    "load_state_dict": (DistributedOptimizer, _mend_load_state_dict),
    "_set_main_param_and_optimizer_states": (DistributedOptimizer, _mend_set_states),
    "sharded_state_dict": (ChainedOptimizer, _mend_sharded_state_dict),
}
"""Megatron's method -> its class and what mends it."""
