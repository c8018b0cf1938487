"""Where results go is checked before anything slow, and what cannot be written is said."""

from pathlib import Path

import pytest

from megagate.errors import UserError
from megagate.evaluate.options import check_output, write_file


def test_where_results_go(tmp_path: Path) -> None:
    check_output(None)
    check_output(str(tmp_path / "found.json"))
    with pytest.raises(UserError, match=r"--output .*/no/found.json lies in a directory that does not exist: make it"):
        check_output(str(tmp_path / "no" / "found.json"))
    with pytest.raises(UserError, match=r"--output .* is a directory: name a file in it"):
        check_output(str(tmp_path))


def test_what_cannot_be_written(tmp_path: Path) -> None:
    write_file(tmp_path / "new" / "text", "ä")
    assert (tmp_path / "new" / "text").read_bytes() == "ä".encode()
    with pytest.raises(UserError, match="cannot write /dev/full: No space left on device; choose another place"):
        write_file(Path("/dev/full"), b"x")
