"""Several validation sets while training: each has a scalar, which is the loss of all of its tokens, on any layout."""

import argparse
from pathlib import Path

import pytest

from megagate.errors import UserError
from megagate.pretrain.validation import check_validation_sets
from tests.distributed import run_distributed
from tests.evaluate import runs
from tests.training import EXPERTS, MODEL, scalars, train

LENGTHS = {"books": [100, 130], "code": [20], "whole": [8 * runs.SEQ_LENGTH + 1]}
"""Tokens of each set's documents: not a whole number of sequences, less than one, and a whole number of batches."""

LAYOUTS = {
    "data parallel": (2, "--eval-micro-batch-size 1 --eval-global-batch-size 6"),
    "tensor, pipeline, expert": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--expert-model-parallel-size 2",
    ),
    # A stage in the middle reads nothing.
    "deep pipeline": (4, "--pipeline-model-parallel-size 4 --num-layers 4"),
    "virtual stages": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1",
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sets")
    made = {name: runs.random_documents(lengths, seed) for seed, (name, lengths) in enumerate(LENGTHS.items())}
    made["train"] = runs.random_documents([400, 300, 500], seed=9)
    return {name: runs.write_dataset(folder / name, documents) for name, documents in made.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_set_has_its_loss(layout: str, data: dict[str, str], tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[layout]
    argv = [*MODEL, *EXPERTS, *runs.RUN, "--train-data-path", data["train"]]
    argv += ["--valid-data-path", *(data[name] for name in LENGTHS), "--validation-set-names", *LENGTHS]
    argv += f"--multiple-validation-sets --full-validation --eval-interval 3 {flags}".split()
    argv += ["--save", str(tmp_path / "run"), "--tensorboard-dir", str(tmp_path / "logged")]
    run_distributed(train, ranks, argv, timeout=100)
    (report,) = run_distributed(runs.report, 1, tmp_path / "run", [data[name] for name in LENGTHS])
    logged = scalars(tmp_path / "logged")
    for (name, lengths), expected in zip(LENGTHS.items(), report["datasets"], strict=True):
        assert expected["tokens"] == sum(lengths) - 1
        curve = logged[f"lm loss validation-{name}"]
        assert list(curve) == [3, 6]
        assert curve[6] == pytest.approx(expected["loss"], rel=1e-5), name
    assert "lm loss validation" not in logged


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"full_validation": False}, "--multiple-validation-sets works together with --full-validation only: add it"),
        (
            {"multiple_validation_sets": False, "validation_set_names": None},
            "--full-validation works together with --multiple-validation-sets only: add it",
        ),
        (
            {"multiple_validation_sets": False},
            "--validation-set-names has no effect without --multiple-validation-sets: add it",
        ),
        ({"valid_data_path": None}, "needs the sets: name them in --valid-data-path, and the training data in"),
        ({"mock_data": True}, "needs the sets: name them in --valid-data-path"),
        ({"valid_data_path": ["0.5", "a", "0.5", "b"]}, "evaluates each set on its own: leave the weights out"),
        ({"validation_set_names": ["a"]}, "--validation-set-names has 1 names for 2 validation sets: give one name"),
        ({"validation_set_names": ["a", "a"]}, "gives one name to two sets, whose losses would mix: let them differ"),
        ({"test_data_path": ["c"]}, "cannot evaluate a test set: name it in --valid-data-path too"),
    ],
    ids=str,
)
def test_what_would_fail_later_is_refused(changed: dict, message: str) -> None:
    args = {
        "multiple_validation_sets": True,
        "full_validation": True,
        "validation_set_names": ["books", "code"],
        "mock_data": False,
        "data_path": None,
        "data_args_path": None,
        "train_data_path": ["train"],
        "valid_data_path": ["a", "b"],
        "test_data_path": None,
        "per_split_data_args_path": None,
    }
    check_validation_sets(argparse.Namespace(**args))
    with pytest.raises(UserError) as refused:
        check_validation_sets(argparse.Namespace(**(args | changed)))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
