"""Every scalar against a plain computation on one process, and the same on every kind of parallelism."""

import functools
from collections.abc import Sequence

import pytest

from megagate.gate import PRESETS
from tests.distributed import run_distributed
from tests.model.test_layouts import Layout, case, size
from tests.telemetry.observed import Observed, Scalars, observe_all, recompute

GATES = list(PRESETS)
EVERY_ROW = 1000
SOME_ROWS = 5
TOLERANCE = 1e-5
HALF_BIN = 2 ** (1 / 32)
"""The median is read from a histogram."""
# At a threshold or a bin's limit rounding may move a score to the other side.
ROUNDED = ("gate/share-below", "gate/scores")


def observe(pairs: list[tuple[str, str]], rows: int, layout: Layout | None = None, extra: str = "") -> list[Observed]:
    """Return what the last rank finds; all ranks must find the same."""
    cases = [case(model, preset, layout, extra) for model, preset in pairs]
    ranks = run_distributed(observe_all, layout.ranks if layout else 1, cases, rows, timeout=200)
    for rank in ranks:
        for found, same in zip(rank, ranks[-1], strict=True):
            assert without_speed(found.scalars) == without_speed(same.scalars)
    return ranks[-1]


def without_speed(scalars: Scalars) -> Scalars:
    return {tag: value for tag, value in scalars.items() if not tag.startswith(("throughput", "time", "memory"))}


@functools.cache
def one_process(model: str, preset: str, extra: str = "") -> Observed:
    return observe([(model, preset)], SOME_ROWS, extra=extra)[0]


@pytest.mark.parametrize(
    ("model", "preset"),
    [
        ("mixed", "baseline"),
        ("experts", "sdpa-elementwise"),
        ("dense", "value-headwise"),
        ("dense-untied", "sdpa-elementwise-silu"),
        ("dense", "switch-head-v-8-top-2"),
    ],
)
def test_against_a_plain_computation(model: str, preset: str) -> None:
    (found,) = observe([(model, preset)], EVERY_ROW)
    (expected,) = run_distributed(recompute, 1, case(model, preset), timeout=100)
    assert {tag.split("/")[0] for tag in expected} >= {"attention", "activation"}
    assert ("gate/mean-score" in expected) == (preset != "baseline")
    assert ("experts/dead" in expected) == (model in ("mixed", "experts"))
    for tag, value in expected.items():
        if tag.startswith("activation/max-to-median"):
            assert value / HALF_BIN <= found.scalars[tag] <= value * HALF_BIN, tag
        else:
            assert found.scalars[tag] == pytest.approx(value, rel=1e-5, abs=1e-7), tag
    compared = {tag.split("/layer")[0] for tag in expected}
    assert {tag.split("/layer")[0] for tag in without_speed(found.scalars)} == compared
    for tag, (limits, counts) in found.histograms.items():
        if tag.startswith("gate/scores"):
            width = limits[1] - limits[0]
            mean = sum((limit - width / 2) * count for limit, count in zip(limits, counts, strict=True)) / sum(counts)
            assert mean == pytest.approx(expected[tag.replace("scores", "mean-score")], abs=width / 2), tag


# What each gate is on is held by one rank or by several; models with two query groups have ranks that share one.
LAYOUTS = [
    (
        Layout(ranks=2, tp=2),
        ["dense", "dense-untied"],
        ["output-elementwise", "value-elementwise-shared", "sdpa-constant"],
    ),
    (
        Layout(ranks=4, tp=4, sp=True),
        ["mixed", "dense"],
        ["value-headwise", "output-elementwise", "sdpa-elementwise", "switch-head-kv-4-top-4"],
    ),
    (Layout(ranks=4, pp=2, cp=2), ["mixed"], ["sdpa-constant", "value-elementwise-shared", "output-elementwise"]),
    (Layout(ranks=2, pp=2, vpp=2), ["experts"], ["sdpa-elementwise", "query-elementwise"]),
    (Layout(ranks=4, ep=2), ["experts"], ["sdpa-constant", "value-headwise"]),
    (Layout(ranks=4, tp=2, sp=True, cp=2), ["mixed"], ["query-elementwise", "sdpa-elementwise", "value-headwise"]),
]
NAMES = [str(layout) for layout, _, _ in LAYOUTS]


