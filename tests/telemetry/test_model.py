"""A model that is given a sink, a massive activation and dead experts must show them, where they are."""

import math

import pytest
import torch

from megagate.telemetry.activations import median_bins, median_of
from megagate.telemetry.experts import router_entropy
from tests.distributed import run_distributed
from tests.model.test_layouts import Layout, case
from tests.model.training import SEQUENCE, Case
from tests.telemetry.observed import Scalars, prepared

ROWS = 6
ROOM = "--moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity"  # 2 of 4 experts for each token


def observe_changed(flags: Case) -> tuple[Scalars, Scalars]:
    """Return what is found before and after the model is given what it must show."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.training import get_args

    from megagate.telemetry.telemetry import Telemetry

    found = []
    with prepared(flags) as (model, step):
        for change in (False, True):
            handles = []
            if change:
                layers = [layer for chunk in model for layer in chunk.module.decoder.layers]
                for layer in layers:
                    attention = getattr(layer, "self_attention", None)
                    if isinstance(attention, SelfAttention) and layer.layer_number == 3:
                        # Runs before the observer's own hook: the second block's first key draws all queries.
                        handles.append(attention.core_attention.register_forward_pre_hook(sink))
                    if layer.layer_number == 2:
                        handles.append(layer.register_forward_hook(massive))
                    if layer.layer_number == 6:
                        layer.mlp.router.weight.data[:] = 0
            telemetry = Telemetry(get_args(), model, ROWS)
            with telemetry.observing():
                step()
            found.append(telemetry.findings().scalars)
            for handle in handles:
                handle.remove()
    return found[0], found[1]


def sink(module: torch.nn.Module, inputs: tuple) -> tuple:
    query, key, *rest = inputs
    query, key = query.clone(), key.clone()
    query[..., 0] = 10
    key[..., 0] = 0
    first = torch.distributed.get_rank(module.cp_group) == 0  # which holds the first chunk of the sequence
    if first:
        key[0, ..., 0] = 10
    return query, key, *rest


def massive(module: torch.nn.Module, inputs: tuple, output: object) -> object:
    hidden = output[0] if isinstance(output, tuple) else output
    hidden = hidden.clone()
    hidden[1, 1, 7] = -12345.0
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


@pytest.mark.parametrize("layout", [None, Layout(ranks=2, cp=2)], ids=["one process", "CP2"])
def test_what_the_model_was_given_is_seen(layout: Layout | None) -> None:
    flags = case("experts", "sdpa-headwise", layout, extra="--num-layers 4 --moe-router-load-balancing-type none")
    ranks = run_distributed(observe_changed, layout.ranks if layout else 1, flags, timeout=100)
    for before, after in ranks:
        assert before["attention/first-token-share/layer-02"] < 0.5
        assert after["attention/first-token-share/layer-02"] > 0.99
        assert after["attention/first-token-share/layer-03"] < 0.5
        assert after["attention/entropy/layer-02"] < 0.05
        assert after["attention/max-logit"] == pytest.approx(after["attention/max-logit/layer-02"])
        assert after["attention/max-logit/layer-02"] >= 100 / math.sqrt(8) - 30
        assert before["activation/max"] < 100
        assert after["activation/max/layer-01"] == 12345
        assert after["activation/max-to-median/layer-01"] > 1000
        assert after["activation/max"] > 12345 / 4
        assert before["experts/dead/layer-03"] == 0
        assert after["experts/dead/layer-03"] == 2  # equal logits: every token takes the same two of four experts
        assert after["experts/max-to-mean-load/layer-03"] == 2
        assert after["experts/router-entropy/layer-03"] == pytest.approx(math.log(4))
        assert after["experts/dead"] == pytest.approx(
            sum(after[f"experts/dead/layer-0{block}"] for block in range(1, 5)) / 4
        )


def observe_drops(cases: list[Case]) -> list[Scalars]:
    """Return what is found of experts, and the tokens that they all get."""
    from tests.telemetry.observed import observe_all

    results = []
    for found in observe_all(cases, SEQUENCE):
        histograms = [value for tag, value in found.histograms.items() if tag.startswith("experts/tokens")]
        kept = sum(load * count for limits, counts in histograms for load, count in zip(limits, counts, strict=True))
        scalars = {tag: value for tag, value in found.scalars.items() if tag.startswith("experts/")}
        results.append(scalars | {"kept": kept})
    return results


def test_places_that_are_filled_up_are_no_tokens() -> None:
    """With room for all tokens nothing is dropped, and each expert gets what it gets without a capacity."""
    plain = "--moe-router-load-balancing-type none"
    cases = [case("experts", "baseline", extra=f"{plain} {extra}") for extra in ("", ROOM)]
    ((without, padded),) = run_distributed(observe_drops, 1, cases, timeout=100)
    assert padded["experts/drop-rate"] == 0
    assert padded == pytest.approx(without)


def test_median_of_weighted_rows() -> None:
    """A row counts for as many rows as it stands for; zeros and infinity are values too."""
    values = torch.tensor([[0.0], [3.0], [-40.0], [50.0], [torch.inf]])
    for weight, median in (([1, 1, 1, 1, 1], 40), ([1, 6, 1, 1, 1], 3), ([1, 1, 1, 6, 1], 50), ([2, 4, 1, 1, 1], 3)):
        bins = median_bins(values, torch.tensor(weight).float())
        assert bins.sum() == sum(weight)
        assert float(median_of(bins)) == pytest.approx(median, rel=0.023)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_router_entropy(score_function: str) -> None:
    torch.manual_seed(1)
    logits = 3 * torch.randn(5, 2, 7)
    scores = {
        "softmax": logits.exp(),
        "sigmoid": logits.sigmoid(),
        "sqrtsoftplus": torch.nn.functional.softplus(logits).sqrt(),
    }
    expected = torch.distributions.Categorical(scores[score_function]).entropy().sum()
    assert float(router_entropy(logits, score_function)) == pytest.approx(float(expected), rel=1e-5)


def test_dropped_tokens() -> None:
    flags = case("experts", "baseline", extra="--moe-expert-capacity-factor 0.5")
    ((found,),) = run_distributed(observe_drops, 1, [flags], timeout=100)
    choices = 8 * SEQUENCE * 2 * 2  # sequences, tokens, top-2, blocks
    assert 0.4 < found["experts/drop-rate"] < 0.8
    assert found["experts/drop-rate"] == pytest.approx(1 - found["kept"] / choices)
