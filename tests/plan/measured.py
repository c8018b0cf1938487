"""One micro batch through a real model on the CPU, with what autograd saves counted by hooks; runs inside a rank."""

from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megagate.model import recompute
from tests.model import training


def saved_bytes(flags: str) -> tuple[int, int]:
    """Return (bytes that autograd saves besides parameters, bytes that the plan says), for one micro batch.

    Args:
        flags: of the trainer, besides those of tests.model.training.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    from megagate.plan.activations import chunk_activations
    from megagate.plan.layout import layout_of
    from megagate.pretrain.batch import forward_step

    model, *_ = training.build(training.Case(flags=f"{flags} --no-gate-fusion"))  # a CPU has no kernel for the gate
    args = get_args()
    constant = {parameter.untyped_storage().data_ptr() for parameter in model[0].parameters()}
    saved: dict[int, tuple[StorageWeakRef, int]] = {}

    def pack(tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in constant and tensor.device.type == "cpu":
            reference = StorageWeakRef(storage)
            saved[reference.cdata] = reference, storage.nbytes()
        return tensor

    def inner_hooks(inner: Any, unpack: Any) -> Any:
        """Hooks within hooks replace them: count what those of --recompute-modules gate keep."""

        def pack_both(tensor: torch.Tensor) -> Any:
            packed = inner(tensor)
            return pack(packed) if isinstance(packed, torch.Tensor) else packed

        return saved_tensors_hooks(pack_both, unpack)

    batches = training.micro_batches(0, False, get_num_microbatches())
    inner = mock.patch.object(recompute, "saved_tensors_hooks", inner_hooks)
    with inner, saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward_step(batches, model[0])
    kept = sum(size for storage, size in saved.values() if not storage.expired())  # topk's saved indices do not stay
    del result
    layout = layout_of(args)
    (chunk,) = layout.chunks(args.hybrid_layer_pattern, 0)
    planned = chunk_activations(args, layout, *chunk)
    return kept, sum(planned.values())


def all_saved_bytes(cases: list[str]) -> list[tuple[int, int]]:
    """Return the same for several cases of one layout."""
    return [saved_bytes(case) for case in cases]


def counted_operations(flags: str) -> tuple[float, float]:
    """Return (operations of a forward and backward pass that torch counts, that the plan says), for one micro batch."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args
    from torch.utils.flop_counter import FlopCounterMode

    from megagate.plan.compute import backward_operations, forward_operations, recomputed_operations
    from megagate.plan.layout import layout_of
    from megagate.pretrain.batch import forward_step

    model, *_ = training.build(training.Case(flags=flags))
    args = get_args()
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def flash_operations(query: torch.Size, key: torch.Size, *shapes: Any, out_shape: Any, **kwargs: Any) -> int:
        batch, heads, length, channels = query
        return 2 * 2 * batch * heads * length * key[-2] * channels

    def flash_backward_operations(grad: Any, query: Any, key: Any, *shapes: Any, **kwargs: Any) -> int:
        return 5 * flash_operations(query, key, out_shape=None) // 2

    counter = FlopCounterMode(
        display=False, custom_mapping={flash: flash_operations, backward: flash_backward_operations}
    )
    batches = training.micro_batches(0, False, get_num_microbatches())
    with counter:
        output, loss = forward_step(batches, model[0])
        loss(output)[0].backward()
    layout = layout_of(args)
    ((layers, first, last),) = layout.chunks(args.hybrid_layer_pattern, 0)
    # torch's kernel on the CPU skips the future too, but its shapes do not tell.
    forward = forward_operations(args, layers, first, last, causal=False)
    again = recomputed_operations(args, layers, forward, causal=False)
    planned = sum((forward + backward_operations(forward) + again).values())
    return counter.get_total_flops(), planned * layout.tokens


def all_counted_operations(cases: list[str]) -> list[tuple[float, float]]:
    """Return the same for several cases."""
    return [counted_operations(case) for case in cases]


def static_bytes(flags: str) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Return (weights, gradients, main weights, Adam's moments) of this rank in bytes, as they are and as planned."""
    from megatron.training import get_args

    from megagate.checkpoint.torch_adam import initialize_state
    from megagate.plan.layout import layout_of
    from megagate.plan.memory import static_memory

    model, optimizer, _ = training.build(training.Case(flags=flags))
    args = get_args()
    weights = gradients = main = moments = 0
    for chunk in model:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            held = [buffer.param_data] if buffer.param_data is not None else buffer.params
            weights += sum(tensor.nbytes for tensor in held)
            gradients += buffer.grad_data.nbytes
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        initialize_state(part.optimizer)
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                moments += state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
                # Of an fp32 model the optimizer changes the weights themselves.
                main += parameter.nbytes if args.bf16 else 0
    planned = static_memory(args, layout_of(args), torch.distributed.get_rank())
    return (
        (weights, gradients, main, moments),
        (planned.weights, planned.gradients, planned.main_weights, planned.moments),
    )
