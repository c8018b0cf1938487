"""A checkpoint is evaluated whatever made its training fast on many GPUs."""

import argparse
import math
from typing import Any

import torch

from tests.distributed import run_distributed

RUNS: dict[str, dict[str, Any]] = {
    "virtual stages": {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_model_parallel_size": 4},
    "DeepEP": {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True},
    "hybrid EP": {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "hybridep",
        "moe_expert_rank_capacity_factor": 1.5,
    },
    "hybrid context": {"hybrid_context_parallel": True},
    "activation": {"use_te_activation_func": True},
    "clipped": {"qk_clip": True},
    "NCCL": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep"},
    "overlap": {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
    "deferred": {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 2},
    "grouped": {"moe_grouped_gemm": True, "moe_single_grouped_weight": True, "moe_paged_stash": True},
    "graphs": {"cuda_graph_impl": "local", "batch_invariant_mode": True},
    "network": {
        "nccl_ub": True,
        "nccl_communicator_config_path": "gone.yaml",
        "use_sharp": True,
        "sharp_enabled_group": "dp",
        "symmetric_ar_type": "two_shot",
        "tp_comm_overlap": True,
    },
    "memory": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn"],
        "recompute_modules": ["moe_act"],
    },
    "cross entropy": {"cross_entropy_loss_fusion": True},
}
"""What the arguments of a run in FP8 may have besides; some of it only where other packages are."""


def test_what_is_for_many_gpus_does_not_keep_one_process_from_loading() -> None:
    assert run_distributed(built, 1, timeout=100) == [list(RUNS)]


def built() -> list[str]:
    """Build the model of each run for one process, on the meta device; return those that could be."""
    from megagate.checkpoint.described_model import model_state
    from megagate.model.pattern import as_hybrid
    from megagate.plan.dry_run import arguments_for, forget
    from tests.plan.cluster import without_help

    torch.distributed.destroy_process_group()  # the test's own, of one rank
    flags = ["--recipe", "examples/moe_15a2b/recipe_fp8.yaml", "--num-layers", "2", "--model-impl", "gpt"]
    with without_help():
        parsed, _ = arguments_for(flags, 64)
    forget()
    found = []
    for name, values in RUNS.items():
        saved = argparse.Namespace(**(vars(parsed) | values))
        held = model_state(as_hybrid(saved)).tensors.values()
        assert sum(math.prod(tensor.shape) for tensor in held) > 10**9
        found.append(name)
    return found
