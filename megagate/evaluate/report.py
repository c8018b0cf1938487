"""What an evaluation found, as numbers, as JSON and as a table; `megagate.evaluate.perplexity` defines the numbers."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megagate.evaluate.load import LoadedModel, count_parameters
from megagate.gate.config import describe, gate_config_from_args

if TYPE_CHECKING:
    from megagate.telemetry.observer import Findings

LARGEST_EXPONENT = 700.0  # of what a float can hold


def _exp(loss: float) -> float:
    return math.exp(min(loss, LARGEST_EXPONENT))


@dataclass
class DatasetResult:
    """One held-out dataset, or all of them together; losses in nats."""

    data_path: str
    name: str
    tokens: int = 0
    """Tokens that were predicted."""
    total_loss: float = 0.0
    total_unigram_loss: float | None = None
    """None where no unigram model was asked for."""
    bytes: int | None = None
    """UTF-8 bytes of the text; None where the text is not known."""

    def add(self, other: "DatasetResult") -> None:
        """Add another dataset's sums; what is unknown for one is unknown for the sum."""
        self.tokens += other.tokens
        self.total_loss += other.total_loss
        for name in ("total_unigram_loss", "bytes"):
            one, two = getattr(self, name), getattr(other, name)
            setattr(self, name, None if one is None or two is None else one + two)

    def as_json(self) -> dict[str, Any]:
        """Return the means, and None for what is not known."""
        loss = self.total_loss / self.tokens
        unigram = None if self.total_unigram_loss is None else self.total_unigram_loss / self.tokens
        return {
            "name": self.name,
            "data_path": self.data_path,
            "tokens": self.tokens,
            "loss": loss,
            "perplexity": _exp(loss),
            "bytes": self.bytes,
            "bits_per_byte": self.total_loss / math.log(2) / self.bytes if self.bytes else None,
            "byte_perplexity": _exp(self.total_loss / self.bytes) if self.bytes else None,
            "unigram_loss": unigram,
            "unigram_perplexity": None if unigram is None else _exp(unigram),
        }


@dataclass
class Result:
    """What was measured on one model."""

    loaded: LoadedModel
    datasets: list[DatasetResult] = field(default_factory=list)
    findings: "Findings | None" = None
    """Of the gates, and of what else was observed."""
    seconds: float = 0.0

    @property
    def overall(self) -> DatasetResult:
        """All datasets together."""
        total = DatasetResult("all", "all", total_unigram_loss=0.0, bytes=0)
        for result in self.datasets:
            total.add(result)
        return total

    def as_json(self) -> dict[str, Any]:
        """Return everything, as the JSON file has it."""
        by_block = self.findings.by_block.get("gate/mean-score", {}) if self.findings else {}
        overall = self.overall.as_json()
        del overall["name"], overall["data_path"]
        total, active = count_parameters(self.loaded)
        return {
            "checkpoint": str(self.loaded.checkpoint),
            "iteration": self.loaded.iteration,
            "gate": describe(gate_config_from_args(self.loaded.args)),
            "layers": self.loaded.args.hybrid_layer_pattern,
            **overall,
            "gate_score": sum(by_block.values()) / len(by_block) if by_block else None,
            "gate_scores": [{"block": block, "score": score} for block, score in by_block.items()],
            "parameters": {"total": total, "active": active},
            "datasets": [result.as_json() for result in self.datasets],
            "seconds": self.seconds,
        }


def table(report: dict[str, Any]) -> str:
    """Return the readable form of what `Result.as_json` returned."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    entries = list(report["datasets"])
    if len(entries) > 1:
        entries.append(report | {"name": "all"})
    width = max(len("dataset"), *(len(entry["name"]) for entry in entries))
    lines = [
        f"{report['checkpoint']}: gate {report['gate']}, {report['parameters']['total']:,} parameters, "
        f"{report['parameters']['active']:,} active",
        f"{'dataset':<{width}}  {'tokens':>10}  {'loss':>7}  {'perplexity':>10}  {'bits/byte':>9}  "
        f"{'ppl/byte':>8}  {'unigram ppl':>11}",
    ]
    for entry in entries:
        lines.append(
            f"{entry['name']:<{width}}  {entry['tokens']:>10}  {entry['loss']:>7.4f}  {entry['perplexity']:>10.2f}"
            f"  {number(entry['bits_per_byte'], 4):>9}  {number(entry['byte_perplexity'], 4):>8}"
            f"  {number(entry['unigram_perplexity'], 2):>11}"
        )
    if report["gate_scores"]:
        by_layer = " ".join(f"{layer['score']:.3f}" for layer in report["gate_scores"])
        lines.append(f"mean gate score {report['gate_score']:.3f}; by block: {by_layer}")
    return "\n".join(lines)
