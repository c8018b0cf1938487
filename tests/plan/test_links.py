"""Which part of a collective's bytes leaves a node, which pipeline ranks differ, and what memory GPUs have."""

from argparse import Namespace

import pytest

from megagate.plan.communication import EXCHANGE, GATHER, REDUCE, SCATTER, SEND, Transfer
from megagate.plan.estimate import different_stages
from megagate.plan.gpus import GIB, KNOWN, gpu
from megagate.plan.layout import Layout


def crossings(ranks: int, stride: int, node: int) -> float:
    """Return the part of a ring's hops that lead to another node, where nodes are filled in order."""
    nodes = [index * stride // node for index in range(ranks)]
    return sum(here != there for here, there in zip(nodes, [*nodes[1:], nodes[0]], strict=True)) / ranks


@pytest.mark.parametrize("operation", [GATHER, SCATTER, REDUCE])
@pytest.mark.parametrize(("ranks", "stride"), [(8, 1), (64, 1), (32, 4), (8, 16), (4, 2), (128, 2)])
def test_a_ring_leaves_a_node_once(operation: str, ranks: int, stride: int) -> None:
    transfer = Transfer("data", operation, ranks, ranks * stride, 1000, 1)
    assert transfer.remote_share(8) == pytest.approx(crossings(ranks, stride, 8))


def test_an_exchange_leaves_it_for_every_rank_elsewhere() -> None:
    assert Transfer("expert", EXCHANGE, 16, 16, 1000, 1).remote_share(8) == pytest.approx(8 / 15)
    assert Transfer("expert", EXCHANGE, 8, 8, 1000, 1).remote_share(8) == 0
    assert Transfer("pipeline", SEND, 4, 17, 1000, 1).remote_share(8) == 1


@pytest.mark.parametrize(
    ("pattern", "virtual", "expected"),
    [
        ("*E|*E|*E|*E", 1, [0, 1, 3]),
        ("*E|*E|**|*E|G-|*E", 1, [0, 1, 2, 4, 5]),  # one between may hold more than those at the ends
        ("*E|*E|*E|*E", 2, [0, 1]),
        ("*E*E", 1, [0]),
    ],
)
def test_stages_that_differ(pattern: str, virtual: int, expected: list[int]) -> None:
    ranks = (pattern.count("|") + 1) // virtual
    sizes = dict.fromkeys(("tensor", "context", "expert", "expert_tensor", "instances", "micro_batch"), 1)
    layout = Layout(
        **sizes, world=ranks, pipeline=ranks, virtual=virtual, sequence_parallel=False, sequence=8, micro_batches=8
    )
    assert different_stages(Namespace(hybrid_layer_pattern=pattern), layout) == expected


def test_memory_is_what_torch_finds() -> None:
    """torch.cuda.get_device_properties(0).total_memory, as its messages print it, is less than the name says."""
    found = {"a100": 79.25, "h100": 79.18, "h200": 139.80, "b200": 178.35, "gb200": 184.31}
    assert list(found) == list(KNOWN)
    for name, size in found.items():
        assert gpu(name).memory / GIB == pytest.approx(size, abs=0.1)