def assert_weighted_alike(found: Observed) -> None:
    """Shares and histograms of scores between 0 and 1 tell of the same rows, each counted for those it stands for."""
    for tag, (limits, counts) in found.histograms.items():
        if tag.startswith("gate/scores") and limits[-1] == 1:
            below = sum(count for limit, count in zip(limits, counts, strict=True) if limit < 0.11)
            assert below / sum(counts) == pytest.approx(
                found.scalars[tag.replace("scores", "share-below-0.1")], abs=1e-6
            )


def assert_same(found: Observed, expected: Observed, where: str) -> None:
    assert without_speed(found.scalars).keys() == without_speed(expected.scalars).keys()
    for tag, value in without_speed(expected.scalars).items():
        slack = 2e-3 if tag.startswith(ROUNDED) else 1e-7
        assert found.scalars[tag] == pytest.approx(value, rel=TOLERANCE, abs=slack), f"{tag} {where}"
    assert found.histograms.keys() == expected.histograms.keys()
    for tag, (limits, counts) in expected.histograms.items():
        other_limits, other = found.histograms[tag]
        assert other_limits == limits
        moved = sum(abs(one - two) for one, two in zip(other, counts, strict=True))
        assert moved <= (2e-3 * sum(counts) if tag.startswith(ROUNDED) else 0), f"{tag} {where}"


def compare(index: int, presets: Sequence[str]) -> None:
    """Compare presets on a layout, on its models in turn, with one process."""
    layout, models, _ = LAYOUTS[index]
    pairs = [(models[turn % len(models)], preset) for turn, preset in enumerate(presets)]
    for pair, found in zip(pairs, observe(pairs, SOME_ROWS, layout), strict=True):
        assert_same(found, one_process(*pair, size(pair[0], layout)), f"of {pair} on {layout}")
        assert_weighted_alike(found)


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=NAMES)
def test_layout(index: int) -> None:
    """Ranks that share heads, tokens or layers count them once; five rows of 15 are looked at, wherever they lie."""
    compare(index, LAYOUTS[index][2])


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=NAMES)
def test_every_gate(index: int) -> None:
    compare(index, GATES)


@pytest.mark.parametrize(
    "recompute_flags",
    [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity selective --recompute-modules core_attn moe gate",
    ],
)
def test_what_is_recomputed_counts_once(recompute_flags: str) -> None:
    pair = ("experts", "sdpa-headwise")
    (found,) = observe([pair], SOME_ROWS, extra=recompute_flags)
    assert_same(found, one_process(*pair), recompute_flags)
    assert found.loss == one_process(*pair).loss


@pytest.mark.parametrize("preset", ["baseline", "sdpa-elementwise", "output-elementwise"])
def test_observing_changes_no_bit_of_the_loss(preset: str) -> None:
    """Two steps, so that gradients count too, with dropout, so that random numbers count."""
    flags = case("experts", preset, extra="--hidden-dropout 0.1 --attention-dropout 0.1")
    losses = [run_distributed(losses_of, 1, flags, rows, timeout=100)[0] for rows in (SOME_ROWS, None)]
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]


def losses_of(of: object, rows: int | None) -> list[float]:
    """Return the losses of two steps, observed or not."""
    import contextlib

    from megatron.training import get_args

    from megagate.telemetry.telemetry import Telemetry
    from tests.telemetry.observed import prepared

    with prepared(of) as (model, step):  # type: ignore[arg-type]
        context = Telemetry(get_args(), model, rows).observing() if rows else contextlib.nullcontext()
        with context:
            return [step(), step()]
