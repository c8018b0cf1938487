"""What is drawn is what was given, in styles that can be told apart on light and dark grounds."""

import re
from pathlib import Path

import numpy as np
import pytest

from megagate.report import figures, page, style
from megagate.report.events import PATTERN, read_event_file
from megagate.report.layers import shares
from tests.report.runs import Writer

RANDOM = np.random.default_rng(6)


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_styles_differ_and_are_visible_on_both_grounds() -> None:
    styles = {str((style.line_style(i)["color"], style.line_style(i)["linestyle"])) for i in range(32)}
    assert len(styles) == 32
    grounds = re.findall(r"--ground: (#\w{6})", page.CSS)
    assert len(set(grounds)) == 2
    for ground in grounds:
        for colour in style.COLOURS:
            assert contrast(colour, ground) >= 3, (colour, ground)
    for ground, text, quiet in re.findall(r"--ground: (#\w{6}); --text: (#\w{6}); --quiet: (#\w{6})", page.CSS):
        assert contrast(text, ground) >= 7
        assert contrast(quiet, ground) >= 4.5


def test_curves_draw_their_points() -> None:
    x = np.cumsum(RANDOM.random(40))
    one, other, floor = RANDOM.random((3, 40))
    panel = figures.Panel("share", {"a": (x, one), "b": (x[:20], other[:20])}, floors={"b": (x, floor)})
    panel.marks = {"a": np.array([3, 7])}
    second = figures.Panel("norm", {"b": (x, other)}, is_log=True)
    figure = figures.curves([panel, second], "tokens")
    left, right = figure.axes
    drawn = {line.get_label(): line.get_xydata() for line in left.lines}
    np.testing.assert_array_equal(drawn["a"], np.stack([x, one], axis=1))
    np.testing.assert_array_equal(drawn["b"], np.stack([x, other], axis=1)[:20])
    np.testing.assert_array_equal(drawn["a: spikes"], np.stack([x, one], axis=1)[[3, 7]])
    np.testing.assert_array_equal(drawn["b: floor"], np.stack([x, floor], axis=1))
    (line,) = right.lines
    np.testing.assert_array_equal(line.get_ydata(), other)
    assert right.get_yscale() == "log"
    colours = {line.get_label(): line.get_color() for line in left.lines}
    assert line.get_color() == colours["b"] == colours["b: floor"] != colours["a"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_a_name_keeps_its_colour_and_its_dollar() -> None:
    x = np.arange(5.0)
    figure = figures.curves([figures.Panel("loss", {"$b_1$": (x, x)})], "tokens", names=["a", "$b_1$"])
    assert figure.axes[0].lines[0].get_color() == style.line_style(1)["color"]
    assert "$b_1$" in style.to_svg(figure, "loss", "Loss")


def test_a_long_curve_keeps_its_peaks() -> None:
    x = np.arange(50_000.0)
    y = RANDOM.standard_normal(50_000)
    y[12_345], y[23_456], y[34_567] = 99, -99, np.nan
    thin_x, thin_y = figures.thinned(x, y)
    assert len(thin_x) <= 2 * figures.POINTS + 2
    assert (np.diff(thin_x) > 0).all()
    assert dict(zip(thin_x, thin_y, strict=True)).items() <= dict(zip(x, y, strict=True)).items()
    assert {12_345, 23_456} <= set(thin_x)
    smooth_x, smooth_y = figures.smoothed(x, y)
    assert len(smooth_x) == figures.SMOOTH
    assert np.abs(smooth_y).max() < 0.5
    figure = figures.curves([figures.Panel("loss", {"a": (x, y)})], "tokens")
    assert [line.get_label() for line in figure.axes[0].lines] == ["a: every value", "a"]


def test_values_by_layer() -> None:
    values = {"a": ([1, 2, 4], RANDOM.random(3)), "b": ([1, 2, 3, 4], RANDOM.random(4))}
    panels = {"share": values, "largest": {"b": values["b"]}, "empty": {}}
    figure = figures.by_layer(panels, log=["largest", "empty"], floors={"share": {"b": 0.25}})
    *lines, floor = figure.axes[0].lines
    for name, line in zip(values, lines, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), values[name][0])
        np.testing.assert_array_equal(line.get_ydata(), values[name][1])
    assert list(floor.get_ydata()) == [0.25, 0.25]
    assert floor.get_color() == lines[1].get_color()
    assert [ax.get_yscale() for ax in figure.axes] == ["linear", "log", "linear"]
    assert figure.axes[1].lines[0].get_color() == style.line_style(1)["color"]


