"""The step-time model against published measurements: `python tools/plan.py --published`.

All are of Megatron-Core with Transformer Engine on H100, with 4096 tokens a sequence. Sources: [zoo]
github.com/yanring/Megatron-MoE-ModelZoo, its runtime.conf and best_practice; [bridge]
docs.nvidia.com/nemo/megatron-bridge, its performance summary of container 25.09, where experts are balanced by force or
tokens dropped.
"""

from dataclasses import dataclass

COMMON = (
    "--group-query-attention --kv-channels 128 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights "
    "--seq-length 4096 --max-position-embeddings 4096 --bf16 --use-distributed-optimizer --overlap-grad-reduce "
    "--lr 1e-4 --train-iters 10 --lr-decay-style constant --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-3"
)


HIDDEN_BY_OVERLAP = 0.5
"""What --overlap-moe-expert-parallel-comm, which Megatron's HybridModel does not have, hides of the all-to-all."""


@dataclass(frozen=True)
class Measurement:
    """A published run."""

    name: str
    gpus: int
    tflops: tuple[float, float]
    """Per GPU: the lowest and highest figure."""
    flags: str
    source: str
    precision: str = "bf16"
    overlapped: bool = False
    """Whether the all-to-all of one micro batch runs beside the computation of another."""
    note: str = ""

    @property
    def argv(self) -> list[str]:
        """The command line that describes it to megagate."""
        return (self.flags if self.flags.startswith("--recipe") else f"{COMMON} {self.flags}").split()


QWEN3_235B = (
    "--hybrid-layer-pattern " + "|".join(["*E" * 2, *["*E" * 3] * 30, "*E" * 2]) + " "
    "--hidden-size 4096 --num-attention-heads 64 --num-query-groups 4 --ffn-hidden-size 12288 "
    "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536 --vocab-size 151936 --qk-layernorm "
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 8 "
    "--expert-model-parallel-size 32 --micro-batch-size 1 --global-batch-size 2048 "
    "--moe-token-dispatcher-type flex"
)

MEASUREMENTS = (
    Measurement(
        "Mixtral-8x22B",
        128,
        (445, 445),
        "--num-layers 56 --hidden-size 6144 --num-attention-heads 48 --num-query-groups 8 --ffn-hidden-size 16384 "
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 16384 --vocab-size 32768 "
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 8 "
        "--expert-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 256",
        "[zoo]",
    ),
    Measurement(
        "Qwen3-30B-A3B",
        16,
        (203, 241),
        "--num-layers 48 --hidden-size 2048 --num-attention-heads 32 --num-query-groups 4 --ffn-hidden-size 6144 "
        "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --vocab-size 151936 --qk-layernorm "
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 24 "
        "--expert-model-parallel-size 8 --micro-batch-size 2 --global-batch-size 512",
        "[bridge]",
    ),
    Measurement("Qwen3-235B-A22B", 256, (245, 245), QWEN3_235B, "[zoo]"),
    Measurement("Qwen3-235B-A22B", 256, (276, 276), QWEN3_235B, "[zoo]", overlapped=True),
    Measurement(
        "Qwen3-Next-80B-A3B",
        128,
        (89, 89),
        "--recipe examples/qwen3_next_80b_a3b/recipe.yaml --global-batch-size 256 --expert-model-parallel-size 32 "
        "--moe-token-dispatcher-type flex --recompute-modules shared_experts",
        "[zoo]",
        note="called not well tuned by its authors",
    ),
    Measurement(
        "DeepSeek-V3",
        1024,
        (338, 338),
        "--hybrid-layer-pattern " + "|".join(["*-", "*-*-", *["*E*E"] * 28, "*E", "*E"]) + " "
        "--hidden-size 7168 --num-attention-heads 96 --num-query-groups 6 --ffn-hidden-size 18432 "
        "--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
        "--vocab-size 129280 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 8 "
        "--expert-model-parallel-size 64 --micro-batch-size 1 --global-batch-size 8192 "
        "--moe-token-dispatcher-type flex --recompute-granularity selective --recompute-modules mlp",
        "[bridge]",
        precision="fp8",
        overlapped=True,
        note="latent attention stood in for by grouped-query attention with as many weights; no multi-token prediction",
    ),
)


def errors(gpu_name: str = "h100") -> list[tuple[Measurement, float, float]]:
    """Return (measurement, TFLOP/s that the model says, its relative error) of each; Megatron is taken down after each.

    The error is that to the nearest figure, 0 where there are two and it lies between them.
    """
    from megagate.data.tokenizer import quiet
    from megagate.evaluate.load import hidden_output

    with quiet():
        from megagate.plan.dry_run import arguments_for, forget
        from megagate.plan.estimate import Assumptions, estimate
        from megagate.plan.gpus import gpu
        from megagate.plan.layout import layout_of

    rows = []
    for measurement in MEASUREMENTS:
        with quiet(), hidden_output():
            args, _ = arguments_for(measurement.argv, measurement.gpus)
            forget()
        assumptions = Assumptions(hidden_expert_share=HIDDEN_BY_OVERLAP if measurement.overlapped else 0.0)
        result = estimate(
            args, layout_of(args), gpu(gpu_name), precision=measurement.precision, assumptions=assumptions
        )
        low, high = measurement.tflops
        nearest = min(max(result.model_tflops, low), high)
        rows.append((measurement, result.model_tflops, result.model_tflops / nearest - 1))
    return rows
