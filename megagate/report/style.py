"""How figures look: legible on paper, on a light page and on a dark one, and in shades of grey.

A figure is drawn once. As PNG it has a white ground; as SVG it has none, and what is drawn in `INK` takes the colour of
the page's text. Runs differ in colour and in the dashes of their line.
"""

import functools
import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megagate.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#3e4045"
"""Stands for the colour of text; no other element may have it."""
COLOURS = ("#1f7fd0", "#d55e00", "#0c9268", "#b04fc4", "#9c7a00", "#e0457b", "#1593a8", "#808080")
"""Each has a contrast of more than 3 to both grounds of the page."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
MARKERS = "osD^vPX*"
SHADES = "viridis"
"""For images: even in lightness, also to colour-blind readers."""
WIDTH = 10.0  # inches
PNG_DPI = 144
SETTINGS: Any = {
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "figure.facecolor": "none",
    "font.size": 9.5,
    "grid.alpha": 0.22,
    "grid.color": INK,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "megagate",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def line_style(index: int) -> dict[str, Any]:
    """Return the colour, dashes and marker of run number `index`; the first 32 differ."""
    turn = index // len(COLOURS)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[(index + turn) % len(DASHES)],
        "marker": MARKERS[(index + turn) % len(MARKERS)],
    }


def styled[**P, R](draw: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that draws: what it makes has this style.

    Raises (when called):
        UserError: matplotlib is not installed.
    """

    @functools.wraps(draw)
    def in_style(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            import matplotlib
        except ImportError as error:
            raise UserError("figures need matplotlib: pip install 'megagate[plot]'") from error
        with matplotlib.rc_context(SETTINGS):
            return draw(*args, **kwargs)

    return in_style


def plain(text: str) -> str:
    """Return `text` so that matplotlib draws it as it stands: dollars would begin a formula."""
    return text.replace("$", r"\$")


def subplots(rows: int, columns: int, height: float) -> tuple["Figure", Any]:
    """Return a figure of the page's width, `height` inches high, and its axes [rows, columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


@styled
def to_png(figure: "Figure") -> bytes:
    """Return the figure as PNG on white."""
    return _saved(figure, format="png", dpi=PNG_DPI, facecolor="white")


@styled
def to_svg(figure: "Figure", name: str, title: str) -> str:
    """Return the figure as an <svg> element to stand in a page.

    Args:
        name: prefix for the ids in the element, which a page may hold only once.
        title: what a reader hears who does not see the figure.
    """
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    text = _saved(figure, format="svg", metadata=metadata).decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = text.replace(INK, "currentColor")
    width = re.search(r'width="([\d.]+)pt"', text)
    assert width is not None
    size = f'style="max-width: {float(width[1]):.0f}pt"'
    text = re.sub(r'<svg\b[^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" {size} OPEN>', text, count=1)
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return text.replace("OPEN", f'{names} role="img" aria-label="{title}"', 1)


def _saved(figure: "Figure", **options: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, **options)
    return file.getvalue()
