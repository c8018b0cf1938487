"""Bytes that an attention layer keeps for the backward pass, with gated tensors stored and rebuilt.

    python benchmarks/memory.py

One layer in bf16: hidden size 1024, 16 heads of 64 in 4 groups, 1 x 512 tokens. What counts is each storage that the
forward pass allocated and that still exists after it, weights and the layer's own input and output left out.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

import megagate.platform  # noqa: F401  # before Megatron

# isort: split
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megagate.gate import PRESETS, GateConfig
from megagate.model.specs import hybrid_stack_spec

HIDDEN, HEADS, GROUPS, CHANNELS, SEQUENCE = 1024, 16, 4, 64, 512


class Allocations(TorchDispatchMode):
    """Remembers the storages of all tensors that operators return inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)
                self._storages[reference.cdata] = reference, storage.nbytes()
        return result

    def held_bytes(self, *others: torch.Tensor) -> int:
        """Return the bytes of the storages that still exist, without those of `others`."""
        known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in others}
        held = [
            size for cdata, (storage, size) in self._storages.items() if cdata not in known and not storage.expired()
        ]
        return sum(held)


def build(gate: GateConfig, recompute_gate: bool) -> torch.nn.Module:
    """Return one attention layer."""
    config = TransformerConfig(
        transformer_impl="local",
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=CHANNELS,
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        attention_output_gate=gate.acts_on_sdpa_output,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
    )
    stack = hybrid_stack_spec(config, gate, recompute_gate=recompute_gate)
    spec = stack.submodules.attention_layer.submodules.self_attention
    collection = ProcessGroupCollection.use_mpu_process_groups()
    return build_module(spec, config=config, layer_number=1, pg_collection=collection)


def held_for_backward(gate: GateConfig, recompute_gate: bool = False) -> int:
    """Return the bytes that the layer keeps between forward and backward; needs Megatron's process groups."""
    layer = build(gate, recompute_gate)
    hidden = torch.randn(SEQUENCE, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.randn(SEQUENCE, 1, 1, CHANNELS)
    with Allocations() as allocations:
        output, _ = layer(hidden, attention_mask=None, rotary_pos_emb=angles)
    return allocations.held_bytes(hidden, angles, output, *layer.parameters())


def main() -> None:
    """Measure and print."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    print("python benchmarks/memory.py  (bytes per token and layer, bf16)")
    print(f"{'gate':36}{'stored':>8}{'of baseline':>13}{'rebuilt':>9}{'saved':>7}")
    baseline = held_for_backward(PRESETS["baseline"]) // SEQUENCE
    print(f"{'baseline':36}{baseline:>8}{'':>13}")
    for name, gate in PRESETS.items():
        if not gate.is_baseline:
            stored, rebuilt = (held_for_backward(gate, recompute) // SEQUENCE for recompute in (False, True))
            print(f"{name:36}{stored:>8}{stored - baseline:>+13}{rebuilt:>9}{stored - rebuilt:>7}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
