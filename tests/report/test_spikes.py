"""Spikes: found where they were put, and nowhere else, whatever the scale and the trend."""

import numpy as np
import pytest

from megagate.report import spikes


def loss(random: np.random.Generator, steps: int = 3000) -> np.ndarray:
    return 2 + 8 * np.exp(-np.arange(steps) / 300) + 0.02 * random.standard_normal(steps)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_spikes_are_found_at_their_peaks(scale: float) -> None:
    random = np.random.default_rng(2)
    values = loss(random)
    assert len(spikes.find_spikes(scale * values)) == 0
    values[700] += 0.5
    values[1500:1520] += np.concatenate([np.linspace(0.2, 2, 10), np.linspace(2.1, 0.2, 10)])
    values[2900] += 1.0
    assert list(spikes.find_spikes(scale * values)) == [700, 1510, 2900]


def test_the_definition_holds_point_by_point() -> None:
    """Against a loop that says the same in words."""
    random = np.random.default_rng(3)
    values = np.exp(random.standard_normal(400))
    median, deviation = spikes.limits(values)
    assert np.isnan(median[: spikes.MINIMUM]).all()
    for index in range(spikes.MINIMUM, len(values)):
        before = values[max(0, index - spikes.WINDOW) : index]
        middle = np.median(before)
        assert median[index] == middle
        spread = 1.4826 * np.median(np.abs(before - middle))
        assert deviation[index] == pytest.approx(max(spread, 1e-3 * abs(middle)))
    over = [i for i in range(spikes.MINIMUM, 400) if values[i] > median[i] + 3 * deviation[i]]
    groups: list[list[int]] = []
    for index in over:
        if groups and index - groups[-1][-1] - 1 < spikes.MERGE:
            groups[-1].append(index)
        else:
            groups.append([index])
    assert len(over) > len(groups) > 5
    assert list(spikes.find_spikes(values, 3.0)) == [max(group, key=lambda i: values[i]) for group in groups]


def test_values_that_are_not_finite_are_passed_over() -> None:
    random = np.random.default_rng(4)
    values = loss(random, 500)
    values[450] += 1
    assert list(spikes.find_spikes(values)) == [450]
    broken = np.insert(values, [100, 440], [np.nan, np.inf])
    assert list(spikes.find_spikes(broken)) == [452]


def test_a_constant_curve_and_a_short_one() -> None:
    assert len(spikes.find_spikes(np.ones(100))) == 0
    assert len(spikes.find_spikes(np.array([1.0, 50.0, 1.0]))) == 0
    assert len(spikes.find_spikes(np.array([]))) == 0
    assert list(spikes.find_spikes(np.array([*np.ones(60), 1.02]))) == [60]


def test_many_values_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(5)
    values = random.standard_normal(1000)
    whole = spikes.limits(values)
    monkeypatch.setattr(spikes, "ROWS", 37)
    np.testing.assert_array_equal(spikes.limits(values), whole)
