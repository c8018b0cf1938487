"""Where the routers send the tokens of a step, all ranks and micro batches together.

- experts/tokens/layer-NN: a histogram over the experts of the tokens that each gets, after what exceeds its capacity is
  dropped.
- experts/max-to-mean-load: tokens of the busiest expert over the mean; 1 is even.
- experts/dead: experts without a token.
- experts/router-entropy: mean over tokens of -sum p ln p of the router's distribution over all experts, in nats:
  softmax of its logits, or for another score function its scores divided by their sum.
- experts/drop-rate: the share of the token's choices (top-k each) that were dropped.

Each also by block, as `/layer-NN`; the mean over blocks stands under the name itself.
"""

import contextlib
from functools import partial
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_pg_rank
from torch import Tensor

from megagate.telemetry.observer import NOTHING, Findings, Histogram, Layer, call_after, layer_name, ratio
from megagate.telemetry.totals import Totals


def router_entropy(logits: Tensor, score_function: str) -> Tensor:
    """Return the sum over tokens of the entropy of each one's distribution over the experts, from logits [..., e]."""
    logits = logits.double()
    if score_function == "softmax":
        probability = logits.softmax(dim=-1)
    else:
        scores = logits.sigmoid() if score_function == "sigmoid" else logits.exp().log1p().sqrt()
        probability = scores / scores.sum(dim=-1, keepdim=True)
    return -(probability * probability.clamp(min=1e-300).log()).sum()


class ExpertObserver:
    """Observes every router.

    Args:
        experts: of a layer.
        totals: where the sums go.
        replicated: whether all tensor-parallel ranks route the same tokens.
        tensor_parallel: their group.
    """

    def __init__(self, experts: int, totals: Totals, replicated: bool, tensor_parallel: Any) -> None:
        self.totals = totals
        self.counts = not replicated or get_pg_rank(tensor_parallel) == 0
        totals.declare_sum("experts tokens", experts)
        for name in ("entropy", "routed", "choices"):
            totals.declare_sum(f"experts {name}")

    def attach(self, layers: list[Layer], on_exit: contextlib.ExitStack) -> None:
        """Observe how each router chooses."""
        for layer in layers:
            experts = getattr(layer.module, "mlp", None)
            if self.counts and isinstance(experts, MoELayer):
                call_after(experts.router, "routing", partial(self._observe, experts.router, layer.block), on_exit)

    def _observe(self, router: Any, block: int, result: tuple[Tensor, Tensor], logits: Tensor) -> None:
        """Look at one call: logits [s', b, e] and the map [s'*b, e] of the experts that were chosen."""
        probability, routing_map = result
        if router.config.moe_pad_expert_input_to_capacity:
            routing_map = routing_map & (probability != 0)  # without the tokens that only fill a place
        add = partial(self.totals.add, block=block)
        add("experts tokens", value=routing_map.sum(dim=0))
        add("experts entropy", value=router_entropy(logits, router.score_function))
        add("experts routed", value=float(len(routing_map)))
        add("experts choices", value=float(len(routing_map) * router.topk))

    def findings(self, totals: dict[str, Tensor]) -> Findings:
        """Return loads, entropies and drop rates."""
        found, tokens, choices = Findings(), totals["experts tokens"], totals["experts choices"]
        kept = tokens.sum(dim=-1)
        found.add_by_block("experts/max-to-mean-load", ratio(tokens.amax(dim=-1), tokens.mean(dim=-1)))
        dead = (tokens == 0).sum(dim=-1).double()
        dead[choices == 0] = NOTHING
        found.add_by_block("experts/dead", dead)
        found.add_by_block("experts/router-entropy", ratio(totals["experts entropy"], totals["experts routed"]))
        found.add_by_block("experts/drop-rate", ratio(choices - kept, choices))
        for block in choices.nonzero().flatten().tolist():
            name = layer_name(block + 1, len(choices))
            found.histograms[f"experts/tokens/{name}"] = Histogram.of_values(tokens[block])
        return found
