"""What an attempt kept and what was lost, in steps and seconds, as it is written into the history.

Steps that a checkpoint had kept are lost later where the run goes back, or where that checkpoint cannot be loaded.
"""

from collections.abc import Sequence
from typing import Any

from megagate.supervise.decide import Attempt, Kind
from megagate.supervise.records import Progress


def account(
    attempt: Attempt,
    begun: dict[str, Any],
    ended: float,
    progress: Progress | None,
    ends: Sequence[dict[str, Any]],
    back_to: int | None = None,
) -> dict[str, Any]:
    """Return fields of the history for the end of an attempt.

    Args:
        attempt: that has ended.
        begun: the history's line of its begin.
        ended: when, in seconds since 1970.
        progress: how far it had come.
        ends: the history's lines of the ends before.
        back_to: the step to which the supervisor has gone back, if it has.

    Returns:
        goes_on: the step from which the run goes on.
        steps_lost: what is to be done again, or was when the attempt found less to go on from than there had been.
        seconds, seconds_lost: of the attempt, and of them without use; more than all where steps of earlier attempts
            are lost.
    """
    before = ends[-1].get("goes_on") if ends else None
    start = attempt.started_at
    if not attempt.began:  # it cannot say what it would have gone on from
        start = attempt.saved if before is None else before
    step = max(start, attempt.step) if attempt.began else start
    goes_on = _goes_on(attempt, start, step, begun["from"]) if back_to is None else back_to
    earlier = max(0, (start if before is None else before) - start) + max(0, start - goes_on)
    own = max(0, step - max(start, goes_on))
    useful = 0.0
    if progress is not None and step > start:
        useful = (progress.time - progress.first_time) * (step - start - own) / (step - start)
    if earlier and before is not None and before > ends[0]["started_at"]:
        pace = sum(end["seconds"] - end["seconds_lost"] for end in ends) / (before - ends[0]["started_at"])
        useful -= earlier * pace
    seconds = max(0.0, ended - begun["time"])
    return {
        "goes_on": goes_on,
        "steps_lost": earlier + own,
        "seconds": round(seconds, 3),
        "seconds_lost": round(max(0.0, seconds - useful), 3),
    }


def _goes_on(attempt: Attempt, start: int, step: int, tracked: int) -> int:
    """Return the step from which the run goes on; the tracker named `tracked` at the attempt's begin."""
    if attempt.kind in (Kind.FINISHED, Kind.ASKED):
        return step
    if attempt.kind is Kind.SPIKE:  # it has gone back, maybe to before its own start
        return min(attempt.saved, step)
    if attempt.saved > step and attempt.saved == tracked:  # the trainer has passed over that checkpoint
        return start
    return max(start, attempt.saved)
