"""An interrupted job goes on where it was, with the bytes of one that was not, or is refused."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megagate.data import corpus as corpus_module
from megagate.data import unfinished
from megagate.data.preprocess import Progress, preprocess
from megagate.data.tokenizer import build_tokenizer
from megagate.errors import UserError

LINES = 40


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note of the state after every batch, of which there are about fourteen."""
    monkeypatch.setattr(unfinished, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(corpus_module, "BATCH_BYTES", 100)


@pytest.fixture
def tokenizer() -> Any:
    return build_tokenizer("NullTokenizer", vocab_size=1000)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": " ".join(map(str, range(n % 9, n)))}) for n in range(LINES)]
    lines[5] = "{"
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "in.jsonl"


def run(source: Path, name: str, tokenizer: Any, **options: Any) -> dict[str, Any]:
    return preprocess([str(source)], str(source.parent / name), tokenizer, **{"on_bad_line": "skip"} | options)


def interrupted(source: Path, tokenizer: Any, after: int, **options: Any) -> Path:
    """Interrupt a job after some batches, and return its directory."""
    with pytest.MonkeyPatch.context() as patch:
        calls = iter(range(1, after + 1))

        def update(self: Progress, *_: Any) -> None:
            if next(calls) == after:
                raise KeyboardInterrupt

        patch.setattr(Progress, "update", update)
        with pytest.raises(KeyboardInterrupt):
            run(source, "out", tokenizer, **options)
    return source.parent / "out_unfinished"


def output(source: Path, name: str) -> list[bytes]:
    return [(source.parent / f"{name}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]


@pytest.mark.parametrize(("before", "workers"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("after", [1, 7, 12])
def test_an_interrupted_job_goes_on(source: Path, tokenizer: Any, after: int, before: int, workers: int) -> None:
    summary = run(source, "straight", tokenizer, append_eod=True)
    job = interrupted(source, tokenizer, after, append_eod=True, workers=before)
    assert json.loads((job / "state.json").read_text())["batches"] == after
    for name in ("0.bin", "0.lengths"):  # what was written after the note, before a kill
        with open(job / name, "ab") as file:
            file.write(b"half")
    again = run(source, "out", tokenizer, append_eod=True, workers=workers)
    assert output(source, "out") == output(source, "straight")
    counts, expected = again["datasets"].popitem()[1], summary["datasets"].popitem()[1]
    assert counts == expected
    assert (again["malformed_records"], again["bytes_read"]) == (1, source.stat().st_size)
    assert not job.exists()


def test_what_is_done_is_not_done_again(source: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(source, tokenizer, 9)
    seen = []
    tokenize = type(tokenizer).tokenize
    monkeypatch.setattr(type(tokenizer), "tokenize", lambda self, text: seen.append(text) or tokenize(self, text))
    run(source, "out", tokenizer)
    assert 0 < len([text for text in seen if "fox" not in text]) < LINES / 2


@pytest.mark.parametrize("place", [2, -2])
def test_only_used_input_must_be_the_same(source: Path, tokenizer: Any, place: int) -> None:
    interrupted(source, tokenizer, 5)
    lines = source.read_text().splitlines()
    lines[place] = json.dumps({"text": "1 2 3"})
    source.write_text("\n".join(lines) + "\n")
    if place > 0:
        with pytest.raises(UserError, match=r"the input is not what .*out_unfinished was begun with"):
            run(source, "out", tokenizer)
        run(source, "out", tokenizer, restart=True)
    else:
        run(source, "out", tokenizer)
    run(source, "straight", tokenizer)
    assert output(source, "out") == output(source, "straight")


def test_another_job_is_not_continued(source: Path, tokenizer: Any) -> None:
    job = interrupted(source, tokenizer, 5)
    with pytest.raises(UserError, match="an unfinished job with append_eod False, not True; ask the same"):
        run(source, "out", tokenizer, append_eod=True)
    with pytest.raises(UserError, match=r"an unfinished job with tokenizer .* with 1000 tokens"):
        run(source, "out", build_tokenizer("NullTokenizer", vocab_size=1001))
    (job / "0.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"0\.bin has lost its end; give --restart"):
        run(source, "out", tokenizer)
    assert job.exists()
    run(source, "out", tokenizer, append_eod=True, restart=True)
    run(source, "straight", tokenizer, append_eod=True)
    assert output(source, "out") == output(source, "straight")


def test_what_to_do_with_bad_lines_may_change(source: Path, tokenizer: Any) -> None:
    """A job that ended at one takes the remedy which its message names."""
    for _ in range(2):
        with pytest.raises(UserError, match=r"in\.jsonl, line 6: not valid JSON .* leave such records out with"):
            run(source, "out", tokenizer, on_bad_line="fail")
    job = interrupted(source, tokenizer, 3)
    with pytest.raises(UserError, match="that left out 1 malformed records; go on with it by --on-bad-line skip"):
        run(source, "out", tokenizer, on_bad_line="fail")
    assert job.exists()
    run(source, "out", tokenizer)
    run(source, "straight", tokenizer)
    assert output(source, "out") == output(source, "straight")


def test_a_restart_forgets_what_was_noted(source: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = interrupted(source, tokenizer, 5)
    monkeypatch.setattr(unfinished, "SAVE_SECONDS", 60.0)
    seen = []
    monkeypatch.setattr(Progress, "update", lambda *_: seen.append((job / "state.json").exists()))
    run(source, "out", tokenizer, append_eod=True, restart=True)
    assert seen and not any(seen)


def test_a_disk_that_is_full_at_the_last_index_leaves_no_dataset(
    source: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text(json.dumps({"text": "1 2", "other": "3"}) + "\n")
    write = unfinished.write_index_of_lengths

    def second(file: Any, code: int, lengths: Any) -> None:
        if file.name.endswith("1.idx"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, code, lengths)

    monkeypatch.setattr(unfinished, "write_index_of_lengths", second)
    with pytest.raises(UserError, match="No space left on device; make room there"):
        run(source, "out", tokenizer, json_keys=["text", "other"])
    assert sorted(os.listdir(source.parent)) == ["in.jsonl", "out_unfinished"]
    monkeypatch.setattr(unfinished, "write_index_of_lengths", write)
    run(source, "out", tokenizer, json_keys=["text", "other"])
    assert len(os.listdir(source.parent)) == 5


def test_two_jobs_do_not_write_to_one_place(source: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def second(self: Progress, *_: Any) -> None:
        with pytest.raises(UserError, match="another process works in"):
            run(source, "out", tokenizer)

    monkeypatch.setattr(Progress, "update", second)
    run(source, "out", tokenizer)
    monkeypatch.undo()
    run(source, "straight", tokenizer)
    assert output(source, "out") == output(source, "straight")


def test_a_short_job_leaves_nothing(source: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished, "SAVE_SECONDS", 60.0)
    assert not interrupted(source, tokenizer, 5).exists()
    assert os.listdir(source.parent) == ["in.jsonl"]
