"""A model with Gated DeltaNet goes on from its checkpoints, on the same layout and on others."""

import argparse
from pathlib import Path

import pytest

from megagate.checkpoint.fit import _check_model, check_delta_net_norm
from megagate.errors import UserError
from tests.checkpoint.conftest import Trained
from tests.checkpoint.test_resume import LAYOUTS, check_same_layout, compare, resume
from tests.checkpoint.training import DISTRIBUTED

# GE*EGE*E. Epsilon and scale keep the norms of the heads from amplifying rounding, which the tolerance is for, as in
# tests/model/test_delta_net.py.
TOLERANCE = 1e-4
DELTA_NET = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--norm-epsilon 1e-2 --init-method-std 0.1"
).split()
FLAGS = [*DISTRIBUTED, *DELTA_NET]


def test_same_layout(trained: Trained, tmp_path: Path) -> None:
    check_same_layout(trained, tmp_path, "tensor2-expert2", [*FLAGS, "--bf16"])


@pytest.mark.parametrize(
    ("before", "after"),
    [("one", "tensor2"), ("tensor2", "pipeline2"), pytest.param("pipeline2", "one", marks=pytest.mark.full)],
)
def test_other_layout(trained: Trained, tmp_path: Path, before: str, after: str) -> None:
    ranks, flags = LAYOUTS[before]
    straight = trained(ranks, [*flags, *FLAGS])
    assert compare(straight / "iter_0000004", resume(straight, tmp_path, after, FLAGS), tolerance=TOLERANCE) == []


def test_a_norm_of_megatrons_own_is_refused() -> None:
    """With --apply-layernorm-1p its output norm has w - 1, of the same name and shape as ours, which has w."""
    ours = argparse.Namespace(hybrid_layer_pattern="G-", layernorm_zero_centered_gamma=True, gate_preset=None)
    here = argparse.Namespace(**vars(ours), warm_start_from=None)
    _check_model(here, ours, Path("runs/iter_0000002"), ())
    megatrons = argparse.Namespace(hybrid_layer_pattern="G-", layernorm_zero_centered_gamma=True)
    with pytest.raises(UserError, match=r"its out_norm\.weight is w - 1, where megagate has w"):
        _check_model(here, megatrons, Path("runs/iter_0000002"), ())
    with pytest.raises(UserError, match=r"its out_norm\.weight is w - 1"):  # what evaluation and export ask
        check_delta_net_norm(megatrons, Path("runs/iter_0000002"))
    silent = argparse.Namespace(hybrid_layer_pattern="G-")
    with pytest.raises(UserError, match=r"its out_norm\.weight is w - 1"):
        _check_model(here, silent, Path("runs/iter_0000002"), ())
    here.layernorm_zero_centered_gamma = megatrons.layernorm_zero_centered_gamma = False
    _check_model(here, megatrons, Path("runs/iter_0000002"), ())
