"""The experts of a mixture as one differentiable function.

Megatron's local experts run one after another as modules of their own: per expert two linear layers, a SwiGLU of five
operators, a split and a concatenation, each with its part in the backward pass. Here the experts of a rank are one
function with a hand-written backward: every product writes into its slice of one buffer, and what lies between two
products is computed expert by expert, while it is in the cache. Modules, parameters and checkpoints are Megatron's.

Letters in shapes: n tokens, counted once for each local expert that they go to, H hidden size, F hidden size of an
expert (a tensor-parallel rank's part of it).
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


class SwiGLUExperts(torch.autograd.Function):
    """y = (p * silu(x G^T) * (x U^T)) D^T for each token's expert, with [G; U] and D its weights (arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, probabilities: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        """Apply the experts.

        Args:
            ctx: autograd's.
            hidden: [n, H], ordered by expert.
            probabilities: [n], the router's weight of each row; fp32 when `hidden` is of a narrower dtype.
            counts: rows of each expert, n in all.
            weights: for each expert [2F, H], whose first half goes through silu, and [H, F].

        Returns:
            [n, H] in the dtype of `hidden`.
        """
        up, down = weights[::2], weights[1::2]
        linear = hidden.new_empty(len(hidden), up[0].shape[0])  # [n, 2F]
        output = hidden.new_empty(len(hidden), down[0].shape[0])
        for expert, rows in enumerate(_slices(counts)):
            torch.mm(hidden[rows], up[expert].t(), out=linear[rows])
            gate, value = linear[rows].chunk(2, dim=-1)
            product = functional.silu(gate).mul_(value)
            weighted = (product * probabilities[rows, None]).to(hidden.dtype)
            torch.mm(weighted, down[expert].t(), out=output[rows])
        ctx.counts = counts
        ctx.save_for_backward(hidden, probabilities, linear, *weights)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the forward pass's arguments; SwiGLU is computed again from its input."""
        hidden, probabilities, linear, *weights = ctx.saved_tensors
        up, down = weights[::2], weights[1::2]
        grad_hidden, grad_probabilities = torch.empty_like(hidden), torch.empty_like(probabilities)
        grad_linear = torch.empty_like(linear[: max(ctx.counts)])  # of one expert at a time
        grad_weights = []
        for expert, rows in enumerate(_slices(ctx.counts)):
            gate, value = linear[rows].chunk(2, dim=-1)
            probability = probabilities[rows, None]
            activated = functional.silu(gate)
            product = activated * value
            weighted = (product * probability).to(hidden.dtype)
            grad_weighted = torch.mm(grad_output[rows], down[expert])  # [n, F]
            grad_down = torch.mm(grad_output[rows].t(), weighted)

            grad_probabilities[rows] = (grad_weighted * product.to(probability.dtype)).sum(dim=-1)
            grad_product = (grad_weighted * probability).to(hidden.dtype)
            grad_rows = grad_linear[: len(gate)]
            grad_gate, grad_value = grad_rows.chunk(2, dim=-1)
            torch.mul(grad_product, activated, out=grad_value)
            torch.ops.aten.silu_backward.grad_input(grad_product.mul_(value), gate, grad_input=grad_gate)

            torch.mm(grad_rows, up[expert], out=grad_hidden[rows])
            grad_weights += [torch.mm(grad_rows.t(), hidden[rows]), grad_down]
        return grad_hidden, grad_probabilities, None, *grad_weights


def _slices(counts: list[int]) -> Iterator[slice]:
    """Yield the rows of each expert."""
    start = 0
    for count in counts:
        yield slice(start, start + count)
        start += count


class TorchExperts(SequentialMLP):
    """Megatron's local experts, computed by `SwiGLUExperts` where they are plain SwiGLUs that nothing hooks into.

    With --overlap-param-gather DDP hooks into them, and Megatron's own forward runs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.is_plain = (
            config.gated_linear_unit
            and config.activation_func is functional.silu
            and config.activation_func_clamp_value is None
            and not (config.glu_linear_offset or config.add_bias_linear or config.moe_apply_probs_on_input)
            and not (config.fp8 or config.fp4 or config.use_te_activation_func or config.delay_wgrad_compute)
            and not config.gradient_accumulation_fusion
            and all(
                type(expert.linear_fc1) is ColumnParallelLinear and type(expert.linear_fc2) is RowParallelLinear
                for expert in self.local_experts
            )
        )

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the experts to [n, H] ordered by expert, with [experts] rows each and the weights [n] of the rows.

        Returns:
            [n, H], and None for the bias. Under expert tensor parallelism it is this rank's part of the sum over F,
            which the dispatcher adds up.
        """
        if not self.is_plain or self._is_hooked():
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        weights = [
            weight for expert in self.local_experts for weight in (expert.linear_fc1.weight, expert.linear_fc2.weight)
        ]
        counts = [len(permuted_local_hidden_states)] if len(weights) == 2 else tokens_per_expert.tolist()
        return SwiGLUExperts.apply(permuted_local_hidden_states, permuted_probs, counts, *weights), None

    def _is_hooked(self) -> bool:
        """Whether calling the experts' modules does more than compute.

        With --overlap-param-gather a hook before a module's forward waits for its parameters.
        """
        return any(
            module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
            for expert in self.local_experts
            for module in expert.modules()
        )
