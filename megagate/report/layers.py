"""What a run has logged for each block: the tags that end in layer-NN."""

import re
from collections.abc import Iterable

import numpy as np

from megagate.report.events import Histogram
from megagate.report.runs import Run


def layer_tags(names: Iterable[str], tag: str) -> dict[int, str]:
    """Return block number -> TAG/layer-NN, in the order of blocks."""
    pattern = re.compile(re.escape(tag) + r"/layer-(\d+)$")
    return dict(sorted((int(match[1]), name) for name in names if (match := pattern.match(name))))


def last_by_layer(run: Run, tag: str) -> tuple[list[int], np.ndarray]:
    """Return the numbers of the blocks that have the tag, and the last value of each."""
    tags = layer_tags(run.scalars, tag)
    return list(tags), np.array([run.scalars[name].values[-1] for name in tags.values()])


def last_by_head(run: Run, tag: str) -> tuple[list[int], np.ndarray]:
    """Return the numbers of the blocks that have TAG/layer-NN/head-MM, and the last values [blocks, heads]."""
    pattern = re.compile(re.escape(tag) + r"/layer-(\d+)/head-(\d+)$")
    found = {
        (int(match[1]), int(match[2])): series.values[-1]
        for name, series in run.scalars.items()
        if (match := pattern.match(name))
    }
    layers, heads = sorted({layer for layer, _ in found}), sorted({head for _, head in found})
    return layers, np.array([[found.get((layer, head), np.nan) for head in heads] for layer in layers])


def histograms(run: Run, tag: str, is_relative: bool = False) -> dict[int, Histogram]:
    """Return block number -> last histogram that is not empty; with `is_relative`, of the values over their mean."""
    layers = {}
    for layer, name in layer_tags(run.histograms, tag).items():
        histogram = run.histograms[name][1]
        is_drawable = histogram.counts.sum() > 0 and np.isfinite([histogram.minimum, histogram.maximum]).all()
        if is_drawable and (histogram.mean > 0 or not is_relative):
            layers[layer] = histogram.scaled(1 / histogram.mean) if is_relative else histogram
    return layers


def shares(histogram: Histogram, edges: np.ndarray) -> np.ndarray:
    """Return which share of a histogram's values lies in each bin, taking those of a bucket as spread evenly over it.

    Args:
        edges: [bins + 1], from no more than the smallest value to no less than the largest.
    """
    result = np.zeros(len(edges) - 1)
    right = np.clip(histogram.limits, histogram.minimum, histogram.maximum)
    left = np.concatenate([[histogram.minimum], right[:-1]])
    for low, high, count in zip(left, right, histogram.counts, strict=True):
        if high > low:
            result += count * np.diff(np.clip((edges - low) / (high - low), 0.0, 1.0))
        else:
            result[np.clip(np.searchsorted(edges, low, side="right") - 1, 0, len(result) - 1)] += count
    return result / result.sum()
