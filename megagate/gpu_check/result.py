"""What a part of the check reports, and how the table shows it."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


class Skip(Exception):
    """A part cannot run here; the message says why."""


@dataclass
class Row:
    """One line of the table: a measured value, and what it is held to where it is."""

    what: str
    value: float
    unit: str
    limit: float | None = None
    """The value may not be above it; None where it is only reported."""
    note: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the value keeps to its limit; NaN does not."""
        return self.limit is None or self.value <= self.limit


@dataclass
class Outcome:
    """What came of one part."""

    part: str
    status: str
    """passed, failed or skipped."""
    reason: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Outcome":
        """Return what `as_dict` made the dictionary of."""
        return Outcome(**values | {"rows": [Row(**row) for row in values["rows"]]})


def outcome_of(name: str, part: Callable[[], Iterable[Row]]) -> Outcome:
    """Run a part and return what came of it; whatever it raises is its failure, and the rows before it stay."""
    outcome, started = Outcome(name, "passed"), time.monotonic()
    try:
        for row in part():
            outcome.rows.append(row)
    except Skip as skip:
        outcome.status, outcome.reason = "skipped", str(skip)
    except Exception as error:
        outcome.status, outcome.reason = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"
    bad = [row for row in outcome.rows if not row.is_good]
    if bad:
        outcome.status = "failed"
        outcome.reason = outcome.reason or f"{bad[0].what}: {bad[0].value:.3g} is above {bad[0].limit:.3g}"
    outcome.seconds = time.monotonic() - started
    return outcome


def table(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield the lines of the table."""
    for outcome in outcomes:
        reason = f": {outcome.reason}" if outcome.reason else ""
        yield f"{outcome.part}  {outcome.status} in {outcome.seconds:.0f} s{reason}"
        for row in outcome.rows:
            limit = "" if row.limit is None else f"{'<=' if row.is_good else 'ABOVE'} {row.limit:.3g}"
            yield f"    {row.what:<58}{row.value:>12.5g} {row.unit:<12}{limit:<14}{row.note}".rstrip()
