"""Users' mistakes become one line and status 2; anything else keeps its traceback."""

import pytest

from megagate.errors import UserError, nearest, reason, run_command


def failing(error: BaseException):
    def main() -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [(UserError("do this"), 2, "error: do this\n"), (KeyboardInterrupt(), 130, "interrupted\n")],
)
def test_status_and_text(error: BaseException, status: int, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_command(failing(error))
    assert stopped.value.code == status
    assert capsys.readouterr().err == shown


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError):
        run_command(failing(KeyError("a fault of the program")))


def test_one_process_of_a_machine_says_what_all_find(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, once, shown in (("0", True, "error: wrong\n"), ("3", True, ""), ("3", False, "error: wrong\n")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as stopped:
            run_command(failing(UserError("wrong")), once=once)
        assert stopped.value.code == 2
        assert capsys.readouterr().err == shown


def test_success() -> None:
    for result, status in ((None, 0), (0, 0), (3, 3)):
        with pytest.raises(SystemExit) as stopped:
            run_command(lambda result=result: result)
        assert stopped.value.code == status


def test_nearest_names() -> None:
    assert nearest("hiden-size", ["hidden-size", "lr"]) == "; did you mean hidden-size?"
    assert nearest("xyz", ["hidden-size"]) == ""


def test_reason_of_an_error_without_words() -> None:
    try:
        raise AssertionError
    except AssertionError as error:
        assert reason(error) == "AssertionError at raise AssertionError"
    assert reason(ValueError("two\nlines")) == "two lines"
