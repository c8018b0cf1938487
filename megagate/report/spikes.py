"""Where a loss jumps: defined here, once, in terms that do not depend on its scale or its trend.

A logged value is a spike if it exceeds the running median by more than K robust standard deviations. Median and
deviation are those of the finite values logged just before it (the last `WINDOW`, at least `MINIMUM`). The deviation is
1.4826 times the median absolute deviation, which for normal noise is the standard deviation, and no less than a
thousandth of the median. Values over this limit with fewer than `MERGE` logged values between them are one spike, which
lies at the largest.
"""

import numpy as np

DEVIATIONS = 6.0
WINDOW, MINIMUM, MERGE = 50, 10, 10
NORMAL = 1.4826
SMALLEST = 1e-3
ROWS = 20_000
"""Windows that are in memory at once."""

DEFINITION = (
    "A loss spike is a logged value above the running median of the {window} logged before it (at least {minimum}) by "
    "more than {deviations:g} robust standard deviations (1.4826 times the median absolute deviation, and at least "
    "0.1 % of the median). Values over this limit with fewer than {merge} logged values between them are one spike, at "
    "the largest."
)


def definition(deviations: float) -> str:
    """Return the sentences that a reader of the page needs."""
    return DEFINITION.format(window=WINDOW, minimum=MINIMUM, deviations=deviations, merge=MERGE)


def limits(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the running median and robust deviation that each value is held against.

    Args:
        values: [n], finite.

    Returns:
        Two arrays [n] float64; NaN for the first `MINIMUM` values.
    """
    median, deviation = np.full((2, len(values)), np.nan)
    for end in range(MINIMUM, min(WINDOW, len(values))):
        part = slice(end, end + 1)
        median[part], deviation[part] = _robust(values[None, :end])
    if len(values) > WINDOW:
        windows = np.lib.stride_tricks.sliding_window_view(values[:-1], WINDOW)
        for start in range(0, len(windows), ROWS):
            chunk = windows[start : start + ROWS]
            part = slice(WINDOW + start, WINDOW + start + len(chunk))
            median[part], deviation[part] = _robust(chunk)
    return median, deviation


def _robust(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    median = np.median(windows, axis=1)
    spread = NORMAL * np.median(np.abs(windows - median[:, None]), axis=1)
    return median, np.maximum(spread, SMALLEST * np.abs(median))


def find_spikes(values: np.ndarray, deviations: float = DEVIATIONS) -> np.ndarray:
    """Return the indices of the spikes, increasing.

    Args:
        values: [n] float, in the order of steps; NaN and infinity are no spikes and are passed over.
        deviations: K, how many robust standard deviations a spike is above the median.
    """
    finite = np.flatnonzero(np.isfinite(values))
    median, deviation = limits(values[finite])
    over = np.flatnonzero(values[finite] > median + deviations * deviation)
    if not len(over):
        return over
    groups = np.split(over, np.flatnonzero(np.diff(over) > MERGE) + 1)
    return finite[[group[np.argmax(values[finite][group])] for group in groups]]
