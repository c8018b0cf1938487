"""Megatron's router of tokens to experts, with its global load-balancing loss at full strength."""

from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

GLOBAL_LOSS = "global_load_balancing_loss"
"""Megatron's name for the loss of --moe-router-load-balancing-type global_aux_loss."""


class Router(TopKRouter):
    """The loss over the global batch (arXiv 2501.11873) with the same coefficient on any data-parallel size.

    Each rank computes its share of that loss, so the shares must be summed over data-parallel ranks. Megatron averages
    them, as it does all gradients, which divides the coefficient by the data-parallel size (NVIDIA/Megatron-LM#3672).
    """

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, aux_loss_name: str, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Add the loss to what `activation` passes back; the logged value is Megatron's."""
        if aux_loss_name == GLOBAL_LOSS:
            data_parallel_size = self.tp_dp_cp_group.size() // self.tp_cp_group.size()
            aux_loss, aux_loss_coeff = aux_loss * data_parallel_size, aux_loss_coeff * data_parallel_size
        return super().attach_and_log_load_balancing_loss(
            activation, aux_loss_coeff, aux_loss, aux_loss_name, *args, **kwargs
        )