def test_images_by_layer() -> None:
    edges = np.linspace(0, 1, 11)
    values = {"a": ([1, 3], RANDOM.random((2, 10))), "b": ([2, 3, 4], RANDOM.random((3, 10)))}
    for figure in (figures.histograms_by_layer(values, edges, "score"), figures.heads_by_layer(values, "score")):
        for ax, (name, (layers, rows)) in zip(figure.axes, values.items(), strict=False):
            assert ax.get_title(loc="left") == name
            image = np.ma.filled(ax.images[0].get_array(), np.nan)
            first = layers[0]
            np.testing.assert_array_equal(image[[layer - first for layer in layers]], rows)
            left, right, bottom, top = ax.images[0].get_extent()
            assert (bottom, top) == (layers[-1] + 0.5, first - 0.5)
            assert (left, right) in ((0, 1), (-0.5, 9.5))
        assert np.isnan(np.ma.filled(figure.axes[0].images[0].get_array(), np.nan)[1]).all()


def test_attention_maps_leave_out_what_the_mask_hides() -> None:
    maps = {}
    for title, queries in (("gated, block 1, head 1", 6), ("baseline, block 1, head 1", 4)):
        scores = RANDOM.random((queries, 6)) * np.tri(queries, 6, 6 - queries)
        maps[title] = scores / scores.sum(axis=1, keepdims=True)
    figure = figures.attention_maps(maps)
    for ax, (title, probabilities) in zip(figure.axes, maps.items(), strict=False):
        assert ax.get_title(loc="left") == title
        image = np.ma.filled(ax.images[0].get_array(), np.nan)
        seen = np.tri(*probabilities.shape, probabilities.shape[1] - probabilities.shape[0]) > 0
        np.testing.assert_array_equal(image[seen], probabilities[seen])
        assert np.isnan(image[~seen]).all()


def test_stacked_shares() -> None:
    values = {"a": {"data": 0.1, "forward": 0.4}, "b": {"forward": 0.3, "backward": 0.6}}
    figure = figures.stacked_shares(values, "seconds")
    bars = [[bar.get_width() for bar in container] for container in figure.axes[0].containers]
    np.testing.assert_allclose(bars, [[0.1, 0.0], [0.4, 0.3], [0.0, 0.6]])
    starts = [[bar.get_x() for bar in container] for container in figure.axes[0].containers]
    np.testing.assert_allclose(starts, [[0, 0], [0.1, 0], [0.5, 0.3]])


def test_svg_takes_the_colour_of_the_page_and_has_ids_of_its_own() -> None:
    x = np.arange(5.0)
    figure = figures.curves([figures.Panel("loss", {"a": (x, x)})], "tokens")
    svg = style.to_svg(figure, "loss", "Training loss")
    assert style.INK not in svg
    assert svg.count("currentColor") > 10
    assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>")
    assert 'role="img" aria-label="Training loss"' in svg
    ids = re.findall(r'\bid="([^"]+)"', svg)
    assert ids and all(name.startswith("loss-") for name in ids)
    for target in re.findall(r'(?:href="#|url\(#)([^")]+)', svg):
        assert target in ids
    assert style.to_svg(figure, "loss", "Training loss") == svg
    assert style.to_png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize("draw", [lambda: RANDOM.beta(1, 5, 3000), lambda: np.zeros(50), lambda: np.full(50, 0.5)])
def test_shares_of_a_histogram(tmp_path: Path, draw) -> None:
    """As if counted from the values, up to the width of SummaryWriter's buckets, which grow by a tenth."""
    values = draw()
    writer = Writer(tmp_path)
    writer.histogram("gate/scores/layer-01", values, 1)
    writer.scalar("lm loss", 1.0, 1)
    writer.close()
    (path,) = tmp_path.glob(PATTERN)
    ((_, histogram),) = read_event_file(path).histograms["gate/scores/layer-01"]
    edges = np.linspace(0, 1, 21)
    counted = np.histogram(values, edges)[0] / len(values)
    found = shares(histogram, edges)
    assert found.sum() == pytest.approx(1)
    assert np.abs(np.cumsum(found) - np.cumsum(counted)).max() < 0.03
