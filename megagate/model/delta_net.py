"""Gated DeltaNet, the linear attention of Qwen3-Next (Yang et al. 2024, arXiv 2412.06464), with whole gradients.

Its output norm has the weight w in any model, as Qwen3-Next has it. Megatron's has w - 1 in a model with
--apply-layernorm-1p, and what w - 1 is in bf16 cannot be told from w in bf16, nor w from it.

The layer is Megatron's: one projection to queries, keys, values, output gate, write strength and decay; a short causal
convolution; the gated delta rule; a norm of each head, multiplied by silu of the output gate; the output projection.
"""

import copy
from functools import partial
from typing import Any

import torch
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup


class GatedDeltaNet(gated_delta_net.GatedDeltaNet):
    """Megatron's layer, whose output norm has a plain weight and its gradient summed over tensor-parallel ranks.

    That norm is held whole by each rank and applied to the rank's own heads, so each has a part of the gradient.
    Megatron sums such parts only under sequence parallelism, where the norm's parameters are marked for it.

    Takes the arguments of Megatron's.
    """

    def __init__(
        self, config: TransformerConfig, submodules: GatedDeltaNetSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        if config.layernorm_zero_centered_gamma:
            plain = copy.copy(config)
            plain.layernorm_zero_centered_gamma = False
            self.out_norm = build_module(
                submodules.out_norm, config=plain, hidden_size=self.value_head_dim, eps=config.layernorm_epsilon
            )
        if self.tp_size > 1 and not config.sequence_parallel:
            for parameter in self.out_norm.parameters():
                parameter.register_hook(partial(_sum_over_ranks, group=self.tp_group))


def _sum_over_ranks(gradient: Tensor, group: ProcessGroup) -> Tensor:
    total = gradient.clone()  # autograd may use the gradient elsewhere
    torch.distributed.all_reduce(total, group=group)
    return total
