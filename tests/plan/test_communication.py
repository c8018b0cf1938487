"""The plan's bytes are those of the collectives of a real step on gloo, exactly."""

from collections import Counter

import pytest

from tests.distributed import run_distributed
from tests.plan.test_memory import FULL, GATED, MIXED, MODEL, SELECTIVE, TENSOR
from tests.plan.traffic import given_and_planned

PIPELINE = "--pipeline-model-parallel-size 2 "
EXPERT = "--expert-model-parallel-size 2 "
SHARDED = "--use-distributed-optimizer "

LAYOUTS = [
    (2, GATED + SHARDED + TENSOR),
    (2, GATED + "--tensor-model-parallel-size 2"),
    (2, MIXED + SHARDED + EXPERT),
    (2, MIXED + SHARDED + TENSOR + EXPERT + "--moe-shared-expert-gate"),
    (2, GATED + SHARDED + "--context-parallel-size 2 " + SELECTIVE + "core_attn"),
    (2, MODEL + SHARDED + PIPELINE + "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2"),
    (4, MIXED + SHARDED + TENSOR + EXPERT + PIPELINE),
    (2, GATED),
    (2, MIXED + SHARDED),
    (2, MIXED + SHARDED + TENSOR + "--expert-tensor-parallel-size 2"),
    (2, MIXED + SHARDED + TENSOR + EXPERT + FULL + "uniform --recompute-num-layers 1"),
    (2, MIXED + SHARDED + TENSOR + EXPERT + SELECTIVE + "moe mlp"),
    (4, MIXED + SHARDED + EXPERT + "--overlap-grad-reduce --overlap-param-gather"),
]


@pytest.mark.parametrize(("ranks", "flags"), LAYOUTS)
def test_bytes_given_to_collectives(ranks: int, flags: str) -> None:
    given: Counter[tuple[str, int]] = Counter()
    planned: Counter[tuple[str, int]] = Counter()
    for rank in run_distributed(given_and_planned, ranks, flags, timeout=100):
        given.update(rank[0])  # all ranks together: which rank gets how many tokens is the router's choice
        planned.update(rank[1])
    assert planned == given
    assert sum(given.values()) > 0
