"""What the supervisor decides after each kind of end."""

import random

import pytest

from megagate.supervise.decide import PATTERNS, Action, Attempt, Kind, Policy, decide

LOCAL, SLURM = Policy(), Policy(can_requeue=True)


def failed(step: int, saved: int = 0, kind: Kind = Kind.FAILED, host: str | None = None, began: bool = True) -> Attempt:
    return Attempt(kind, started_at=0, step=step, saved=saved, host=host, began=began)


@pytest.mark.parametrize(
    ("attempt", "policy", "action", "status"),
    [
        (Attempt(Kind.FINISHED), SLURM, Action.DONE, 0),
        (Attempt(Kind.ASKED), SLURM, Action.STOP, 0),
        (Attempt(Kind.STOPPED, signal="SIGUSR1"), SLURM, Action.REQUEUE, 0),
        (Attempt(Kind.STOPPED), SLURM, Action.REQUEUE, 0),
        (Attempt(Kind.STOPPED, signal="SIGUSR1"), LOCAL, Action.STOP, 75),
        (Attempt(Kind.STOPPED, signal="SIGTERM"), SLURM, Action.STOP, 75),
        (Attempt(Kind.STOPPED, signal="SIGINT"), SLURM, Action.STOP, 75),
        (Attempt(Kind.USER_ERROR), SLURM, Action.GIVE_UP, 2),
        (Attempt(Kind.FAILED, step=5), SLURM, Action.RESTART, 0),
        (Attempt(Kind.KILLED, host="n1"), SLURM, Action.RESTART, 0),
        (Attempt(Kind.HANG), SLURM, Action.RESTART, 0),
        (Attempt(Kind.LOST), SLURM, Action.RESTART, 0),
        (Attempt(Kind.DEVICE, host="n1"), SLURM, Action.REQUEUE, 0),
        (Attempt(Kind.NODE), SLURM, Action.REQUEUE, 0),
        (Attempt(Kind.PREFLIGHT, host="n1"), SLURM, Action.REQUEUE, 0),
        (Attempt(Kind.DEVICE, host="n1"), LOCAL, Action.RESTART, 0),
        (Attempt(Kind.CUDA, host="n1"), SLURM, Action.REQUEUE, 0),
        (Attempt(Kind.CUDA, host="n1"), LOCAL, Action.RESTART, 0),
        (Attempt(Kind.SPIKE), SLURM, Action.RESTART, 0),
    ],
)
def test_after_one_attempt(attempt: Attempt, policy: Policy, action: Action, status: int) -> None:
    decision = decide([attempt], policy)
    assert (decision.action, decision.status) == (action, status)
    assert decision.exclude == ((attempt.host,) if action is Action.REQUEUE and attempt.host else ())
    assert decision.reason


def test_the_same_step_three_times() -> None:
    attempts = [failed(537, 500)] * 2
    assert decide(attempts, SLURM).action is Action.RESTART
    decision = decide([*attempts, failed(537, 500)], SLURM)
    assert (decision.action, decision.status) == (Action.GIVE_UP, 3)
    assert "at step 537" in decision.reason


def test_other_steps_are_tried_again() -> None:
    assert decide([failed(537, 500), failed(537, 500), failed(538, 500)], SLURM).action is Action.RESTART
    assert decide([failed(537, 500), failed(530, 500), failed(537, 500)], SLURM).action is Action.RESTART


def test_an_end_that_was_wanted_begins_anew() -> None:
    attempts = [failed(537, 500), failed(537, 500), Attempt(Kind.STOPPED, step=537, saved=537), failed(537, 537)]
    assert decide(attempts, SLURM).action is Action.RESTART


def test_faults_of_machines_do_not_count_for_the_step() -> None:
    for kind in (Kind.NODE, Kind.DEVICE):
        assert decide([failed(537, 500, kind=kind)] * 5, SLURM).action is Action.REQUEUE
    assert decide([failed(537, 500, kind=Kind.DEVICE)] * 3, LOCAL).action is Action.GIVE_UP  # there is no other GPU
    assert decide([failed(537, 500, kind=Kind.CUDA)] * 3, SLURM).action is Action.GIVE_UP  # it may be the program's


