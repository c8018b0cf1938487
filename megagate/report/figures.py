"""Figures from plain arrays: curves, values by layer, histograms by layer, attention maps, shares of time.

Each function returns a matplotlib figure and draws what it is given; `megagate.report.style` saves it. A "name" is that
of a run or a checkpoint. Its colour is its place among `names`, which defaults to those that are drawn.
"""

import contextlib
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megagate.report.style import COLOURS, INK, SHADES, line_style, plain, styled, subplots

with contextlib.suppress(ImportError):  # an optional package; `styled` says how to install it
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 600
"""Points of a curve are drawn one by one up to twice as many; beyond, the lowest and highest of each part."""
FEW = 12
"""Points that are marked one by one."""
SMOOTH = 150
"""Parts whose medians make a smooth curve, which is drawn over one of more than twice as many points."""
SMOOTHING = "Where there are many values, all are drawn pale, and medians of equal parts of the run strong."


@dataclass
class Panel:
    """One pair of axes with a curve per run."""

    title: str
    curves: dict[str, tuple[np.ndarray, np.ndarray]]
    """Name -> x [n], y [n]; x increasing, y may hold NaN."""
    marks: dict[str, np.ndarray] = field(default_factory=dict)
    """Name -> indices of points to mark."""
    floors: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """What the curve of a name is held against, drawn dotted."""
    is_log: bool = False


