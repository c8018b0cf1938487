"""What the demo shows at its end: a table of the models, and a picture of their losses."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagate.report.runs import read_run
from megagate.report.tables import Table
from megagate.report.text import aligned

LOSS_TAG, TIME_TAG = "lm loss", "iteration-time"


def read_scalars(folder: Path, tag: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of a tag in TensorBoard's files; of what a resumed run repeats, the last."""
    series = read_run(folder).scalars[tag]
    return series.steps.tolist(), series.values.tolist()


def tokens_per_second(folder: Path, tokens_per_iteration: int) -> float:
    """Return the training speed of both ranks together, at the median of the logged times per iteration."""
    _, seconds = read_scalars(folder, TIME_TAG)
    return tokens_per_iteration / statistics.median(seconds)


def models_table(reports: Mapping[str, Mapping[str, Any]], speeds: Mapping[str, float]) -> str:
    """Return the table of the models and of the unigram model.

    Args:
        reports: model -> the JSON of tools/evaluate.py perplexity.
        speeds: model -> tokens per second of its training.
    """
    rows = [["model", "held-out loss", "perplexity", "mean gate score by layer", "tokens/s", "parameters", "active"]]
    for name, report in reports.items():
        scores = " ".join(f"{layer['score']:.3f}" for layer in report["gate_scores"]) or "-"
        parameters = report["parameters"]
        rows.append(
            [
                f"{name} ({report['gate']})" if report["gate"] != name else name,
                f"{report['loss']:.3f}",
                f"{report['perplexity']:.1f}",
                scores,
                f"{speeds[name]:.0f}",
                f"{parameters['total']:,}",
                f"{parameters['active']:,}",
            ]
        )
    first = next(iter(reports.values()))
    rows.append(
        ["unigram", f"{first['unigram_loss']:.3f}", f"{first['unigram_perplexity']:.1f}", *["-"] * 4],
    )
    return aligned(Table("", rows[0], rows[1:]))


def draw_losses(folders: Mapping[str, Path], picture: Path) -> bool:
    """Draw each model's training loss over the iterations; return False if matplotlib is not installed.

    Args:
        folders: model -> folder of its TensorBoard files.
        picture: PNG to write.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, folder in folders.items():
        axes.plot(*read_scalars(folder, LOSS_TAG), label=name, linewidth=1.2)
    axes.set_xlabel("iteration")
    axes.set_ylabel("training loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return True


def read_report(path: Path) -> dict[str, Any]:
    """Return the JSON that tools/evaluate.py wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