def test_one_more_at_a_step_after_many_failures() -> None:
    """Of hundreds three meet at one step by chance."""
    generator = random.Random(1)
    earlier = [failed(100 * number + generator.randint(1, 99), 100 * number) for number in range(1, 32)]
    assert [decide([*earlier, *[failed(9001, 9000)] * count], SLURM).action for count in (3, 4)] == [
        Action.RESTART,
        Action.GIVE_UP,
    ]
    stays = [Attempt(Kind.STOPPED, step=step, saved=step) for step in range(100)]
    assert decide([*stays, *[failed(9001, 9000)] * 3], SLURM).action is Action.GIVE_UP


def test_without_progress() -> None:
    generator = random.Random(1)
    steps = generator.sample(range(501, 600), 10)
    attempts = [failed(step, 500) for step in steps]
    assert decide(attempts[:9], SLURM).action is Action.RESTART
    assert decide(attempts, SLURM).action is Action.GIVE_UP
    with_progress = [failed(step, 500 + 100 * (number > 5)) for number, step in enumerate(steps)]
    assert decide(with_progress, SLURM).action is Action.RESTART


def test_machines_at_fault_without_progress() -> None:
    """They strike at random, and a run that comes on between them should live; but not for ever."""
    generator = random.Random(1)
    kinds = generator.choices([Kind.DEVICE, Kind.CUDA, Kind.NODE, Kind.LOST], k=30)
    attempts = [
        failed(step, 500, kind) for step, kind in zip(generator.sample(range(501, 600), 30), kinds, strict=True)
    ]
    assert decide(attempts[:29], SLURM).action in (Action.REQUEUE, Action.RESTART)
    assert decide(attempts, SLURM).action is Action.GIVE_UP
    own = [failed(step, 500) for step in range(501, 511)]
    assert decide([*attempts[:9], *own[:9]], SLURM).action is Action.RESTART
    assert decide([*attempts[:9], *own], SLURM).action is Action.GIVE_UP
    assert decide(attempts[:10], LOCAL).action is Action.GIVE_UP
    most = [failed(500, 500, Kind.PREFLIGHT, began=False)] * 10  # no fault of a node
    assert decide(most, SLURM).action is Action.GIVE_UP


def test_a_node_at_fault_twice_is_left_out() -> None:
    attempts = [failed(510, 500, host="n7"), failed(520, 500, host="n7")]
    decision = decide(attempts, SLURM)
    assert (decision.action, decision.exclude) == (Action.REQUEUE, ("n7",))
    assert decide([attempts[0], failed(520, 500, host="n8")], SLURM).action is Action.RESTART


def test_a_checkpoint_that_does_not_load() -> None:
    newest, before, oldest = (failed(saved, saved, Kind.LOADING, began=False) for saved in (500, 400, 300))
    attempts: list[Attempt] = []
    for attempt in (newest, before, oldest):
        attempts.append(attempt)
        decision = decide(attempts, SLURM)
        assert decision.action is Action.RESTART and decision.wait >= 120
        attempts.append(attempt)
        assert decide(attempts, SLURM).action is Action.ROLL_BACK
    nothing = failed(0, 0, Kind.LOADING, began=False)
    assert decide([nothing, nothing], SLURM).action is Action.RESTART


def test_a_run_that_has_trained_and_does_not_start_is_tried_for_longer() -> None:
    """Its storage may be away for minutes; a run that has never trained is given up early."""
    away = failed(500, 500, began=False)
    assert [decide([away] * count, SLURM).action for count in (3, 9, 10)] == [
        Action.RESTART,
        Action.RESTART,
        Action.GIVE_UP,
    ]
    assert decide([failed(0, 0, began=False)] * 3, SLURM).action is Action.GIVE_UP


