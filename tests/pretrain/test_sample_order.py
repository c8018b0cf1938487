"""The samples of N steps are the same on every layout, with any number of loader workers, and across a resume."""

import multiprocessing

import numpy as np
import pytest

from tests.data.datasets import write_dataset
from tests.distributed import run_distributed
from tests.model.training import GLOBAL_BATCH, build
from tests.pretrain.indexed import DataCase, whole_sequences

STEPS = 4
MODEL = "--num-layers 2 --ffn-hidden-size 48 --num-query-groups 4 --micro-batch-size 2 --seed 5"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --disable-bias-linear"
TENSOR2 = "--tensor-model-parallel-size 2 --sequence-parallel"

Read = tuple[int, list[list[list[int]]]]
"""A rank's place in data parallelism, and the tokens of each of its micro batches."""


def read(flags: str, consumed: int) -> Read | None:
    """Return what this rank reads after `consumed` samples to the end of the run; None where it reads nothing."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
    from megatron.training import get_args
    from megatron.training.training import build_train_valid_test_data_iterators

    from megagate.pretrain import sampler
    from megagate.pretrain.batch import get_batch
    from megagate.pretrain.datasets import dataset_provider

    multiprocessing.set_start_method("fork", force=True)  # as in a run; ranks of tests are spawned
    sampler.apply()
    build(DataCase(flags=flags, initial=True))
    args = get_args()
    args.consumed_train_samples, args.iteration = consumed, consumed // GLOBAL_BATCH
    iterator = build_train_valid_test_data_iterators(dataset_provider)[0]
    ranks = parallel_state.get_data_parallel_world_size()
    batches = []
    while consumed < STEPS * GLOBAL_BATCH:
        update_num_microbatches(consumed, consistency_check=False)
        for _ in range(get_num_microbatches()):
            tokens = get_batch(iterator, None)["tokens"]
            if tokens is not None:
                batches.append(whole_sequences(tokens).tolist())
        consumed += get_num_microbatches() * args.micro_batch_size * ranks
    return (parallel_state.get_data_parallel_rank(), batches) if batches else None


def in_order(reads: list[Read | None]) -> list[list[int]]:
    """Return all samples in the order of the run; ranks with the same data must agree."""
    by_rank: dict[int, list[list[list[int]]]] = {}
    for rank, batches in filter(None, reads):
        assert by_rank.setdefault(rank, batches) == batches
    ranks = [by_rank[rank] for rank in sorted(by_rank)]
    return [sample for turn in zip(*ranks, strict=True) for batch in turn for sample in batch]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags for a blend of two datasets, of which one is read more than once."""
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(3)
    sizes = {"large": 200, "small": 8}
    paths = []
    for name, size in sizes.items():
        documents = [generator.integers(1, 62, length).tolist() for length in generator.integers(1, 30, size)]
        paths.append(write_dataset(folder / name, documents))
    flags = f"--data-path 0.6 {paths[0]} 0.4 {paths[1]} --split 1,0,0 --eval-iters 0"
    return f"{MODEL} {flags} --data-cache-path {folder / 'cache'} --train-iters {STEPS}"


@pytest.fixture(scope="module")
def expected(data: str) -> list[list[int]]:
    samples = in_order(run_distributed(read, 1, f"{data} --num-workers 0", 0))
    assert len(samples) == STEPS * GLOBAL_BATCH
    assert len({tuple(sample) for sample in samples}) > STEPS * GLOBAL_BATCH / 2
    return samples


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, "--num-workers 1", id="one-worker"),
        pytest.param(1, "--num-workers 2", id="two-workers"),
        pytest.param(2, "--num-workers 1", id="data2"),
        pytest.param(2, f"{TENSOR2} --num-workers 0", id="tensor2"),
        pytest.param(2, "--pipeline-model-parallel-size 2 --num-workers 0", id="pipeline2"),
        pytest.param(2, "--context-parallel-size 2 --num-workers 0", id="context2"),
        pytest.param(2, f"{EXPERTS} --expert-model-parallel-size 2 --num-workers 0", id="expert2"),
        pytest.param(2, "--micro-batch-size 1 --num-workers 2", id="data2-smaller-micro-batches"),
    ],
)
def test_samples_do_not_depend_on_the_layout(data: str, expected: list[list[int]], ranks: int, layout: str) -> None:
    assert in_order(run_distributed(read, ranks, f"{data} {layout}", 0, timeout=100)) == expected


@pytest.mark.parametrize(("ranks", "layout"), [(1, "--num-workers 2"), (2, "--num-workers 0"), (2, TENSOR2)])
@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_neither_repeats_nor_skips(
    data: str, expected: list[list[int]], ranks: int, layout: str, step: int
) -> None:
    consumed = step * GLOBAL_BATCH
    assert in_order(run_distributed(read, ranks, f"{data} {layout}", consumed, timeout=100)) == expected[consumed:]


BYTES = (
    "--tokenizer-type ByteLevelTokenizer --tokenizer-special-tokens <fim_prefix> <fim_middle> <fim_suffix> <fim_pad> "
    "--vocab-size 320"
)
VARIANTS = {
    "cyclic": "--dataloader-type cyclic",
    "batch-size-ramp-up": f"--rampup-batch-size 4 4 8 --train-samples {STEPS * GLOBAL_BATCH}",
    "fill-in-the-middle": f"{BYTES} --fim-data --fim-rate 0.9",
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(data: str, expected: list[list[int]], variant: str) -> None:
    flags = f"{data} {VARIANTS[variant]}"
    samples = in_order(run_distributed(read, 1, f"{flags} --num-workers 0", 0))
    assert len(samples) == len(expected)
    assert (samples == expected) == (variant == "batch-size-ramp-up")
    assert in_order(run_distributed(read, 1, f"{flags} --num-workers 2", GLOBAL_BATCH)) == samples[GLOBAL_BATCH:]
    for layout in ("--micro-batch-size 1 --num-workers 1", TENSOR2):
        assert in_order(run_distributed(read, 2, f"{flags} {layout}", 0)) == samples
