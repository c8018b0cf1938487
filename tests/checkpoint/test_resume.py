"""N steps are k steps, a save, a load and N - k steps: bit for bit on the same layout, to 1e-6 on another one.

All runs are the real trainer's, and what is compared are the checkpoints at the end: weights, moments, steps, random
states, the schedule and the counters.
"""

from pathlib import Path
from typing import Any

import pytest

from megagate.errors import UserError
from tests.checkpoint.conftest import Trained
from tests.checkpoint.training import DISTRIBUTED, SMALL, differences, train_in_rank
from tests.distributed import run_distributed

TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel".split()
EXPERT = "--expert-model-parallel-size 2".split()
PIPELINE = "--pipeline-model-parallel-size 2".split()
VIRTUAL = [*PIPELINE, *"--num-virtual-stages-per-pipeline-rank 2".split()]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "data2": (2, []),
    "tensor2": (2, TENSOR),
    "expert2": (2, EXPERT),
    "tensor2-expert2": (2, [*TENSOR, *EXPERT]),
    "pipeline2": (2, PIPELINE),
    "pipeline2-virtual2": (2, VIRTUAL),
    "tensor2-data2": (4, TENSOR),
    "tensor2-pipeline2": (4, [*TENSOR, *PIPELINE]),
    "expert-tensor2": (2, [*TENSOR, *"--expert-tensor-parallel-size 2".split()]),
    "expert2-data2": (4, EXPERT),
}
"""Name -> (ranks, flags)."""


def resume(source: Path, target: Path, layout: str, flags: list[str], **options: Any) -> Path:
    """Go on from step 2 in `source` on another or the same layout, and return the checkpoint at step 4."""
    world_size, layout_flags = LAYOUTS[layout]
    argv = [*SMALL, *layout_flags, *flags, "--load", str(source), "--ckpt-step", "2"]
    argv += ["--save", str(target), "--save-interval", "4"]
    run_distributed(train_in_rank, world_size, argv, timeout=100, **options)
    return target / "iter_0000004"


def compare(reference: Path, checkpoint: Path, tolerance: float | None = None) -> list[str]:
    return run_distributed(differences, 1, reference, checkpoint, tolerance)[0]


def check_same_layout(trained: Trained, target: Path, layout: str, flags: list[str], **options: Any) -> None:
    world_size, layout_flags = LAYOUTS[layout]
    straight = trained(world_size, [*layout_flags, *flags], **options)
    assert compare(straight / "iter_0000004", resume(straight, target, layout, flags, **options)) == []


def check_other_layout(trained: Trained, target: Path, before: str, after: str, flags: list[str]) -> None:
    world_size, layout_flags = LAYOUTS[before]
    straight = trained(world_size, [*layout_flags, *flags])
    assert compare(straight / "iter_0000004", resume(straight, target, after, flags), tolerance=1e-6) == []


def test_a_stopped_run_goes_on_in_its_directory(trained: Trained, tmp_path: Path) -> None:
    world_size, layout_flags = LAYOUTS["tensor2-expert2"]
    flags = [*layout_flags, *DISTRIBUTED]
    argv = [*SMALL, *flags, "--save", str(tmp_path), "--save-interval", "100"]
    run_distributed(train_in_rank, world_size, [*argv, "--exit-interval", "2"], timeout=100)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    run_distributed(train_in_rank, world_size, [*argv, "--load", str(tmp_path)], timeout=100)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    straight = trained(world_size, flags)
    assert compare(straight / "iter_0000002", tmp_path / "iter_0000002") == []
    assert compare(straight / "iter_0000004", tmp_path / "iter_0000004") == []


def test_steps_2_and_4_differ(trained: Trained) -> None:
    """Else the comparisons here would compare nothing."""
    straight = trained(*LAYOUTS["data2"])
    lines = compare(straight / "iter_0000002", straight / "iter_0000004", tolerance=1e-6)
    for part in ("decoder.final_norm.weight", "exp_avg.", "exp_avg_sq.", "/common_step", "num_steps", "consumed_train"):
        assert any(part in line for line in lines), part


