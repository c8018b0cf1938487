"""Event files are cut after the checkpoint, and what is cut off is kept whole."""

from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from megagate.telemetry.curves import LENGTH, drop_after, records
from tests.training import scalars

SAMPLES_PER_STEP = 8


def write(directory: Path, steps: range, value: float) -> None:
    with SummaryWriter(str(directory)) as writer:
        for step in steps:
            writer.add_scalar("lm loss", value + step, step)
            writer.add_scalar("lm loss vs samples", value + step, SAMPLES_PER_STEP * step)


def test_later_steps_are_replaced(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8), 100.0)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    kept = drop_after(tmp_path, 4)
    write(tmp_path, range(5, 10), 200.0)
    curves = scalars(tmp_path)
    assert curves["lm loss"] == {step: (100.0 if step <= 4 else 200.0) + step for step in range(1, 10)}
    assert set(curves["lm loss vs samples"]) == {SAMPLES_PER_STEP * step for step in range(1, 10)}
    assert whole.startswith(path.read_bytes())
    # What was cut off is an event file of its own, under a name that TensorBoard does not read.
    (part,) = kept
    assert "tfevents" not in part.name
    readable = tmp_path / "other"
    readable.mkdir()
    (readable / "events.out.tfevents.0").write_bytes(part.read_bytes())
    assert scalars(readable)["lm loss"] == {step: 100.0 + step for step in (5, 6, 7)}


def test_nothing_to_replace(tmp_path: Path) -> None:
    write(tmp_path, range(1, 5), 1.0)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert drop_after(tmp_path, 4) == []
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert drop_after(tmp_path / "missing", 4) == []


def test_a_killed_writer_leaves_half_a_record(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8), 1.0)
    (path,) = tmp_path.iterdir()
    ends = [stop for _, _, stop in records(path)]
    path.write_bytes(path.read_bytes()[: ends[4] + 7])
    assert [stop for _, _, stop in records(path)] == ends[:5]
    assert len(drop_after(tmp_path, 100)) == 1
    assert path.stat().st_size == ends[4]
    assert set(scalars(tmp_path)["lm loss"]) == {1, 2}


@pytest.mark.parametrize("end", [bytes(64), LENGTH.pack(9) + bytes(4) + b"no event!" + bytes(4)])
def test_a_crash_leaves_an_unreadable_end(tmp_path: Path, end: bytes) -> None:
    write(tmp_path, range(1, 4), 1.0)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole + end)
    (part,) = drop_after(tmp_path, 100)
    assert path.read_bytes() == whole
    assert part.read_bytes().endswith(end)


def test_what_is_no_event_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1.host.gz"
    path.write_bytes(b"something that a user has put here")
    assert drop_after(tmp_path, 0) == []
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_size == 34


def test_from_the_beginning(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4), 1.0)
    write(tmp_path, range(4, 6), 1.0)
    assert len(drop_after(tmp_path, 0)) == 2
    assert scalars(tmp_path) == {}


def test_the_same_iteration_again(tmp_path: Path) -> None:
    for turn in range(2):
        write(tmp_path, range(1, 4), float(turn))
        assert len(drop_after(tmp_path, 1)) == 1
    assert len(list(tmp_path.glob("replaced_after_1.*"))) == 2


def test_a_file_that_is_being_written_stays(tmp_path: Path) -> None:
    """Skipped iterations, for example, are noted before training begins."""
    write(tmp_path, range(1, 6), 1.0)
    with SummaryWriter(str(tmp_path), filename_suffix=".own") as writer:
        own = Path(writer.file_writer.event_writer._file_name)
        writer.add_scalar("skipped iterations", 1, 4)
        assert len(drop_after(tmp_path, 2, own)) == 1
        writer.add_scalar("lm loss", 1, 3)
    assert set(scalars(tmp_path)["skipped iterations"]) == {4}
    assert set(scalars(tmp_path)["lm loss"]) == {1, 2, 3}
