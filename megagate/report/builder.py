"""From tags to figures: curves over tokens, values and histograms by layer, and a sentence where nothing was logged."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megagate.report import figures
from megagate.report.layers import histograms, last_by_head, last_by_layer, shares
from megagate.report.runs import Run, Series
from megagate.report.tables import Table, final, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 40
LAST = " At the last logged step."


@dataclass
class Drawn:
    """A figure with what a reader needs to understand it."""

    name: str
    title: str
    figure: "Figure"
    caption: str
    numbers: Table | None = None


@dataclass
class Section:
    """A part of the page."""

    name: str
    title: str
    drawn: list[Drawn] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Titles of figures for which no run has logged anything."""


class Builder:
    """Adds figures of all runs to sections."""

    def __init__(self, runs: Sequence[Run], spike_deviations: float) -> None:
        """Draw over tokens if they are known for all runs, else over samples, else over iterations."""
        self.runs, self.spike_deviations = runs, spike_deviations
        self.names = [run.name for run in runs]
        known = [name for name in ("tokens", "samples") if all(getattr(run, name) is not None for run in runs)]
        self.axis = known[0] if known else "iterations"

    def position(self, run: Run, steps: np.ndarray) -> np.ndarray:
        """Return where iterations [n] lie on the horizontal axis."""
        counted: Series | None = None if self.axis == "iterations" else getattr(run, self.axis)
        if counted is None:
            return steps.astype(np.float64)
        return np.interp(steps, np.concatenate([[0], counted.steps]), np.concatenate([[0.0], counted.values]))

    def panel(self, title: str, tag: str | Callable[[Run], Series | None], *, is_log: bool = False) -> figures.Panel:
        """Return the curves of a tag, or of a function of the run."""
        drawn = {}
        for run in self.runs:
            series = run.scalars.get(tag) if isinstance(tag, str) else tag(run)
            if series is not None:
                drawn[run.name] = self.position(run, series.steps), series.values
        return figures.Panel(title, drawn, is_log=is_log)

    def curves(self, section: Section, name: str, title: str, caption: str, panels: Sequence[figures.Panel]) -> None:
        """Add a figure of those panels that have a curve."""
        full = [panel for panel in panels if panel.curves]
        if self._any(section, title, full):
            figure = figures.curves(full, self.axis, self.names)
            self.add(section, name, title, caption, figure, {run for panel in full for run in panel.curves})

    def by_layer(
        self,
        section: Section,
        name: str,
        title: str,
        caption: str,
        tags: Mapping[str, str],
        log: Sequence[str] = (),
        floors: Mapping[str, str] | None = None,
    ) -> None:
        """Add a figure of the last values by layer, and a table of them.

        Args:
            tags: title of a panel -> tag.
            log: titles of panels with a logarithmic axis.
            floors: title of a panel -> tag of the scalar that its values are held against.
        """
        panels = {}
        for heading, tag in tags.items():
            values = {run.name: found for run in self.runs if (found := last_by_layer(run, tag))[0]}
            if values:
                panels[heading] = values
        if self._any(section, title, panels):
            logged = {run for values in panels.values() for run in values}
            lines = {
                heading: {run.name: value for run in self.runs if (value := final(run.scalars.get(tag))) is not None}
                for heading, tag in (floors or {}).items()
            }
            figure = figures.by_layer(panels, log, lines, self.names)
            self.add(section, name, title, caption + LAST, figure, logged, _table_by_layer(title, panels))

    def histograms(
        self, section: Section, name: str, title: str, caption: str, x_label: str, tag: str, is_relative: bool = False
    ) -> None:
        """Add a figure of the last histograms by layer; with `is_relative`, of the values over their layer's mean."""
        found = {run.name: layers for run in self.runs if (layers := histograms(run, tag, is_relative))}
        if self._any(section, title, found):
            every = [histogram for layers in found.values() for histogram in layers.values()]
            low, high = min(0.0, *(each.minimum for each in every)), max(1.0, *(each.maximum for each in every))
            edges = np.linspace(low, high, BINS + 1)
            values = {
                run: (list(layers), np.stack([shares(each, edges) for each in layers.values()]))
                for run, layers in found.items()
            }
            figure = figures.histograms_by_layer(values, edges, x_label)
            self.add(section, name, title, caption + LAST, figure, found)

    def by_head(self, section: Section, name: str, title: str, caption: str, scale_label: str, tag: str) -> None:
        """Add a figure of the last values by layer and head."""
        found = {run.name: values for run in self.runs if (values := last_by_head(run, tag))[0]}
        if self._any(section, title, found):
            figure = figures.heads_by_layer(found, scale_label)
            self.add(section, name, title, caption + LAST, figure, found)

    def add(
        self,
        section: Section,
        name: str,
        title: str,
        caption: str,
        figure: "Figure",
        logged: Iterable[str],
        numbers: Table | None = None,
    ) -> None:
        """Add a figure; its caption says which runs are not in `logged`."""
        missing = [name for name in self.names if name not in set(logged)]
        if missing:
            caption += f" Not logged by {', '.join(missing)}."
        section.drawn.append(Drawn(name, title, figure, caption, numbers))

    def _any(self, section: Section, title: str, found: Sequence | Mapping) -> bool:
        if not found:
            section.missing.append(title)
        return bool(found)


def _table_by_layer(title: str, panels: Mapping[str, Mapping[str, tuple[list[int], np.ndarray]]]) -> Table:
    columns = {
        f"{heading}: {run}": dict(zip(*found, strict=True))
        for heading, values in panels.items()
        for run, found in values.items()
    }
    layers = sorted({layer for values in columns.values() for layer in values})
    rows = [[str(layer), *(number(values.get(layer)) for values in columns.values())] for layer in layers]
    return Table(title, ["block", *columns], rows)