def test_a_time_limit_at_which_nothing_is_saved_is_no_new_beginning() -> None:
    """Else a run whose stays are shorter than its failures are many would be tried for ever."""
    stay = Attempt(Kind.STOPPED, 500, 500, 500, signal="SIGUSR1", began=False)
    assert decide([failed(537, 500), stay, failed(537, 500), stay, failed(537, 500)], SLURM).action is Action.GIVE_UP
    failures = [failed(500, 500, began=False), failed(500, 500, began=False), stay] * 5
    assert decide(failures[:-2], SLURM).action is Action.RESTART
    assert decide(failures[:-1], SLURM).action is Action.GIVE_UP
    saved = Attempt(Kind.STOPPED, 500, 520, 520, signal="SIGUSR1")
    assert decide([*failures[:-3], saved, failed(537, 520)], SLURM).wait == 0


def test_one_stay_that_saves_is_not_given_up() -> None:
    policy = Policy(can_requeue=True, without_progress=1)
    stays = [Attempt(Kind.STOPPED, first, 510, 510, signal="SIGUSR1") for first in (500, 510)]
    assert decide(stays[:1], policy).action is Action.REQUEUE
    assert decide(stays, policy).action is Action.GIVE_UP


def test_a_time_limit_that_is_too_short_does_not_requeue_for_ever() -> None:
    stay = Attempt(Kind.STOPPED, 500, 500, 500, signal="SIGUSR1")
    assert decide([stay] * 9, SLURM).action is Action.REQUEUE
    decision = decide([stay] * 10, SLURM)
    assert (decision.action, decision.status) == (Action.GIVE_UP, 3)
    longer = [Attempt(Kind.STOPPED, step, step + 1, step + 1, signal="SIGUSR1") for step in range(500, 520)]
    assert decide(longer, SLURM).action is Action.REQUEUE


def test_no_node_is_left_out_for_what_most_have() -> None:
    attempts = [Attempt(Kind.PREFLIGHT)] * 3
    decision = decide(attempts, SLURM)
    assert (decision.action, decision.exclude, decision.wait) == (Action.RESTART, (), 20)


def test_waits_grow_and_end() -> None:
    waits = [decide([failed(step, 500) for step in range(501, 501 + count)], LOCAL).wait for count in range(1, 10)]
    assert waits == [0, 10, 20, 40, 80, 160, 320, 600, 600]
    patient = Policy(without_progress=10**6)
    assert decide([failed(step, 500) for step in range(501, 3001)], patient).wait == 600


@pytest.mark.parametrize(
    ("line", "kind", "host"),
    [
        ("slurmstepd: error: *** STEP 12.0 ON n7 CANCELLED DUE TO NODE FAILURE ***", Kind.NODE, None),
        ("srun: error: Node failure on gpu017", Kind.NODE, "gpu017"),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", Kind.DEVICE, None),
        ("RuntimeError: No CUDA GPUs are available", Kind.CUDA, None),
        ("RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.", Kind.CUDA, None),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", Kind.DEVICE, None),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", Kind.CUDA, None),
    ],
)
def test_lines_that_name_the_cause(line: str, kind: Kind, host: str | None) -> None:
    found = [(kind_, pattern.search(line)) for kind_, pattern in PATTERNS]
    matches = [(kind_, match.groupdict().get("host")) for kind_, match in found if match]
    assert matches[0] == (kind, host)


@pytest.mark.parametrize(
    "line",
    [
        " [2026-11-30 08:47:30] iteration  12/ 60 | consumed samples: 4 | lm loss: 5.5 |",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: Connection closed by peer [10.0.0.1]:1234",
        "megagate: no CUDA device found; running on the CPU platform (gloo, torch backend)",
    ],
)
def test_lines_that_do_not(line: str) -> None:
    assert not any(pattern.search(line) for _, pattern in PATTERNS)
