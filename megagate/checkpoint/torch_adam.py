"""Exact resume with torch's AdamW under Megatron's distributed optimizer.

Without Transformer Engine and Apex, Megatron falls back to torch.optim.AdamW, whose state differs from theirs in one
thing: each parameter has a `step` tensor of its own. The distributed optimizer mishandles it in the ways listed at each
function; `apply` mends them and does nothing where a fused optimizer is used. `tests/checkpoint/test_torch_adam.py`
shows that each is still needed.
"""

import functools
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_originals: dict[str, Any] = {}


def apply() -> None:
    """Mend the distributed optimizer in place, if torch's AdamW is what it wraps; idempotent."""
    if distrib_optimizer.HAVE_APEX_OR_TE or _originals:
        return
    for name, mend in MENDS.items():
        _originals[name] = getattr(DistributedOptimizer, name)
        setattr(DistributedOptimizer, name, mend(_originals[name]))


def restore(name: str) -> None:
    """Put Megatron's own method `name` back; for the tests that show what it does wrong."""
    setattr(DistributedOptimizer, name, _originals[name])


def reapply(name: str) -> None:
    """Undo `restore`."""
    setattr(DistributedOptimizer, name, MENDS[name](_originals[name]))


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
    """A fresh optimizer, or a rank whose shard holds no parameter, has no step to save: the original asserts."""

    @functools.wraps(original)
    def state_dict(self: DistributedOptimizer) -> dict[str, Any]:
        if self.is_stub_optimizer:
            return original(self)
        initialize_state(self.optimizer)
        if self.optimizer.state:
            return original(self)
        # The step that counts is written by the first rank, which always holds parameters.
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
    """Loading a fully reshardable checkpoint passes no step, and the original looks one up (it is loaded elsewhere)."""

    @functools.wraps(original)
    def set_states(self: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        original(self, model_param, {"step": None, **tensors})

    return set_states


MENDS = {
    "state_dict": _mend_state_dict,
    "load_state_dict": _mend_load_state_dict,
    "_set_main_param_and_optimizer_states": _mend_set_states,
}
