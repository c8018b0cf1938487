"""Flags of a run whose effect a plan does not count, so that it can say so."""

import argparse

from megagate.model.backends.torch_backend import NOT_RECOMPUTED


def uncounted(args: argparse.Namespace) -> list[str]:
    """Return flags that change what a plan counts and that it counts as if they were not there.

    Args:
        args: as given, before flags are taken out that need Transformer Engine.
    """
    stored = [name for name in args.recompute_modules or () if name in NOT_RECOMPUTED]
    flags = {
        f"--optimizer {args.optimizer} (states as Adam's)": args.optimizer != "adam",
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
        "--fine-grained-activation-offloading": args.fine_grained_activation_offloading,
        f"--recompute-modules {' '.join(stored)}": stored,
        "--moe-expert-capacity-factor": args.num_experts and args.moe_expert_capacity_factor,
        "--moe-latent-size": args.num_experts and args.moe_latent_size,
        f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type} (as alltoall)": args.num_experts
        and args.moe_token_dispatcher_type in ("allgather", "flex"),
        "--overlap-moe-expert-parallel-comm": args.overlap_moe_expert_parallel_comm,
        "--tp-comm-overlap": args.tp_comm_overlap,
        "--cuda-graph-impl": args.cuda_graph_impl != "none",
        "--window-size (as attention to all tokens before)": args.window_size,
    }
    return [flag for flag, is_given in flags.items() if is_given]
