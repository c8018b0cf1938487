"""What to do after an attempt has ended: a pure function of the attempts so far.

The supervisor calls it with what happened, the simulation (`simulate`) with what it draws.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from megagate.errors import EXIT_USER_ERROR

EXIT_GAVE_UP = 3
EXIT_AGAIN = 75
"""The run has saved and ended early: start it again to go on (EX_TEMPFAIL of sysexits.h)."""


class Kind(StrEnum):
    """How an attempt ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """It was told to end, or came to its time limit."""
    ASKED = "asked"
    """A flag such as --exit-interval ended it."""
    USER_ERROR = "user error"
    SPIKE = "spike"
    """The loss or the gradients went wrong, and the policy is to go back."""
    HANG = "hang"
    KILLED = "killed"
    """A rank died of a signal."""
    DEVICE = "device"
    """A GPU is broken."""
    CUDA = "CUDA error"
    """A GPU's fault, the program's, or that of what is installed: the log does not say."""
    NODE = "node"
    """Slurm reports a failed node."""
    PREFLIGHT = "preflight"
    """A node did not pass the checks before the start."""
    LOADING = "loading"
    """It failed while it read the checkpoint."""
    LOST = "lost"
    """The supervisor itself went away, with its node or its job."""
    FAILED = "failed"
    """Anything else."""


PATTERNS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (Kind.NODE, re.compile(r"due to node failure|Node failure on (?P<host>\S+)|NODE FAIL", re.IGNORECASE)),
    (
        Kind.DEVICE,
        re.compile(r"uncorrectable (NVLink|ECC)|ECC error|fallen off the bus|CUDA error: uncorrectable"),
    ),
    (
        Kind.CUDA,
        re.compile(
            r"\bXid\b|CUDA error: (an illegal|unspecified|unknown|hardware|misaligned|initialization)"
            r"|No CUDA GPUs|CUDA driver initialization failed"
        ),
    ),
)
"""Lines of the log that say more than the exit code does."""


@dataclass(frozen=True)
class Attempt:
    """An attempt that has ended. Steps are Megatron's iterations."""

    kind: Kind
    started_at: int = 0
    """The step of the checkpoint that it began from."""
    step: int = 0
    """The last step that it did."""
    saved: int = 0
    """The step of the newest complete checkpoint afterwards."""
    host: str | None = None
    """The node at fault, where it is known; several are joined by commas."""
    signal: str | None = None
    """The signal that told the supervisor to stop."""
    began: bool = True
    """It came as far as its first step."""


class Action(StrEnum):
    """What the supervisor does next."""

    DONE = "done"
    STOP = "stop"
    GIVE_UP = "give up"
    RESTART = "restart"
    REQUEUE = "requeue"
    ROLL_BACK = "roll back"
    """Restart from the checkpoint before the last one."""


@dataclass(frozen=True)
class Decision:
    """An action, why, and what belongs to it."""

    action: Action
    reason: str
    status: int = 0
    """The supervisor's exit status, where it ends."""
    exclude: tuple[str, ...] = field(default=())
    """Nodes to do without from now on."""
    wait: float = 0.0
    """Seconds to wait before the next attempt."""


@dataclass(frozen=True)
class Policy:
    """What the supervisor is allowed to do."""

    can_requeue: bool = False
    """Slurm can give the job other nodes."""
    same_step: int = 3
    """Give up after this many failures in a row at one step; after one more in a run that has had `MANY`."""
    without_progress: int = 10
    """Give up after this many failures in a row without a new checkpoint between them. Those of machines, where Slurm
    has others, do not count, up to `PATIENCE` times as many failures."""
    back_off: float = 10.0
    """Seconds before the second restart in a row without a new checkpoint; doubled for each further one."""
    longest_wait: float = 600.0


MANY = 30
"""Failures after which one more at a step is asked for: of hundreds, three meet by chance, mostly at a save."""
PATIENCE = 3
"""Times `without_progress`: faults of machines strike at random, but not for ever."""

LOADING_WAITS = 12
"""Times the back-off between the first and the second try to load a checkpoint: two minutes."""

ENDS = (Kind.FINISHED, Kind.STOPPED, Kind.ASKED)
NOT_COUNTED = (Kind.NODE, Kind.LOST, Kind.PREFLIGHT)
"""What says nothing about the step."""
REPLACED = (Kind.DEVICE, Kind.CUDA, Kind.NODE, Kind.LOST, Kind.PREFLIGHT)
"""Faults of machines; Slurm gives the job others."""


