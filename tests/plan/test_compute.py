"""The plan's operations are those that torch counts, and add up to those that the training log shows."""

import pytest

from tests.distributed import run_distributed
from tests.plan.cluster import without_help
from tests.plan.measured import all_counted_operations
from tests.plan.test_memory import FULL, MIXED, MODEL, SELECTIVE, UNTIED

COUNTED = [
    MODEL + UNTIED + "--gate-preset baseline",
    MODEL + "--gate-preset sdpa-headwise",
    MODEL + UNTIED + "--gate-preset value-elementwise",
    MODEL + UNTIED + "--gate-preset output-elementwise",
    MIXED + "--moe-shared-expert-gate",
    *(MIXED + SELECTIVE + modules for modules in ("core_attn", "mlp", "moe", "shared_experts gate")),
    *(MIXED + FULL + method for method in ("uniform --recompute-num-layers 1", "block --recompute-num-layers 1")),
]
RECIPES = {
    "examples/dense_1b7/recipe_28l.yaml": 32,
    "examples/moe_15a2b/recipe.yaml": 64,
    "examples/qwen3_next_80b_a3b/recipe.yaml": 128,
}
NOT_LOGGED = ("router",)


def test_operations_that_torch_counts() -> None:
    """Forward and backward, within 1 %; torch's kernel on the CPU has no formula of torch's, so the test brings one."""
    results = run_distributed(all_counted_operations, 1, COUNTED, timeout=200)[0]
    for flags, (counted, planned) in zip(COUNTED, results, strict=True):
        assert planned == pytest.approx(counted, rel=0.01), flags


def test_operations_that_the_log_shows() -> None:
    for recipe, (planned, logged) in run_distributed(planned_and_logged, 1, timeout=100)[0].items():
        assert planned == pytest.approx(logged, rel=1e-4), recipe  # a shared expert's gate is one row


def planned_and_logged() -> dict[str, tuple[float, float]]:
    """Return the operations for a token by the plan, without what the log leaves out, and by the log."""
    from megagate.plan.compute import per_token
    from megagate.plan.dry_run import arguments_for, forget
    from megagate.pretrain.flops import num_floating_point_operations

    results = {}
    for recipe, gpus in RECIPES.items():
        with without_help():
            args, _ = arguments_for(["--recipe", recipe], gpus)
        parts = per_token(args)
        planned = sum(count for part, count in parts.items() if part not in NOT_LOGGED)
        results[recipe] = planned, num_floating_point_operations(args, 1) / args.seq_length
        forget()
    return results
