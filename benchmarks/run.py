"""Step time of each gate against the ungated model, and of sdpa-elementwise against Megatron's own gate.

    make bench        or        python benchmarks/run.py [--rounds N]

One process, one model of each kind, steps in turn, so that whatever else the machine does falls on all alike. A step is
forward, backward, gradient clipping and AdamW on 2 x 4 x 256 tokens. Read the ratios; the times mean nothing elsewhere.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

import megagate.platform  # noqa: F401  # before Megatron

# isort: split
import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from megagate.gate.config import PRESETS, preset
from megagate.model.specs import hybrid_stack_spec

BLOCKS, SEQUENCE, MICRO_BATCH, MICRO_BATCHES, VOCABULARY = 4, 256, 4, 2, 4096
MEGATRONS_GATE = "Megatron's own gate"


def build(variant: str) -> HybridModel:
    """Return a fresh model: a gate preset by name, or sdpa-elementwise computed by Megatron's own attention."""
    gate = preset("sdpa-elementwise" if variant == MEGATRONS_GATE else variant)
    config = TransformerConfig(
        num_layers=2 * BLOCKS,
        hidden_size=256,
        num_attention_heads=8,
        num_query_groups=2,
        kv_channels=32,
        ffn_hidden_size=256,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=256,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        is_hybrid_model=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        attention_output_gate=gate.acts_on_sdpa_output,
    )
    spec = hybrid_stack_spec(config, gate)
    if variant == MEGATRONS_GATE:
        attention = spec.submodules.attention_layer.submodules.self_attention
        attention.module = SelfAttention
        del attention.params["gate"], attention.params["recompute_gate"]
    return HybridModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        hybrid_layer_pattern="*E" * BLOCKS,
        position_embedding_type="rope",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def step_of(model: HybridModel) -> Callable[[], None]:
    """Return a function that takes one optimizer step on random tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    positions = torch.arange(SEQUENCE).expand(MICRO_BATCH, -1)

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            tokens = torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE + 1))
            losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
            (losses.mean() / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each variant")
    rounds = parser.parse_args().rounds

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    variants = [*PRESETS, MEGATRONS_GATE]
    models = {variant: build(variant) for variant in variants}
    steps = {variant: step_of(model) for variant, model in models.items()}
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for turn in range(rounds + 2):
        for variant in variants:
            start = time.perf_counter()
            steps[variant]()
            if turn >= 2:  # the first rounds allocate
                times[variant].append(time.perf_counter() - start)
    medians = {variant: statistics.median(values) for variant, values in times.items()}
    print(f"python benchmarks/run.py --rounds {rounds}  ({torch.get_num_threads()} threads, medians)")
    print(f"{'model':24}{'parameters':>12}{'step, ms':>10}{'of baseline':>13}")
    for variant in variants:
        size = sum(parameter.numel() for parameter in models[variant].parameters())
        ratio = medians[variant] / medians["baseline"]
        print(f"{variant:24}{size:>12,}{1000 * medians[variant]:>10.0f}{ratio:>13.3f}")
    own = medians["sdpa-elementwise"] / medians[MEGATRONS_GATE]
    print(f"sdpa-elementwise takes {own:.3f} of the time of {MEGATRONS_GATE}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
