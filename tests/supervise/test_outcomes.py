"""What a rank writes about its end, and what the supervisor makes of it."""

import pickle
from pathlib import Path

import pytest
from torch.distributed.checkpoint import CheckpointException

from megagate.errors import UserError
from megagate.pretrain import __main__ as entry
from megagate.supervise.records import DIRECTORY_VARIABLE, read_outcomes


@pytest.mark.parametrize(
    ("error", "outcome", "message"),
    [
        (UserError("no such flag"), "user_error", "UserError: no such flag"),
        (ValueError("bad"), "failed", "ValueError: bad"),
        (
            CheckpointException("load", {3: (pickle.UnpicklingError("damaged"), None)}),
            "failed",
            "a checkpoint cannot be read or written: UnpicklingError: damaged",
        ),
    ],
)
def test_how_a_rank_failed(
    error: BaseException, outcome: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises an exception of its own kind for a checkpoint that cannot be read, which is no Exception."""

    def fail() -> int:
        raise error

    monkeypatch.setattr(entry, "main", fail)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    with pytest.raises(type(error)):
        entry.told()
    (written,) = read_outcomes(tmp_path)
    assert (written["outcome"], written["message"]) == (outcome, message)


def test_a_mistake_that_only_one_rank_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megagate.platform import cpu
    from megagate.pretrain import arguments, output, stop

    def refuse(argv: list[str]) -> None:
        raise UserError("cannot read x.yaml")

    monkeypatch.setattr(arguments, "parse", refuse)
    monkeypatch.setattr(output, "quiet", lambda: None)
    monkeypatch.setattr(stop, "install", lambda: None)
    monkeypatch.setattr(cpu, "activate_training", lambda: None)  # for good, in this process
    for name, value in (("RANK", "9"), ("LOCAL_RANK", "1"), (DIRECTORY_VARIABLE, str(tmp_path))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["megagate.pretrain"])
    assert entry.main() == 2
    (written,) = read_outcomes(tmp_path)
    assert (written["outcome"], written["rank"]) == ("user_error", 9)
    assert written["message"] == "UserError: cannot read x.yaml"
