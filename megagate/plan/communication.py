"""Bytes that a rank hands over in a step, by kind of parallelism, and over which link they go.

Each entry is a collective of Megatron's, or of megagate's attention, with the bytes of the tensor that a rank gives to
it; tests hold them against the collectives that torch dispatches. Left out are messages of a few bytes: losses, norms,
flags, the counts of tokens for each expert.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from megagate.gate.layout import layout_from_args
from megagate.model.pattern import ATTENTION, DELTA_NET, DENSE, EXPERTS
from megagate.plan.layout import Layout
from megagate.plan.memory import FP32, StaticMemory, gradient_width, stage_static

GATHER, SCATTER, REDUCE, EXCHANGE, SEND = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "send",
)


@dataclass(frozen=True)
class Transfer:
    """What a rank gives to one kind of collective in the course of a step."""

    kind: str
    """The parallelism that it is for."""
    operation: str
    ranks: int
    span: int
    """How many ranks, counted from the group's first to its last, lie between its ends."""
    given: int
    """Bytes of the tensors given, all calls of the step together."""
    calls: int

    @property
    def sent(self) -> float:
        """Bytes that leave the rank, by the ring algorithms of NCCL; an all-to-all keeps its own share."""
        others = self.ranks - 1
        share = {
            GATHER: others,
            SCATTER: others / self.ranks,
            REDUCE: 2 * others / self.ranks,
            EXCHANGE: others / self.ranks,
            SEND: 1,
        }
        return self.given * share[self.operation]

    def remote_share(self, node: int) -> float:
        """Return which part of what is sent leaves a node of so many ranks, on average over those that are in it.

        A ring leaves a node once, wherever it has several ranks there; NCCL makes as many rings as there are ports, so
        that these share the bytes.
        """
        if self.span <= node:
            return 0.0
        inside = max(1, node * self.ranks // self.span)
        if self.operation == EXCHANGE:
            return (self.ranks - inside) / (self.ranks - 1)
        return 1.0 if self.operation == SEND else 1 / inside


def step_transfers(
    args: argparse.Namespace, layout: Layout, pipeline_rank: int, static: StaticMemory | None = None
) -> list[Transfer]:
    """Return what a rank of a pipeline stage hands over in one step.

    Args:
        args: validated arguments.
        layout: of the run.
        pipeline_rank: the stage; its ranks hand over alike, if the experts are used alike.
        static: what its ranks hold, if it is known.
    """
    static = static or stage_static(args, layout, pipeline_rank)
    found = [
        *_tensor_parallel(args, layout, pipeline_rank, static),
        *_expert_parallel(args, layout, pipeline_rank),
        *_context_parallel(args, layout, pipeline_rank),
        *_pipeline_parallel(args, layout, pipeline_rank),
        *_data_parallel(args, layout, static),
    ]
    return [transfer for transfer in found if transfer.ranks > 1 and transfer.given]


def _repeats(args: argparse.Namespace, layers: str, module: str, symbol: str) -> int:
    """Return how often a step runs the forward pass of layers of one kind, for each micro batch: once or twice each."""
    count = layers.count(symbol)
    if args.recompute_granularity == "selective" and module in args.recompute_modules:
        return 2 * count
    if args.recompute_granularity == "full":
        every = args.recompute_num_layers
        return count + (layers[:every] if args.recompute_method == "block" else layers).count(symbol)
    return count


def _tensor_parallel(
    args: argparse.Namespace, layout: Layout, pipeline_rank: int, static: StaticMemory
) -> Iterator[Transfer]:
    shard = layout.sharded_tokens * args.hidden_size * args.params_dtype.itemsize
    tensor, batches = layout.tensor, layout.micro_batches
    gathered = scattered = reduced = losses = 0
    for layers, first, last in layout.chunks(args.hybrid_layer_pattern, pipeline_rank):
        blocks = {symbol: layers.count(symbol) for symbol in (ATTENTION, DELTA_NET, DENSE)}
        runs = {
            ATTENTION: _repeats(args, layers, "", ATTENTION),
            DELTA_NET: _repeats(args, layers, "", DELTA_NET),
            DENSE: _repeats(args, layers, "mlp", DENSE),
        }
        if args.moe_shared_expert_intermediate_size:
            blocks[EXPERTS] = layers.count(EXPERTS)
            module = "moe" if "moe" in (args.recompute_modules or ()) else "shared_experts"
            runs[EXPERTS] = _repeats(args, layers, module, EXPERTS)
        forward, backward = sum(runs.values()), sum(blocks.values())
        if layout.sequence_parallel:
            # Forward: gather the input, scatter the output. Backward: gather the input again for the weights'
            # gradient, and the output's gradient; scatter the input's gradient.
            gathered += forward + 2 * backward + first + 2 * last
            scattered += forward + backward + first + last
        else:
            reduced += forward + backward + first + last
        losses += last
    yield Transfer("tensor", GATHER, tensor, tensor, gathered * shard * batches, gathered * batches)
    yield Transfer("tensor", SCATTER, tensor, tensor, scattered * shard * tensor * batches, scattered * batches)
    yield Transfer("tensor", REDUCE, tensor, tensor, reduced * shard * batches, reduced * batches)
    # The cross entropy of a divided vocabulary: largest logit, sum of exponentials, the target's logit.
    yield Transfer("tensor", REDUCE, tensor, tensor, 3 * losses * layout.tokens * FP32 * batches, 3 * losses * batches)
    yield Transfer("tensor", REDUCE, tensor, tensor, _replicated_gradients(args, layout, static), 1)


def _replicated_gradients(args: argparse.Namespace, layout: Layout, static: StaticMemory) -> int:
    """Return the bytes of gradients that are sums over tensor-parallel ranks: of what each holds whole.

    Under sequence parallelism that is all of it, else only the norms of queries and keys.
    """
    partial = ("q_layernorm", "k_layernorm")
    whole = ("layernorm", "final_norm", "router.", "linear_gate", "gate_weight", "out_norm")
    names = whole if layout.sequence_parallel else partial
    held = (tensor for chunk in static.chunks for tensor in chunk)
    return sum(tensor.size for tensor in held if any(name in tensor.name for name in names)) * gradient_width(args)


def _expert_parallel(args: argparse.Namespace, layout: Layout, pipeline_rank: int) -> Iterator[Transfer]:
    """All-to-all of tokens and their probabilities to the experts, of results back, and of both ways' gradients."""
    if not args.num_experts:
        return
    rows = layout.sharded_tokens * args.moe_router_topk
    hidden, width = args.hidden_size, args.params_dtype.itemsize
    probability = FP32 if args.moe_router_dtype == "fp32" else 2 * FP32 if args.moe_router_dtype == "fp64" else width
    forward = backward = 0
    for layers, _, _ in layout.chunks(args.hybrid_layer_pattern, pipeline_rank):
        forward += _repeats(args, layers, "moe", EXPERTS)
        backward += layers.count(EXPERTS)
    passes, batches, span = forward + backward, layout.micro_batches, layout.expert * layout.expert_tensor
    given = passes * rows * (2 * hidden * width + probability) * batches
    yield Transfer("expert", EXCHANGE, layout.expert, span, given, 3 * passes * batches)
    # Expert tensor parallelism gathers all rows, and adds up the parts of the results in the dtype of probabilities.
    ranks = layout.expert_tensor
    given = rows * (forward * (hidden * width + probability) + backward * hidden * probability) * batches
    yield Transfer("expert tensor", GATHER, ranks, ranks, given, (2 * forward + backward) * batches)
    given = ranks * rows * (forward * hidden * probability + backward * (hidden * width + probability)) * batches
    yield Transfer("expert tensor", SCATTER, ranks, ranks, given, (forward + 2 * backward) * batches)


def _context_parallel(args: argparse.Namespace, layout: Layout, pipeline_rank: int) -> Iterator[Transfer]:
    """Keys and values of the whole sequence for each rank's queries, and their gradients back."""
    groups = max(1, layout_from_args(args).num_query_groups // layout.tensor)
    given = 2 * layout.tokens * groups * args.kv_channels * args.params_dtype.itemsize
    forward = backward = 0
    for layers, _, _ in layout.chunks(args.hybrid_layer_pattern, pipeline_rank):
        forward += _repeats(args, layers, "core_attn", ATTENTION)
        backward += layers.count(ATTENTION)
    ranks, batches, span = layout.context, layout.micro_batches, layout.tensor * layout.context
    yield Transfer("context", GATHER, ranks, span, given * forward * batches, 2 * forward * batches)
    yield Transfer("context", SCATTER, ranks, span, given * ranks * backward * batches, 2 * backward * batches)


def _pipeline_parallel(args: argparse.Namespace, layout: Layout, pipeline_rank: int) -> Iterator[Transfer]:
    """Activations to the next stage, their gradients to the one before, and the gradient of a tied embedding."""
    hidden = layout.sharded_tokens * args.hidden_size * args.params_dtype.itemsize
    messages = layout.micro_batches * sum(
        (not first) + (not last) for _, first, last in layout.chunks(args.hybrid_layer_pattern, pipeline_rank)
    )
    stride = layout.world // layout.pipeline
    ranks = layout.pipeline
    yield Transfer("pipeline", SEND, ranks, stride + 1, hidden * messages, messages)
    tied = not args.untie_embeddings_and_output_weights and ranks > 1
    if tied and pipeline_rank in (0, ranks - 1):
        size = args.padded_vocab_size // layout.tensor * args.hidden_size * gradient_width(args)
        yield Transfer("pipeline", REDUCE, 2, layout.world, size, 1)


def _data_parallel(args: argparse.Namespace, layout: Layout, static: StaticMemory) -> Iterator[Transfer]:
    """Gradients to the ranks that keep their part of the optimizer's state, and the new weights back."""
    gradient = gradient_width(args)
    dense_span = layout.world // layout.pipeline
    # Without overlap each of Megatron's two optimizers, that of dense weights and that of experts, gathers all weights.
    gathers = 1 if args.overlap_param_gather else len({is_expert for is_expert, *_ in static.buffers})
    for is_expert, size, _ in static.buffers:
        kind = "expert data" if is_expert else "data"
        ranks = layout.expert_data if is_expert else layout.data_context
        if not args.use_distributed_optimizer:
            yield Transfer(kind, REDUCE, ranks, dense_span, size * gradient, 1)
            continue
        own = max(1, ranks // layout.instances)
        yield Transfer(kind, SCATTER, own, dense_span // layout.instances, size * gradient, 1)
        given = int(gathers * size // own * static.gathered[is_expert])
        yield Transfer(kind, GATHER, own, dense_span // layout.instances, given, gathers)
        if layout.instances > 1:
            yield Transfer(kind, REDUCE, layout.instances, dense_span, size // own * gradient, 1)
