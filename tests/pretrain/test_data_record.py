"""A resumed run goes on in the order it had: what would change that is refused, and only that."""

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megagate.errors import UserError
from megagate.pretrain.data_record import epochs
from tests.checkpoint.training import SMALL, parse_in_rank, train_in_rank
from tests.distributed import run_distributed
from tests.pretrain.indexed import training_dataset, write_dataset

LENGTH = 8


def order(prefix: Path, samples: int, count: int) -> list[list[int]]:
    dataset = training_dataset(samples, LENGTH, blend=([str(prefix)], None), path_to_cache=f"{prefix}-cache")
    return [dataset[index]["tokens"].tolist() for index in range(count)]


def test_the_order_changes_with_the_epochs_and_only_then(tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    tokens = write_dataset(prefix)
    per_epoch = (tokens - 1) // LENGTH
    seen = per_epoch // 2
    sizes = [
        seen,
        per_epoch - 1,
        per_epoch,
        *(int(part * per_epoch) for part in (1.1, 1.3, 1.7, 1.9, 2, 2.3, 2.7, 2.9)),
    ]
    sizes += [size + step for size in sizes for step in (-1, 1)]
    plans = {size: epochs(size, tokens, LENGTH) for size in sizes}
    assert {(1, False), (2, True), (2, False), (3, True), (3, False)} <= set(plans.values())
    orders = {size: order(prefix, size, seen - 1) for size in sizes}
    for first in sizes:
        for second in sizes:
            assert (orders[first] == orders[second]) == (plans[first] == plans[second]), (first, second)


def test_a_blend_has_the_order_of_its_datasets(tmp_path: Path) -> None:
    """Its own choice of a dataset for each sample depends on no length."""
    paths = [str(tmp_path / name) for name in ("a", "b")]
    tokens = [write_dataset(Path(path), seed=seed) for seed, path in enumerate(paths)]
    assert min(tokens) > 1000

    def start(samples: int) -> list[list[int]]:
        dataset = training_dataset(samples, LENGTH, blend=(paths, [0.7, 0.3]), path_to_cache=str(tmp_path / "cache"))
        return [dataset[index]["tokens"].tolist() for index in range(50)]

    assert start(60) == start(150)  # one epoch of each
    assert start(60) != start(400)  # two epochs of the first


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line of a run on 2 datasets that has made 2 of its 4 steps of 4 samples."""
    directory = tmp_path_factory.mktemp("run")
    tokens = [write_dataset(directory / name, 200, seed) for seed, name in enumerate("abc")]
    assert min(tokens) > 2500
    argv = [flag for flag in SMALL if flag != "--mock-data"]
    argv += ["--data-path", "0.7", str(directory / "a"), "0.3", str(directory / "b"), "--split", "80,20,0"]
    argv += ["--save", str(directory / "run"), "--save-interval", "2", "--data-cache-path", str(directory / "cache")]
    argv += ["--vocab-size", "255", "--seed", "7"]
    run_distributed(train_in_rank, 1, [*argv, "--exit-interval", "2"], timeout=100)
    return [*argv, "--load", str(directory / "run"), "--override-opt-param-scheduler"]


def resume(argv: list[str]) -> None:
    run_distributed(parse_in_rank, 1, argv, timeout=60)


def test_what_keeps_the_order_is_not_refused(run: list[str]) -> None:
    resume(run)
    resume([*run, "--train-iters", "8", "--split", "8, 2, 0", "--micro-batch-size", "2"])


CHANGES = {
    "length": (["--seq-length", "16"], "--seq-length 32, but this run has 16"),
    "seed": (["--seed", "8"], "--seed 7, but this run has 8"),
    "split": (["--split", "90,10,0"], "--split 80,20,0, but this run has 90,10,0"),
    "iterations": (
        ["--train-iters", "400"],
        r"--train-iters 4 x 4, .* 1 epoch, but .* --train-iters 400 x 4 and \d+ ep",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_settings_are_refused(run: list[str], name: str) -> None:
    flags, sentence = CHANGES[name]
    with pytest.raises(UserError, match=sentence):
        resume([*run, *flags])
    resume([*run, *flags, "--allow-data-change"])
    resume([*run, *flags, "--finetune"])


def test_another_blend_is_refused(run: list[str]) -> None:
    at = run.index("--data-path")
    _, weight, first, _, second = run[at : at + 5]
    other = second[:-1] + "c"
    for blend, sentence in (
        (["0.6", first, "0.4", second], "the weights 0.7 0.3 of the blend, but this run has 0.6 0.4"),
        ([weight, first, "0.3", other], f"{second} as dataset 2 of the blend, but this run has {other}"),
        ([weight, first], "2 datasets of the blend, but this run has 1"),
    ):
        with pytest.raises(UserError, match=sentence):
            resume([*run, "--data-path", *blend])
    resume([*run, "--data-path", "7", first, "3", second])
    for suffix in (".bin", ".idx"):
        shutil.copy(second + suffix, f"{second}-moved{suffix}")
    resume([*run, "--data-path", "0.7", first, "0.3", f"{second}-moved"])


def test_other_contents_are_refused(run: list[str]) -> None:
    second = run[run.index("--data-path") + 4]
    write_dataset(Path(second), 200, seed=9)
    with pytest.raises(UserError, match=f"{second} of size and digest .*, but this run has"):
        resume(run)
    write_dataset(Path(second), 200, seed=1)
    resume(run)
    content = Path(second + ".bin").read_bytes()
    Path(second + ".bin").write_bytes(content[:-2] + b"\1\0")  # as many tokens
    with pytest.raises(UserError, match=f"{second} of size and digest .*, but this run has"):
        resume(run)
    Path(second + ".bin").write_bytes(content)


def train_and_return_record(argv: list[str]) -> tuple[bool, dict[str, Any]]:
    """Return whether this rank read the data's fingerprints itself, and the record after training."""
    from unittest import mock

    from megatron.training import get_args

    from megagate.pretrain import data_record

    with mock.patch.object(data_record, "fingerprint", wraps=data_record.fingerprint) as reading:
        train_in_rank(argv)
    return reading.called, get_args().data_record


def test_the_first_rank_of_a_machine_reads_for_all(run: list[str], tmp_path: Path) -> None:
    argv = [*run[: run.index("--load")], "--save", str(tmp_path), "--exit-interval", "1"]
    (first_reads, first), (second_reads, second) = run_distributed(train_and_return_record, 2, argv, timeout=60)
    assert first_reads and not second_reads
    assert first == second and len(first["fingerprints"]) == 2


def agree(own: list[str]) -> None:
    from megagate.pretrain.datasets import _common_record

    record = {"fingerprints": {"data/a": own[torch.distributed.get_rank()]}}
    _common_record(argparse.Namespace(data_record=record, data_record_is_common=False))


def test_machines_with_other_data_are_refused() -> None:
    run_distributed(agree, 2, ["1-2-3", "1-2-3"])
    sentence = r"data/a is of size and digest 1-2-4 on \S+, but 1-2-3 on the first machine: copy the same files to all"
    with pytest.raises(UserError, match=sentence):
        run_distributed(agree, 2, ["1-2-3", "1-2-4"])
