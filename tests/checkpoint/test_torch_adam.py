"""Each mend of Megatron's optimizers is still needed, and with all of them a resumed optimizer is the same.

The optimizer is Megatron's, on a few linear layers. The mend of chained optimizers is tested on a model with experts,
in test_resume.py.
"""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed

FULLY_RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}
SIZES = (4, 40, 10, 1)
"""Of the layers' inputs and outputs: 3 parameters, of which the second lies in the shards of both ranks."""
DP_RESHARDABLE = {"distrib_optim_sharding_type": "dp_reshardable"}


@contextlib.contextmanager
def mended(without: str | None) -> Iterator[None]:
    from megagate.checkpoint import torch_adam

    torch_adam.apply()
    if without is None:
        yield
        return
    torch_adam.restore(without)
    try:
        yield
    finally:
        torch_adam.reapply(without)


class Trainee:
    """Linear layers under Megatron's distributed optimizer; the gradients follow from the number of the step."""

    def __init__(self, *sizes: int, dtype: torch.dtype = torch.float32) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.transformer_config import TransformerConfig

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        torch.manual_seed(0)
        layers = torch.nn.Sequential(*(torch.nn.Linear(*size, bias=False) for size in itertools.pairwise(sizes)))
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            layers.to(dtype),
        )
        options: dict[str, Any] = {"bf16": True, "params_dtype": dtype} if dtype == torch.bfloat16 else {}
        self.chain = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, **options), [self.model]
        )
        (self.optimizer,) = self.chain.chained_optimizers

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.model.zero_grad_buffer()
        for parameter in self.model.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        succeeded, _, _ = self.chain.step()
        assert succeeded

    def sharded(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        rank = torch.distributed.get_rank()
        return {
            name: ShardedTensor.from_rank_offsets(name, parameter, replica_id=(0, 0, rank))
            for name, parameter in self.model.module.named_parameters()
        }

    def save(self, directory: Path, metadata: dict[str, Any]) -> None:
        from megatron.core import dist_checkpointing

        model = self.sharded()
        state = self.chain.sharded_state_dict(model, metadata=dict(metadata))
        dist_checkpointing.save({"model": model, "optimizer": state}, str(directory))

    def load(self, directory: Path, metadata: dict[str, Any]) -> None:
        from megatron.core import dist_checkpointing

        model = self.sharded()
        state = self.chain.sharded_state_dict(model, is_loading=True, metadata=dict(metadata))
        loaded = dist_checkpointing.load({"model": model, "optimizer": state}, str(directory))
        self.model.load_state_dict(loaded["model"])
        self.chain.load_state_dict(loaded["optimizer"])

    def steps(self) -> set[float]:
        return {state["step"].item() for state in self.optimizer.optimizer.state.values()}


def resume(directory: Path, metadata: dict[str, Any], without: str | None, dtype: torch.dtype) -> tuple[float, Any]:
    """Take 3 steps, save, and take 2 more; load into a fresh one and take 2 more there.

    Returns the largest difference between the two models' weights, and the steps that Adam counts in the second.
    """
    with mended(None):
        straight = Trainee(*SIZES, dtype=dtype)
        for number in range(3):
            straight.step(number)
        straight.save(directory, metadata)
        for number in range(3, 5):
            straight.step(number)
    with mended(without):
        resumed = Trainee(*SIZES, dtype=dtype)
        resumed.load(directory, metadata)
        for number in range(3, 5):
            resumed.step(number)
    pairs = zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
    return max((first - second).abs().max().item() for first, second in pairs), resumed.steps()


def run(directory: Path, metadata: dict[str, Any], without: str | None, dtype: torch.dtype) -> list[tuple[float, Any]]:
    directory.mkdir()
    return run_distributed(resume, 2, directory, metadata, without, dtype, timeout=60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("metadata", [FULLY_RESHARDABLE, DP_RESHARDABLE], ids=["fully", "dp"])
def test_a_mended_optimizer_resumes_exactly(tmp_path: Path, metadata: dict[str, Any], dtype: torch.dtype) -> None:
    for difference, steps in run(tmp_path / "checkpoint", metadata, None, dtype):
        assert difference == 0.0
        assert steps == {5.0}


def test_a_fresh_optimizer_has_no_state_to_load_into(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failure:
        run(tmp_path / "checkpoint", FULLY_RESHARDABLE, "state_dict", torch.float32)
    assert "assert len(steps) == 1" in failure.value.__notes__[0]


def test_one_step_tensor_for_all_parameters_runs_away(tmp_path: Path) -> None:
    results = run(tmp_path / "checkpoint", FULLY_RESHARDABLE, "load_state_dict", torch.float32)
    assert all(difference > 1e-4 for difference, _ in results)
    # Adam counts each of the 2 steps once for every parameter of the rank: two on each, one of them cut in two.
    assert [steps for _, steps in results] == [{3.0 + 2 * 2}, {3.0 + 2 * 2}]


def test_a_fully_reshardable_checkpoint_holds_no_step(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="step"):
        run(tmp_path / "checkpoint", FULLY_RESHARDABLE, "_set_main_param_and_optimizer_states", torch.float32)


def test_a_dp_reshardable_checkpoint_sets_the_step_back(tmp_path: Path) -> None:
    name = "_set_main_param_and_optimizer_states"
    results = run(tmp_path / "checkpoint", DP_RESHARDABLE, name, torch.bfloat16)
    assert all(difference > 1e-4 and steps == {2.0} for difference, steps in results)


def test_a_dp_reshardable_checkpoint_in_fp32_is_copied_under_autograd(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="leaf Variable"):
        run(tmp_path / "checkpoint", DP_RESHARDABLE, "_set_main_param_and_optimizer_states", torch.float32)


def steps_of_a_rank_without_parameters(without: str | None) -> tuple[int, list[float]]:
    with mended(without):
        trainee = Trainee(4, 1)  # 4 numbers, and a shard has at least 64
        trainee.step(0)
        state = trainee.optimizer.state_dict()
        groups = trainee.optimizer.optimizer.param_groups
        assert all(parameter.numel() for group in groups for parameter in group["params"])
        return sum(len(group["params"]) for group in groups), [
            group["step"] for group in state["optimizer"]["param_groups"]
        ]


def test_a_rank_without_parameters_has_no_step_to_save() -> None:
    first, second = run_distributed(steps_of_a_rank_without_parameters, 2, None)
    assert first[0] > 0 and set(first[1]) == {1.0}
    assert second[0] == 0 and set(second[1]) == {0.0}
    with pytest.raises(AssertionError) as failure:
        run_distributed(steps_of_a_rank_without_parameters, 2, "state_dict")
    assert "rank 1 of 2" in failure.value.__notes__[0]


def apply_twice() -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megagate.checkpoint import torch_adam

    torch_adam.apply()
    once = DistributedOptimizer.state_dict
    torch_adam.apply()
    return DistributedOptimizer.state_dict is once


def test_applying_twice_is_applying_once() -> None:
    assert run_distributed(apply_twice, 1) == [True]
