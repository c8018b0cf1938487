"""Initial weights: the same model on every layout, with Megatron's distributions."""

import contextlib
import functools
import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from megagate.gate import PRESETS, QKVLayout
from tests.distributed import run_distributed
from tests.model.training import Case, build, copies, join

FLAGS = (
    "--num-layers 4 --num-query-groups 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 "
    "--ffn-hidden-size 48 --moe-layer-freq [1,0,1,0] --moe-shared-expert-intermediate-size 16 --disable-bias-linear "
    "--add-qkv-bias --untie-embeddings-and-output-weights --init-method-std 0.05 --micro-batch-size 1 "
    "--gate-preset sdpa-headwise"
)
TIED = FLAGS.replace("--untie-embeddings-and-output-weights", "")
STD, LAYERS = 0.05, 8  # the four blocks are eight hybrid layers
LAYOUTS = {
    "TP2+SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "TP4+SP+ETP2": (4, "--tensor-model-parallel-size 4 --sequence-parallel --expert-tensor-parallel-size 2"),
    "PP2+VPP2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "EP4": (4, "--expert-model-parallel-size 4"),
    "CP2": (2, "--context-parallel-size 2"),
    "TP2+SP+PP2+EP2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--expert-model-parallel-size 2",
    ),
}


def initial_pieces(flags: list[str], without_names: bool = False) -> list[list]:
    """Return this rank's parameters of several models; on request as Megatron alone initialises them."""
    from megagate.model import builder

    by_name = mock.patch.object(builder, "initialize_by_name", lambda model, seed: model)
    with by_name if without_names else contextlib.nullcontext():
        return [copies(build(Case(flags=each, initial=True))[0]) for each in flags]


def initial_parameters(flags: list[str], ranks: int = 1, **settings) -> list[dict[str, Tensor]]:
    results = run_distributed(initial_pieces, ranks, flags, timeout=100, **settings)
    return [join([piece for rank in results for piece in rank[index]]) for index in range(len(flags))]


@functools.cache
def one_process() -> list[dict[str, Tensor]]:
    return initial_parameters([FLAGS, TIED, f"{FLAGS} --seed 4321"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_model_on_every_layout(name: str) -> None:
    ranks, flags = LAYOUTS[name]
    for actual, expected in zip(
        initial_parameters([f"{FLAGS} {flags}", f"{TIED} {flags}"], ranks), one_process(), strict=False
    ):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(actual[key], value), key


def test_another_seed_is_another_model() -> None:
    first, _, other = one_process()
    for key, value in first.items():
        if value.dim() > 1:
            assert (value != other[key]).float().mean() > 0.8, key


def standard_deviations(parameters: dict[str, Tensor]) -> dict[str, float]:
    padding = QKVLayout(8, 2, 8, PRESETS["sdpa-headwise"]).padding_row_mask()
    matrices = {key: value for key, value in parameters.items() if value.dim() > 1}
    return {key: float((value[~padding] if "linear_qkv" in key else value).std()) for key, value in matrices.items()}


def test_distributions() -> None:
    """Layers that write to the residual stream are scaled down by the root of the number of hybrid layers."""
    deviations = standard_deviations(one_process()[0])
    assert len(deviations) == 1 + 4 * 2 + 2 * 2 + 2 * 5 + 1
    for key, deviation in deviations.items():
        is_output = "linear_proj" in key or "linear_fc2" in key
        # The wider margin is for the smallest matrices: 128 numbers in a router.
        numbers = one_process()[0][key].numel()
        assert deviation == pytest.approx(
            STD / math.sqrt(LAYERS) if is_output else STD, rel=4 / math.sqrt(2 * numbers)
        ), key
        assert abs(float(one_process()[0][key].mean())) < 4 * deviation / math.sqrt(numbers)


def test_distributions_are_megatrons() -> None:
    """What Megatron itself draws, in another order, has the same scale for each kind of parameter."""
    megatrons = run_distributed(initial_pieces, 1, [FLAGS], without_names=True, timeout=100)[0][0]
    theirs, ours = standard_deviations(join(megatrons)), standard_deviations(one_process()[0])
    assert theirs.keys() == ours.keys()
    for key, deviation in theirs.items():
        assert ours[key] == pytest.approx(deviation, rel=8 / math.sqrt(2 * one_process()[0][key].numel())), key


def test_norms_biases_and_padding_are_not_drawn() -> None:
    padding = QKVLayout(8, 2, 8, PRESETS["sdpa-headwise"]).padding_row_mask()
    for key, value in one_process()[0].items():
        if "linear_qkv.weight" in key:
            assert torch.count_nonzero(value[padding]) == 0
            assert (value[~padding] != 0).all()
        if value.dim() == 1:
            assert torch.equal(value, torch.ones_like(value) if "norm" in key else torch.zeros_like(value)), key


def test_no_two_matrices_are_alike() -> None:
    """Experts, gated halves of an MLP and layers are drawn independently."""
    matrices = []
    for key, value in one_process()[0].items():
        if value.dim() > 1:
            for matrix in value if value.dim() == 3 else [value]:
                matrices += matrix.chunk(2) if "linear_fc1" in key else [matrix]
    starts = [tuple(matrix.flatten()[:4].tolist()) for matrix in matrices]
    assert len(set(starts)) == len(starts)
