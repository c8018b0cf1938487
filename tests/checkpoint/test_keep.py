"""Which checkpoints stay, which go, and that a good one is never lost."""

import random
from pathlib import Path

import pytest

from megagate.checkpoint import keep, save
from megagate.checkpoint.load import TRACKER
from megagate.errors import UserError
from tests.distributed import run_distributed
from tests.training import TINY, train


def make(folder: Path, *steps: int, tracked: int | str | None = None, incomplete: tuple[int, ...] = ()) -> Path:
    """Write directories that count as checkpoints, or as parts of one."""
    for step in (*steps, *incomplete):
        checkpoint = keep.directory(folder, step)
        checkpoint.mkdir(parents=True)
        (checkpoint / ("metadata.json" if step in incomplete else "mp_rank_00")).write_text("x" * 100)
    if tracked is not None:
        (folder / TRACKER).write_text(str(tracked))
    return folder


def test_the_last_and_every_kth_stay(tmp_path: Path) -> None:
    make(tmp_path, *range(10, 101, 10), tracked=100)
    assert keep.prune(tmp_path, None, None) == []
    assert keep.prune(tmp_path, 2, 50) == [80, 70, 60, 40, 30, 20, 10]
    assert keep.steps(tmp_path) == [100, 90, 50]
    assert {path.name for path in tmp_path.iterdir()} == {TRACKER, "iter_0000100", "iter_0000090", "iter_0000050"}


def test_a_good_checkpoint_always_stays(tmp_path: Path) -> None:
    """Whatever is incomplete, tracked or asked for."""
    generator = random.Random(1)
    for number in range(200):
        steps = sorted(generator.sample(range(1, 40), 6))
        broken = tuple(step for step in steps if generator.random() < 0.5)
        whole = [step for step in steps if step not in broken]
        folder = make(
            tmp_path / str(number),
            *whole,
            incomplete=broken,
            tracked=generator.choice([*steps, None, "release"]),
        )
        before = list(keep.complete_steps(folder))
        keep.clean(folder)
        keep.prune(folder, generator.randint(1, 4), generator.choice([None, 2, 5]))
        after = list(keep.complete_steps(folder))
        assert after[:1] == before[:1], (steps, broken)
        assert set(after) <= set(before)


def test_what_an_interrupted_save_left_goes(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 40, incomplete=(30,), tracked=20)
    (tmp_path / ".removed_iter_0000005").mkdir()
    assert keep.clean(tmp_path) == [30]
    assert keep.steps(tmp_path) == [40, 20, 10]
    assert not list(tmp_path.glob(".removed*"))


def test_what_an_interrupted_first_save_left_goes(tmp_path: Path) -> None:
    make(tmp_path, 10, incomplete=(20,))
    assert keep.clean(tmp_path) == [20]
    assert keep.prune(tmp_path, 1, None) == []


def test_nothing_goes_where_the_tracker_does_not_name_a_step(tmp_path: Path) -> None:
    make(tmp_path, 10, incomplete=(20,), tracked="release")
    assert keep.clean(tmp_path) == []
    assert keep.prune(tmp_path, 1, None) == []


@pytest.mark.parametrize(
    ("count", "before", "target", "aside"),
    [
        (0, None, 40, set()),
        (1, None, 20, {30, 40}),
        (9, None, 10, {20, 30, 40}),
        (0, 25, 20, {30, 40}),
        (0, 5, 0, None),
    ],
)
def test_rolling_back(tmp_path: Path, count: int, before: int | None, target: int, aside: set[int] | None) -> None:
    make(tmp_path, 10, 20, 40, incomplete=(30,), tracked=40)
    assert keep.roll_back(tmp_path, count, before) == target
    assert keep.tracked(tmp_path) == (target or None)
    moved = {10, 20, 30, 40} if aside is None else aside
    assert keep.steps(tmp_path) == sorted({10, 20, 30, 40} - moved, reverse=True)
    names = {path.name for path in (tmp_path / keep.ASIDE).iterdir()} if moved else set()
    assert names == {f"iter_{step:07d}.1" for step in moved}


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    save.wait_for_room(tmp_path, 100, 60)
    free = iter([50, 50, 200])
    monkeypatch.setattr(save, "LOOK_AGAIN", 0)
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: type("usage", (), {"free": next(free)}))
    save.wait_for_room(tmp_path, 100, 60)
    assert capsys.readouterr().out.count("waiting for room") == 2
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: type("usage", (), {"free": 50}))
    with pytest.raises(OSError, match=r"GB free, and a checkpoint needs .* remove something, or use --keep-last"):
        save.wait_for_room(tmp_path, 100, -1)


def test_the_tracker_is_whole_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened for writing it would be empty until it is written, and for ever on a full disk."""
    from megatron.training import checkpointing

    files = save.Files(checkpointing.maybe_msc)
    tracker = make(tmp_path, tracked=10) / TRACKER
    with files.open(str(tracker), "w") as file:
        file.write("20")
        assert tracker.read_text() == "10"
    with files.open(str(tracker), "r") as file:
        assert file.read() == "20"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save.os, "fsync", full)
    with pytest.raises(OSError, match="No space"), files.open(str(tracker), "w") as file:
        file.write("30")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(TRACKER, "20")]


def train_and_damage(argv: list[str]) -> str:
    """Train in a rank where the second save loses a file before anyone has looked at it; return what is raised."""
    from megatron.core import dist_checkpointing

    original = dist_checkpointing.save
    saves = 0

    def losing(state, checkpoint, *positional, **named):
        nonlocal saves
        original(state, checkpoint, *positional, **named)
        saves += 1
        if saves == 2:
            for path in Path(checkpoint).glob("__1_*.distcp"):
                path.unlink(missing_ok=True)

    dist_checkpointing.save = losing
    try:
        train(argv)
    except RuntimeError as error:
        return str(error)
    finally:
        dist_checkpointing.save = original
    return ""


def test_the_tracker_moves_only_to_what_is_whole(tmp_path: Path) -> None:
    argv = [*TINY, "--train-iters", "5", "--save", str(tmp_path), "--save-interval", "1", "--keep-last", "1"]
    problems = run_distributed(train_and_damage, 2, argv, timeout=100)
    assert "iter_0000002 is incomplete: __1_" in problems[0]
    assert "rank 0 says why" in problems[1]
    assert keep.tracked(tmp_path) == 1
    assert list(keep.complete_steps(tmp_path)) == [1]
    run_distributed(train, 2, [*argv, "--load", str(tmp_path)], timeout=100)
    assert keep.steps(tmp_path) == [5]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--keep-last", "0"], "--keep-last must be at least 1, not 0"),
        (["--keep-every", "10"], "--keep-every 10 has no effect without --keep-last: add it"),
        (["--keep-last", "1", "--save-retain-interval", "2"], "--keep-last and --save-retain-interval both remove"),
    ],
)
def test_refused(flags: list[str], message: str) -> None:
    from megagate.pretrain.arguments import read

    with pytest.raises(UserError, match=message):
        read([*TINY, *flags])