FULL = pytest.mark.full
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1".split()


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        pytest.param("tensor2-expert2", [*DISTRIBUTED, "--bf16"], id="distributed-bf16"),
        pytest.param("tensor2-expert2", [], id="plain-fp32"),
        pytest.param("tensor2-expert2", ["--bf16"], id="plain-bf16", marks=FULL),
        pytest.param("tensor2", [*DISTRIBUTED, *DROPOUT], id="dropout"),
        pytest.param("pipeline2-virtual2", [*DISTRIBUTED, *DROPOUT], id="dropout-pipeline", marks=FULL),
        pytest.param("data2", [*DISTRIBUTED, *DROPOUT, "--data-parallel-random-init"], id="dropout-data", marks=FULL),
        pytest.param("data2", [*DISTRIBUTED, "--dataloader-type", "cyclic"], id="cyclic", marks=FULL),
        pytest.param("tensor2-data2", DISTRIBUTED, id="tensor2-data2", marks=FULL),
        pytest.param("expert2-data2", DISTRIBUTED, id="expert2-data2", marks=FULL),
        pytest.param("tensor2-pipeline2", [*DISTRIBUTED, "--bf16"], id="tensor2-pipeline2", marks=FULL),
        pytest.param("expert-tensor2", DISTRIBUTED, id="expert-tensor2", marks=FULL),
    ],
)
def test_same_layout(trained: Trained, tmp_path: Path, layout: str, flags: list[str]) -> None:
    check_same_layout(trained, tmp_path, layout, flags)


def test_dropout_needs_a_generator_of_its_own(trained: Trained, tmp_path: Path) -> None:
    """The platform's patch: a data loader must not draw from the generator that dropout draws from."""
    options = {"without": "data_loader_seed"}
    world_size, layout_flags = LAYOUTS["one"]
    straight = trained(world_size, [*layout_flags, *DROPOUT], **options)
    assert compare(straight / "iter_0000004", resume(straight, tmp_path, "one", DROPOUT, **options)) != []


@pytest.mark.parametrize(
    ("before", "after", "flags"),
    [
        pytest.param("data2", "tensor2", DISTRIBUTED, id="data2-to-tensor2"),
        pytest.param("data2", "expert2", DISTRIBUTED, id="data2-to-expert2"),
        pytest.param("data2", "pipeline2-virtual2", DISTRIBUTED, id="data2-to-virtual"),
        pytest.param("data2", "one", DISTRIBUTED, id="data2-to-one"),
        pytest.param("tensor2-expert2", "data2", DISTRIBUTED, id="tensor2-expert2-to-data2"),
        pytest.param("tensor2-expert2", "pipeline2", DISTRIBUTED, id="tensor2-expert2-to-pipeline2", marks=FULL),
        pytest.param("pipeline2-virtual2", "tensor2", DISTRIBUTED, id="virtual-to-tensor2", marks=FULL),
        pytest.param("pipeline2-virtual2", "one", DISTRIBUTED, id="virtual-to-one", marks=FULL),
        pytest.param("expert-tensor2", "expert2", DISTRIBUTED, id="expert-tensor2-to-expert2"),
        pytest.param("expert2", "expert-tensor2", DISTRIBUTED, id="expert2-to-expert-tensor2", marks=FULL),
        pytest.param("one", "expert2-data2", DISTRIBUTED, id="one-to-expert2-data2", marks=FULL),
        pytest.param("one", "tensor2-pipeline2", DISTRIBUTED, id="one-to-tensor2-pipeline2", marks=FULL),
        pytest.param("tensor2-pipeline2", "one", DISTRIBUTED, id="tensor2-pipeline2-to-one", marks=FULL),
        pytest.param("tensor2-expert2", "data2", [], id="plain-tensor2-expert2-to-data2"),
        pytest.param("data2", "tensor2", [], id="plain-data2-to-tensor2", marks=FULL),
        pytest.param("data2", "pipeline2-virtual2", [], id="plain-data2-to-virtual", marks=FULL),
    ],
)
def test_other_layout(trained: Trained, tmp_path: Path, before: str, after: str, flags: list[str]) -> None:
    check_other_layout(trained, tmp_path, before, after, flags)


@pytest.mark.parametrize(("before", "after"), [("one", "tensor2"), pytest.param("tensor2", "one", marks=FULL)])
def test_fewer_groups_than_tensor_ranks(trained: Trained, tmp_path: Path, before: str, after: str) -> None:
    check_other_layout(trained, tmp_path, before, after, [*DISTRIBUTED, "--num-query-groups", "1"])


@pytest.mark.full
def test_other_precision_with_the_distributed_optimizer(trained: Trained, tmp_path: Path) -> None:
    """Its weights are fp32 at any precision, so that a run may change it."""
    straight = trained(2, DISTRIBUTED)
    checkpoint = resume(straight, tmp_path, "data2", [*DISTRIBUTED, "--bf16"])
    lines = compare(straight / "iter_0000004", checkpoint, tolerance=5e-2)
    assert all("torch.bfloat16" in line or ".exp_avg" in line for line in lines), lines


