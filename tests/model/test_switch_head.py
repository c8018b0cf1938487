"""Switch-Head is trained on every kind of layout as on one process, and its checkpoints go from one to another."""

from pathlib import Path

import pytest

from megagate.gate import SWITCH_HEAD_PRESETS
from tests.checkpoint.conftest import Trained, trained  # noqa: F401  # a fixture
from tests.checkpoint.test_resume import check_other_layout, check_same_layout
from tests.model.test_layouts import MODELS, Layout, case, compare, one_process, run

KEY_VALUE, TOP_2 = "switch-head-kv-4-top-4", "switch-head-v-8-top-2"
LAYOUTS = [
    (Layout(ranks=4, tp=4), "dense-untied"),  # two ranks share a query group
    (Layout(ranks=4, tp=2, sp=True, cp=2), "experts"),
    (Layout(ranks=4, pp=2, ep=2), "mixed"),
]


@pytest.mark.parametrize(("layout", "model"), LAYOUTS, ids=[str(layout) for layout, _ in LAYOUTS])
def test_layout(layout: Layout, model: str) -> None:
    assert model in MODELS
    compare(layout, [(model, KEY_VALUE), (model, TOP_2)])


@pytest.mark.full
@pytest.mark.parametrize("preset", SWITCH_HEAD_PRESETS)
def test_every_preset(preset: str) -> None:
    for layout, model in LAYOUTS:
        compare(layout, [(model, preset)])


def test_rebuilt_in_the_backward_pass() -> None:
    plain = one_process("dense", TOP_2)
    rebuilt = run([case("dense", TOP_2, extra="--recompute-granularity selective --recompute-modules gate")])[0]
    assert rebuilt.losses == plain.losses
    for name, value in plain.gradients.items():
        assert (rebuilt.gradients[name] == value).all(), name


FLAGS = ["--gate-preset", TOP_2, "--use-distributed-optimizer"]


def test_resume(trained: Trained, tmp_path: Path) -> None:  # noqa: F811
    check_same_layout(trained, tmp_path / "same", "tensor2", FLAGS)
    check_other_layout(trained, tmp_path / "other", "tensor2", "one", FLAGS)
