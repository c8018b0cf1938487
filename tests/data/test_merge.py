"""A merged dataset is what Megatron's builder makes of its parts, and appears only when it is whole."""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagate.data import index_file
from megagate.data.merge import expand, main, merge
from megagate.errors import UserError
from tests.data.datasets import read_dataset, write_dataset

DOCUMENTS = st.lists(st.lists(st.integers(0, 65535), max_size=6), min_size=1, max_size=6).filter(lambda kept: kept[-1])


def megatrons(prefixes: list[str], output: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{output}.bin", dtype=np.uint16)
    for prefix in prefixes:
        builder.add_index(prefix)
    builder.finalize(f"{output}.idx")


@settings(max_examples=12, deadline=None)
@given(parts=st.lists(DOCUMENTS, min_size=1, max_size=4), chunk=st.integers(1, 5))
def test_bytes_are_those_of_megatrons_builder(parts: list[list[list[int]]], chunk: int) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_file, "CHUNK", chunk)
        folder = Path(name)
        prefixes = [write_dataset(folder / f"part{place}", part) for place, part in enumerate(parts)]
        megatrons(prefixes, folder / "expected")
        summary = merge(prefixes, str(folder / "merged"))
        for suffix in (".bin", ".idx"):
            assert (folder / f"merged{suffix}").read_bytes() == (folder / f"expected{suffix}").read_bytes()
        assert read_dataset(str(folder / "merged")) == [document for part in parts for document in part]
        assert summary["documents"] == sum(map(len, parts))
        assert summary["tokens"] == sum(len(document) for part in parts for document in part)


def test_inputs_are_prefixes_files_patterns_and_directories(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_dataset(tmp_path / name, [[1, 2]])
    expected = [str(tmp_path / name) for name in "abc"]
    assert expand([str(tmp_path)]) == expected
    assert expand([f"{tmp_path}/*.idx"]) == expand([f"{tmp_path}/?.bin"]) == expand([f"{tmp_path}/?"]) == expected
    (tmp_path / "d.partial-1.idx").write_bytes(b"")
    assert expand([str(tmp_path)]) == expected
    assert expand([f"{tmp_path}/c.idx", f"{tmp_path}/a"]) == [expected[2], expected[0]]
    (tmp_path / "a" / "cache").mkdir(parents=True)  # as training leaves it
    assert expand([f"{tmp_path}/a"]) == expected[:1]
    with pytest.raises(UserError, match="is named twice"):
        expand([str(tmp_path), f"{tmp_path}/b"])
    with pytest.raises(UserError, match=r"has no \.idx file"):
        expand([f"{tmp_path}/*.nothing"])


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    small = write_dataset(tmp_path / "small", [[1, 2]])
    large = write_dataset(tmp_path / "large", [[1, 2]], np.int32)
    with pytest.raises(UserError, match=r"large has int32 tokens but .*small has uint16.* preprocess one with"):
        merge([small, large], str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"small\.bin exists"):
        merge([large], small)
    damaged = write_dataset(tmp_path / "damaged", [[1, 2], [3], [4, 5, 6]])
    content = bytearray((tmp_path / "damaged.idx").read_bytes())
    content[34:38] = (3).to_bytes(4, "little")  # the first length
    (tmp_path / "damaged.idx").write_bytes(content)
    with pytest.raises(UserError, match="sequence 1 begins at byte 4, but those before it end at 6"):
        merge([small, damaged], str(tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "part", [list(range(5000))] * 4)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000));"
        "from megagate.data.merge import main; from megagate.errors import run_command; run_command(main)"
    )
    command = [sys.executable, "-c", code, "--input", prefix, "--output-prefix", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "cannot write" in result.stderr and "Traceback" not in result.stderr
    assert not list(tmp_path.glob("out*"))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 30000


def test_the_command_prints_its_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "a", [[1, 2], [3]])
    write_dataset(tmp_path / "b", [[4]])
    assert main(["--input", str(tmp_path), "--output-prefix", str(tmp_path / "merged" / "all")]) == 0
    assert '"documents": 3, "tokens": 4, "dtype": "uint16"' in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path / "merged")) == ["all.bin", "all.idx"]