STAGE_WITHOUT_EXPERTS = {"first": ["--moe-layer-freq", "[0,0,1,1]"], "last": ["--moe-layer-freq", "[1,1,0,0]"]}


@pytest.mark.parametrize(
    ("stage", "flags"),
    [
        pytest.param("first", DISTRIBUTED, id="first-distributed"),
        pytest.param("last", DISTRIBUTED, id="last-distributed", marks=FULL),
        pytest.param("first", ["--bf16"], id="first-plain-bf16"),
        pytest.param("last", ["--bf16"], id="last-plain-bf16", marks=FULL),
        pytest.param("first", [], id="first-plain", marks=FULL),
        pytest.param("last", [], id="last-plain", marks=FULL),
    ],
)
def test_a_stage_without_experts(trained: Trained, tmp_path: Path, stage: str, flags: list[str]) -> None:
    flags = [*flags, *STAGE_WITHOUT_EXPERTS[stage]]
    check_same_layout(trained, tmp_path / "same", "pipeline2", flags)
    if "--bf16" not in flags:
        check_other_layout(trained, tmp_path / "one", "pipeline2", "one", flags)


@pytest.mark.parametrize("stage", [pytest.param("first", marks=FULL), "last"])
def test_a_stage_without_experts_needs_the_size_of_the_metrics(stage: str) -> None:
    argv = [*SMALL, *PIPELINE, *STAGE_WITHOUT_EXPERTS[stage], "--train-iters", "2"]
    with pytest.raises(Exception, match=r"SIGABRT|gloo|preamble"):
        run_distributed(train_in_rank, 2, argv, timeout=60, without="size_expert_metrics")


def test_a_stage_without_experts_needs_the_step_of_the_others(trained: Trained, tmp_path: Path) -> None:
    options = {"without": "sharded_state_dict"}
    flags = [*DISTRIBUTED, *STAGE_WITHOUT_EXPERTS["first"]]
    straight = trained(2, [*PIPELINE, *flags], **options)
    with pytest.raises(AssertionError, match=r"steps: \["):
        resume(straight, tmp_path, "pipeline2", flags, **options)


def test_one_optimizer_for_experts_and_the_rest_is_refused(trained: Trained, tmp_path: Path) -> None:
    """As Megatron alone writes without expert parallelism, and as megagate's would without separate parameters."""
    straight = trained(2, DISTRIBUTED, without="separate_expert_parameters")
    with pytest.raises(UserError, match="one optimizer, as Megatron writes it without expert parallelism: add --no-lo"):
        resume(straight, tmp_path, "expert2", DISTRIBUTED)
    argv = [*SMALL, *EXPERT, *DISTRIBUTED, "--load", str(straight), "--no-load-optim", "--train-iters", "4"]
    run_distributed(train_in_rank, 2, argv, timeout=100)


BUCKETS = [*DISTRIBUTED, "--no-dist-ckpt-optim-fully-reshardable"]
"""The optimizer's state as Megatron writes it unless told otherwise: for other data parallel sizes at most."""


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        pytest.param("tensor2-expert2", ["--bf16"], id="bf16"),
        pytest.param("data2", [], id="fp32", marks=FULL),
        pytest.param("pipeline2", STAGE_WITHOUT_EXPERTS["first"], id="first-stage-without-experts", marks=FULL),
    ],
)
def test_not_fully_reshardable(trained: Trained, tmp_path: Path, layout: str, flags: list[str]) -> None:
    check_same_layout(trained, tmp_path, layout, [*flags, *BUCKETS])


def test_not_fully_reshardable_on_another_layout(trained: Trained, tmp_path: Path) -> None:
    check_other_layout(trained, tmp_path, "data2", "one", BUCKETS)
    with pytest.raises(UserError) as failure:
        resume(trained(2, BUCKETS), tmp_path / "pipeline", "pipeline2", BUCKETS)
    assert str(failure.value).endswith(
        "was written with tensor parallel 1, pipeline parallel 1, expert parallel 1 and "
        "--no-dist-ckpt-optim-fully-reshardable, but this run has tensor parallel 1, pipeline parallel 2, expert "
        "parallel 1: use the same sizes, or add --no-load-optim to load the weights only"
    )
