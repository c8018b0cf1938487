"""Every step that is done twice counts once as lost, whenever it is known to be."""

from typing import Any

import pytest

from megagate.supervise.accounts import account
from megagate.supervise.decide import Attempt, Kind
from megagate.supervise.records import Progress

STEP_SECONDS, START_SECONDS = 2.0, 10.0
FAILED, LOADING, SPIKE, FINISHED = Kind.FAILED, Kind.LOADING, Kind.SPIKE, Kind.FINISHED


def accounts(*attempts: tuple[Attempt, int, int | None]) -> list[dict[str, Any]]:
    """Return the ends of attempts, each with the step that the tracker named at its begin and a step gone back to."""
    ends: list[dict[str, Any]] = []
    now = 0.0
    for attempt, tracked, back_to in attempts:
        begun, first = {"time": now, "from": tracked}, now + START_SECONDS
        now = first + STEP_SECONDS * (attempt.step - attempt.started_at)
        progress = Progress(attempt.started_at, attempt.step, first, now) if attempt.began else None
        ends.append({"started_at": attempt.started_at, **account(attempt, begun, now, progress, ends, back_to)})
    return ends


@pytest.mark.parametrize(
    ("attempts", "lost", "goes_on"),
    [
        # crash, crash before the first save, end
        (
            [(FAILED, 0, 33, 30, 0, None), (FAILED, 30, 38, 30, 30, None), (FINISHED, 30, 50, 50, 30, None)],
            [3, 8, 0],
            50,
        ),
        # the last checkpoint fails to load, and the supervisor goes back
        (
            [
                (FAILED, 0, 33, 30, 0, None),
                (LOADING, None, None, 30, 30, None),
                (LOADING, None, None, 30, 30, 20),
                (FINISHED, 20, 50, 50, 20, None),
            ],
            [3, 0, 10, 0],
            50,
        ),
        # the trainer passes over the last checkpoint, twice, for the tracker still names it
        (
            [(FAILED, 0, 33, 30, 0, None), (FAILED, 20, 25, 30, 30, None), (FINISHED, 20, 50, 50, 30, None)],
            [3, 15, 0],
            50,
        ),
        # a spike, from before the attempt's own start on
        (
            [(FAILED, 0, 33, 30, 0, None), (SPIKE, 30, 36, 10, 30, None), (FINISHED, 10, 50, 50, 10, None)],
            [3, 26, 0],
            50,
        ),
        # the tracker is damaged, and attempts that do not start know nothing
        (
            [(FAILED, 0, 33, 30, 0, None), (FAILED, None, None, 0, 0, None), (FINISHED, 30, 50, 50, 0, None)],
            [3, 0, 0],
            50,
        ),
        # other weights at the begin
        ([(FAILED, 1000, 1007, 0, 0, None), (FAILED, 1000, 1015, 1010, 0, None)], [7, 5], 1010),
        # a node is gone, and with it the last lines of its progress
        ([(Kind.LOST, 20, 27, 30, 20, None), (FINISHED, 30, 50, 50, 30, None)], [0, 0], 50),
    ],
)
def test_steps(attempts: list[tuple[Any, ...]], lost: list[int], goes_on: int) -> None:
    ends = accounts(
        *(
            (Attempt(kind, start or 0, step or 0, saved, began=start is not None), tracked, back_to)
            for kind, start, step, saved, tracked, back_to in attempts
        )
    )
    assert [end["steps_lost"] for end in ends] == lost
    assert ends[-1]["goes_on"] == goes_on


def test_seconds() -> None:
    """What was useful until the run went back is not afterwards."""
    ends = accounts(
        (Attempt(FAILED, 0, 33, 30), 0, None),
        (Attempt(LOADING, saved=30, began=False), 30, 20),
        (Attempt(FINISHED, 20, 50, 50), 20, None),
    )
    assert [end["seconds"] for end in ends] == [76, 10, 70]
    assert [end["seconds_lost"] for end in ends] == [16, 30, 10]
    assert sum(end["seconds"] - end["seconds_lost"] for end in ends) == 50 * STEP_SECONDS
