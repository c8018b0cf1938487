"""Event files are read whole: every point, every histogram, and as much of a broken file as is whole."""

from pathlib import Path

import numpy as np
import pytest

from megagate.errors import UserError
from megagate.report.events import PATTERN, read_event_file
from tests.report.runs import Writer


def only_file(directory: Path) -> Path:
    (path,) = directory.glob(PATTERN)
    return path


def test_nothing_is_subsampled(tmp_path: Path) -> None:
    """TensorBoard's own accumulator keeps 10,000 scalars and one histogram of a tag unless told otherwise."""
    random = np.random.default_rng(0)
    values = random.standard_normal(10_500)
    writer = Writer(tmp_path, {f"argument_{number}": number for number in range(30)}, iteration=5)
    for step, value in enumerate(values, start=1):
        writer.scalar("lm loss", value, step)
    drawn = random.random((60, 40))
    for step, sample in enumerate(drawn):
        writer.histogram("gate/scores/layer-01", sample, step)
    writer.close()
    file = read_event_file(only_file(tmp_path))
    steps, read = file.scalars["lm loss"]
    assert list(steps) == list(range(1, 10_501))
    np.testing.assert_array_equal(np.array(read), values.astype(np.float32))
    histograms = file.histograms["gate/scores/layer-01"]
    assert [step for step, _ in histograms] == list(range(60))
    for (_, histogram), sample in zip(histograms, drawn, strict=True):
        assert histogram.counts.sum() == 40
        assert histogram.minimum == sample.min()
        assert histogram.maximum == sample.max()
        assert histogram.mean == pytest.approx(sample.mean())
    assert file.arguments == {f"argument_{number}": str(number) for number in range(30)}
    assert file.first_step == 1  # a scalar lies before the arguments' iteration, 5
    assert file.note is None
    assert file.whole == file.size


def test_samples_belong_to_their_iterations(tmp_path: Path) -> None:
    writer = Writer(tmp_path, iteration=10)
    writer.both("lm loss", 1.0, 11, 88)
    writer.scalar("grad-norm", 1.0, 12)
    writer.scalar("lm loss vs samples", 1.0, 1000)  # does not follow its scalar
    writer.both("lm loss validation", 1.0, 12, 96)
    writer.close()
    file = read_event_file(only_file(tmp_path))
    assert [list(part) for part in file.samples] == [[11, 12], [88, 96]]
    assert sorted(file.scalars) == ["grad-norm", "lm loss", "lm loss validation"]
    assert file.first_step == 11


def test_a_cut_file_gives_what_is_whole(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.steps("lm loss", np.arange(100.0))
    writer.close()
    path = only_file(tmp_path)
    content = path.read_bytes()
    whole = read_event_file(path)
    for cut in (1, 10, 30, 2000):
        path.write_bytes(content[:-cut])
        file = read_event_file(path)
        steps, values = file.scalars["lm loss"]
        assert list(steps) == list(whole.scalars["lm loss"][0][: len(steps)])
        assert list(values) == list(whole.scalars["lm loss"][1][: len(values)])
        assert len(content) - cut - 100 < file.whole < len(content) - cut + 1
        if file.whole < file.size:
            assert f"{file.whole:,} of {file.size:,} bytes could be read" in (file.note or "")
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 0x40
    path.write_bytes(damaged)
    file = read_event_file(path)
    assert 0 < len(file.scalars["lm loss"][0]) < 100
    assert file.note is not None
    assert file.whole <= len(content) // 2


@pytest.mark.parametrize(("content", "said"), [(b"", "is empty"), (b"no records at all\n" * 9, "0 of 162 bytes")])
def test_a_file_without_records(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(content)
    file = read_event_file(path)
    assert file.first_step is None
    assert said in (file.note or "")


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*: No such file"):
        read_event_file(tmp_path / "events.out.tfevents.1.host")