def decide(attempts: Sequence[Attempt], policy: Policy) -> Decision:
    """Return what to do after the last of `attempts` (at least one, the oldest first)."""
    last = attempts[-1]
    if last.kind is Kind.FINISHED:
        return Decision(Action.DONE, "all steps are done")
    if last.kind is Kind.ASKED:
        return Decision(Action.STOP, "a flag asked for an early end")
    if last.kind is Kind.STOPPED:
        return _after_stop(attempts, policy)
    if last.kind is Kind.USER_ERROR:
        return Decision(Action.GIVE_UP, "a mistake in what the run was given does not mend itself", EXIT_USER_ERROR)
    failures = _last_failures(attempts)
    counted = [attempt for attempt in failures if _says_something(attempt, policy)]
    same_step = policy.same_step + (sum(attempt.kind not in ENDS for attempt in attempts) > MANY)
    at_step = [attempt for attempt in counted[-same_step:] if attempt.step == last.step]
    if last.kind is Kind.SPIKE:  # its own limit: the batches at fault are skipped from now on
        return _unless_stuck(Decision(Action.RESTART, "the batches at fault are skipped"), failures, policy)
    if last in counted and len(at_step) == same_step:
        reason = f"{same_step} failures in a row at step {last.step}: it would fail there again"
        return Decision(Action.GIVE_UP, reason, EXIT_GAVE_UP)
    wait = min(policy.longest_wait, policy.back_off * 2 ** min(len(failures) - 2, 30)) if len(failures) > 1 else 0.0
    if last.kind is Kind.LOADING:  # storage that is away for a moment must not cost a good checkpoint
        wait = max(wait, LOADING_WAITS * policy.back_off)
    loading = [attempt.saved for attempt in failures[-2:] if attempt.kind is Kind.LOADING]
    if loading == [last.saved] * 2 and last.saved:
        return _unless_stuck(Decision(Action.ROLL_BACK, "the checkpoint failed twice to load"), failures, policy)
    on_host = [attempt for attempt in attempts[-5:] if last.host and attempt.host == last.host]
    again = len([attempt for attempt in on_host if attempt.kind not in ENDS]) > 1
    nowhere = last.kind is Kind.PREFLIGHT and last.host is None
    at_fault = last.kind in (Kind.DEVICE, Kind.CUDA, Kind.NODE, Kind.PREFLIGHT) or again
    if at_fault and not nowhere and policy.can_requeue:
        exclude = (last.host,) if last.host else ()
        reason = f"the node {last.host} is at fault" if last.host else "a node is at fault"
        return _unless_stuck(Decision(Action.REQUEUE, reason, exclude=exclude), failures, policy)
    return _unless_stuck(Decision(Action.RESTART, "it may pass", wait=wait), failures, policy)


def _says_something(attempt: Attempt, policy: Policy) -> bool:
    """Whether a failure tells of its step: a run that has trained and does not start has trouble around it."""
    replaced = attempt.kind is Kind.DEVICE and policy.can_requeue
    return attempt.kind not in NOT_COUNTED and not replaced and (attempt.began or not attempt.saved)


def _of_a_machine(attempt: Attempt, policy: Policy) -> bool:
    """Whether a failure is one of a machine that Slurm replaces, so that the next attempt may do better."""
    nowhere = attempt.kind is Kind.PREFLIGHT and attempt.host is None  # what most nodes have is no fault of theirs
    return policy.can_requeue and attempt.kind in REPLACED and not nowhere


def _after_stop(attempts: Sequence[Attempt], policy: Policy) -> Decision:
    last = attempts[-1]
    if last.signal in ("SIGTERM", "SIGINT"):
        return Decision(Action.STOP, f"told to end by {last.signal}", EXIT_AGAIN)
    if policy.can_requeue:
        most = max(2, policy.without_progress)  # one alone does not say whether it has saved
        stays = [attempt for attempt in attempts[-most:] if attempt.kind is Kind.STOPPED]
        if len(stays) == most and all(stay.saved == last.saved for stay in stays):
            reason = f"{len(stays)} stays in a row without a new checkpoint: the time limit is too short for one"
            return Decision(Action.GIVE_UP, reason, EXIT_GAVE_UP)
        return Decision(Action.REQUEUE, "the time limit of the job")
    return Decision(Action.STOP, "told to save and end", EXIT_AGAIN)


def _last_failures(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the failures at the end of `attempts` between which no new checkpoint was written.

    A stay in between that came to its time limit is none, and if it saved nothing it ends nothing either.
    """
    failures: list[Attempt] = []
    for attempt in reversed(attempts):
        if attempt.kind in (Kind.FINISHED, Kind.ASKED) or (failures and attempt.saved < failures[-1].saved):
            break
        if attempt.kind is not Kind.STOPPED:
            failures.append(attempt)
    return failures[::-1]


def _unless_stuck(decision: Decision, failures: Sequence[Attempt], policy: Policy) -> Decision:
    own = [attempt for attempt in failures if not _of_a_machine(attempt, policy)]
    if len(own) < policy.without_progress and len(failures) < PATIENCE * policy.without_progress:
        return decision
    reason = f"{len(failures)} failures in a row without a new checkpoint: it fails more often than it saves"
    return Decision(Action.GIVE_UP, reason, EXIT_GAVE_UP)
