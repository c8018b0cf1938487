"""A run whose gate has multipliers of its own, or whose matrices Muon updates, resumes bit for bit."""

from pathlib import Path

import pytest

from tests.checkpoint.conftest import Trained
from tests.checkpoint.test_resume import check_same_layout, compare
from tests.checkpoint.training import DISTRIBUTED

MULTIPLIERS = "--gate-lr-mult 4 --gate-wd-mult 0.5".split()


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("tensor2", MULTIPLIERS),
        ("tensor2-data2", [*MULTIPLIERS, *DISTRIBUTED, "--bf16"]),
        ("data2", ["--optimizer", "muon"]),
    ],
)
def test_same_layout(trained: Trained, tmp_path: Path, layout: str, flags: list[str]) -> None:
    check_same_layout(trained, tmp_path, layout, flags)


def test_multipliers_change_the_run(trained: Trained) -> None:
    """Else the comparison would compare nothing."""
    tensor = "--tensor-model-parallel-size 2 --sequence-parallel".split()
    plain, scaled = trained(2, tensor), trained(2, [*tensor, *MULTIPLIERS])
    assert any("linear_qkv" in line for line in compare(plain / "iter_0000002", scaled / "iter_0000002", 1e-6))