def thinned(x: np.ndarray, y: np.ndarray, parts: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last point, and of each of `parts` parts the lowest and the highest, in order.

    A curve of at most twice as many points is returned as it is. No peak is lost, however many points there are.
    """
    if len(x) <= 2 * parts:
        return x, y
    kept = {0, len(x) - 1}
    for indices in np.array_split(np.arange(len(x)), parts):
        part = y[indices]
        if np.isfinite(part).any():
            finite = np.where(np.isfinite(part), part, np.nan)
            kept |= {int(indices[np.nanargmin(finite)]), int(indices[np.nanargmax(finite)])}
        else:
            kept.add(int(indices[0]))
    order = sorted(kept)
    return x[order], y[order]


def smoothed(x: np.ndarray, y: np.ndarray, parts: int = SMOOTH) -> tuple[np.ndarray, np.ndarray]:
    """Return the median of the finite values in each of `parts` parts, at the part's mean x."""
    finite = np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= parts:
        return x, y
    pieces = np.array_split(np.arange(len(x)), parts)
    return np.array([x[piece].mean() for piece in pieces]), np.array([np.median(y[piece]) for piece in pieces])


@styled
def curves(panels: Sequence[Panel], x_label: str, names: Sequence[str] | None = None) -> "Figure":
    """Return one pair of axes per panel, and a legend for all."""
    names = names or list(dict.fromkeys(name for panel in panels for name in panel.curves))
    figure, axes = _grid(len(panels))
    for panel, ax in zip(panels, axes, strict=True):
        for name, (x, y) in panel.curves.items():
            _draw_curve(ax, panel, name, line_style(names.index(name)), x, y)
        for name, (x, y) in panel.floors.items():
            colour = line_style(names.index(name))["color"]
            ax.plot(*thinned(x, y), color=colour, linestyle=":", linewidth=1.1, label=f"{name}: floor")
        if panel.is_log:
            _logarithmic(ax)
        ax.set_title(plain(panel.title))
        ax.set_xlabel(x_label)
        ax.xaxis.set_major_locator(MaxNLocator(6))
        ax.xaxis.set_major_formatter(lambda value, _: amount(value))
    _legend(figure, names, {name for panel in panels for name in panel.curves})
    return figure


def amount(value: float) -> str:
    """Return a number of tokens, samples or iterations in short: 1.5M, 20B."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{value / factor:g}{letter}"
    return f"{value:g}"


def _draw_curve(ax: Any, panel: Panel, name: str, style: dict[str, Any], x: np.ndarray, y: np.ndarray) -> None:
    line = {"color": style["color"], "linestyle": style["linestyle"], "label": name}
    if len(x) > 2 * SMOOTH:
        ax.plot(*thinned(x, y), color=style["color"], linewidth=0.6, alpha=0.4, label=f"{name}: every value")
        ax.plot(*smoothed(x, y), **line)
    else:
        ax.plot(x, y, **line, marker=style["marker"] if len(x) <= FEW else "")
    marks = panel.marks.get(name)
    if marks is not None and len(marks):
        edge = {"markeredgecolor": INK, "markeredgewidth": 0.8}
        marker = {"linestyle": "none", "marker": "v", "markersize": 7, "color": style["color"]}
        ax.plot(x[marks], y[marks], label=f"{name}: spikes", zorder=3, **marker, **edge)


def _grid(count: int) -> tuple["Figure", Sequence[Any]]:
    """Return a figure with `count` pairs of axes, in two columns if there are several."""
    columns = min(2, count)
    rows = math.ceil(count / columns)
    figure, axes = subplots(rows, columns, 0.45 + (3.9 if columns == 1 else 2.8) * rows)
    for ax in axes.flat[count:]:
        ax.remove()
    return figure, axes.flat[:count]


def _logarithmic(ax: Any) -> None:
    """Give `ax` a logarithmic scale if anything in it can be drawn on one."""
    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in ax.lines]
    if any((values[np.isfinite(values)] > 0).any() for values in drawn):
        ax.set_yscale("log")


def _legend(figure: "Figure", names: Sequence[str], drawn: Container[str]) -> None:
    """Put one legend above all axes."""
    styles = {name: line_style(index) | {"marker": ""} for index, name in enumerate(names)}
    handles = [Line2D([], [], label=plain(name), **styles[name]) for name in names if name in drawn]
    figure.legend(handles=handles, loc="outside upper left", ncols=4)


@styled
def by_layer(
    panels: Mapping[str, Mapping[str, tuple[Sequence[int], np.ndarray]]],
    log: Container[str] = (),
    floors: Mapping[str, Mapping[str, float]] | None = None,
    names: Sequence[str] | None = None,
) -> "Figure":
    """Return values by layer: first-token share, largest activation, ...

    Args:
        panels: title -> name -> numbers of the layers, values [layers].
        log: titles of the panels with a logarithmic axis.
        floors: title -> name -> what its values are held against, drawn dotted.
    """
    names = names or list(dict.fromkeys(name for panel in panels.values() for name in panel))
    figure, axes = _grid(len(panels))
    for (title, values), ax in zip(panels.items(), axes, strict=True):
        for name, (layers, numbers) in values.items():
            ax.plot(layers, numbers, label=name, **line_style(names.index(name)))
        for name, floor in (floors or {}).get(title, {}).items():
            colour = line_style(names.index(name))["color"]
            ax.axhline(floor, color=colour, linestyle=":", linewidth=1.1, label=f"{name}: floor")
        if title in log:
            _logarithmic(ax)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_title(title)
        ax.set_xlabel("block")
    _legend(figure, names, {name for panel in panels.values() for name in panel})
    return figure


@styled
def images(
    panels: Mapping[str, np.ndarray],
    *,
    extents: Mapping[str, tuple[float, float, float, float]],
    x_label: str,
    y_label: str,
    scale_label: str,
    is_log: bool = False,
    columns: int = 2,
    row_height: float = 2.9,
) -> "Figure":
    """Return an image per title, all with one scale of colours.

    Args:
        panels: title -> [rows, columns] float, row 0 at the top; NaN is left blank.
        extents: title -> left, right, bottom, top of the image in the units of the axes.
    """
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = subplots(rows, columns, 0.3 + row_height * rows)
    values = np.concatenate([image[np.isfinite(image)] for image in panels.values()])
    positive = values[values > 0]
    norm: Normalize
    if is_log and len(positive):
        norm = LogNorm(max(positive.min(), positive.max() * 1e-4), positive.max(), clip=True)
    else:
        norm = Normalize(min(0.0, values.min(initial=0.0)), values.max(initial=0.0) or 1.0)
    for (title, image), ax in zip(panels.items(), axes.flat, strict=False):
        drawn = ax.imshow(image, norm=norm, cmap=SHADES, aspect="auto", interpolation="nearest", extent=extents[title])
        ax.set_title(plain(title))
        ax.set_xlabel(x_label)
        ax.set_ylabel(y_label)
        ax.grid(False)
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    figure.colorbar(drawn, ax=axes.ravel().tolist()[: len(panels)], label=scale_label, shrink=0.9)
    return figure


def histograms_by_layer(
    values: Mapping[str, tuple[Sequence[int], np.ndarray]], edges: np.ndarray, x_label: str
) -> "Figure":
    """Return for each name an image of a histogram per layer, the first layer at the top.

    Args:
        values: name -> numbers of the layers, shares [layers, bins] of the values in each bin.
        edges: [bins + 1], of equal width.
    """
    bounds = float(edges[0]), float(edges[-1])
    return _rows_by_layer(values, lambda _: bounds, x_label, "share of the values in a bin")


def heads_by_layer(values: Mapping[str, tuple[Sequence[int], np.ndarray]], scale_label: str) -> "Figure":
    """Return for each name an image of a value per layer and head; heads count from 0.

    Args:
        values: name -> numbers of the layers, values [layers, heads].
    """
    figure = _rows_by_layer(values, lambda heads: (-0.5, heads - 0.5), "head", scale_label)
    for ax in figure.axes[: len(values)]:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _rows_by_layer(
    values: Mapping[str, tuple[Sequence[int], np.ndarray]],
    bounds: Callable[[int], tuple[float, float]],
    x_label: str,
    scale_label: str,
) -> "Figure":
    """Return images with one row per layer; `bounds` gives the left and right end for a number of columns."""
    panels, extents = {}, {}
    for name, (layers, rows) in values.items():
        first, last = min(layers), max(layers)
        image = np.full((last - first + 1, rows.shape[1]), np.nan)  # layers that have no values stay blank
        image[np.asarray(layers) - first] = rows
        panels[name] = image
        extents[name] = (*bounds(rows.shape[1]), last + 0.5, first - 0.5)
    figure = images(panels, extents=extents, x_label=x_label, y_label="block", scale_label=scale_label)
    for ax in figure.axes[: len(panels)]:
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def attention_maps(maps: Mapping[str, np.ndarray], columns: int = 4) -> "Figure":
    """Return attention probabilities as images with a logarithmic scale of colours, the first query at the top.

    Args:
        maps: title (such as "gated, block 3, head 1") -> probabilities [queries, keys]; what the causal mask hides is
            left blank.
    """
    panels = {}
    for title, image in maps.items():
        queries, keys = image.shape
        panels[title] = np.where(np.tri(queries, keys, keys - queries) > 0, image, np.nan)
    extents = {title: (-0.5, image.shape[1] - 0.5, image.shape[0] - 0.5, -0.5) for title, image in maps.items()}
    return images(
        panels,
        extents=extents,
        x_label="key",
        y_label="query",
        scale_label="attention probability",
        is_log=True,
        columns=columns,
        row_height=2.6,
    )


@styled
def stacked_shares(values: Mapping[str, Mapping[str, float]], x_label: str) -> "Figure":
    """Return a bar per name, made of parts: the seconds of a step, for example.

    Args:
        values: name -> part -> amount.
    """
    parts = list(dict.fromkeys(part for amounts in values.values() for part in amounts))
    figure, axes = subplots(1, 1, 1.2 + 0.42 * len(values))
    ax = axes[0, 0]
    left = np.zeros(len(values))
    for index, part in enumerate(parts):
        widths = np.array([amounts.get(part, 0.0) for amounts in values.values()])
        hatch = ("", "///", "...", "xxx", "\\\\\\", "ooo")[index % 6]
        ax.barh(list(values), widths, left=left, label=part, color=COLOURS[index % len(COLOURS)], hatch=hatch)
        left += widths
    for bar in ax.patches:
        bar.set(edgecolor=INK, linewidth=0.5)
    ax.invert_yaxis()
    ax.set_xlabel(x_label)
    figure.legend(loc="outside upper left", ncols=len(parts))
    return figure
