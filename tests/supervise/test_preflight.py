"""The checks before the start name the node that is not as the others."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megagate.supervise import checks, preflight
from tests.distributed import ROOT, run_distributed
from tests.launch.cluster import free_ports

FACTS = {"torch": "2.11", "GPUs": "8"}


def reports(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the reports of n1 to n4, some changed."""
    usual = {"problems": [], "facts": FACTS, "clock": 1000.0, "sees_first": True}
    return {node: usual | changes.get(node, {}) for node in ("n1", "n2", "n3", "n4")}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"problems": ["GPU 3 does not work"]}, "GPU 3 does not work"),
        ({"facts": FACTS | {"torch": "2.10"}}, "torch is 2.10, on 3 of 4 nodes 2.11"),
        ({"facts": FACTS | {"GPUs": "7"}}, "GPUs is 7, on 3 of 4 nodes 8"),
        ({"clock": 1060.0}, r"its clock is +60.0 s off the others'"),
        ({"sees_first": False}, "it does not see a file that the first node wrote: not the same file system"),
    ],
)
def test_one_node_is_not_as_the_others(change: dict[str, Any], problem: str) -> None:
    assert preflight.compare_nodes(reports(), max_skew=10) == {}
    assert preflight.compare_nodes(reports(n3=change), max_skew=10) == {"n3": [problem]}


def test_a_slow_node_is_named_with_its_numbers() -> None:
    times = {node: {"matrix product": 0.010, "exchange": 0.02} for node in ("n1", "n2", "n3", "n4")}
    assert preflight.slow_nodes(times, 2.0) == {}
    times["n2"] = {"matrix product": 0.035, "exchange": 0.021}
    assert preflight.slow_nodes(times, 2.0) == {
        "n2": ["matrix product takes 35.0 ms, 3.5 times the median of all nodes"]
    }


def test_the_slower_of_two_nodes_is_named() -> None:
    times = {"n1": {"matrix product": 0.010}, "n2": {"matrix product": 0.025}}
    assert list(preflight.slow_nodes(times, 2.0)) == ["n2"]
    assert list(preflight.compare_nodes({n: reports()[n] | {"clock": c} for n, c in (("n1", 1.0), ("n2", 20.0))}, 10))


def test_gpus_that_torch_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = preflight.build_parser().parse_args(["--folder", str(tmp_path), "--min-disk", "0"])
    assert preflight.look_at_node(args, 1)["problems"] == []
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "64")
    (problem,) = preflight.look_at_node(args, 1)["problems"]
    assert re.fullmatch(r"torch sees \d+ of the 64 GPUs that Slurm gives", problem)


def check_in_rank(folder: Path, fault: str) -> dict[str, list[str]]:
    """Check in a rank that is a node of its own; n2 and one of its neighbours' links have a fault."""
    import os
    import time
    from unittest import mock

    from torch import distributed

    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    calls = []
    args = preflight.build_parser().parse_args(["--folder", str(folder), "--slow-factor", "6"])
    original = preflight._shortest

    def slowly(work: Any, device: str) -> float:
        def slow() -> None:
            work()
            time.sleep(0.1)

        calls.append(device)
        hinders = fault == "slow" or (fault == "slow for a moment" and len(calls) == 1)
        return original(slow if rank == 1 and hinders else work, device)

    def version(package: str) -> str:
        return "9.9" if rank == 1 and fault == "version" else "1.0"

    names = mock.patch.dict(os.environ, {"SLURMD_NODENAME": f"n{rank + 1}"})
    with names, mock.patch.object(preflight, "_shortest", slowly), mock.patch.object(preflight, "_version", version):
        return preflight.check(args, rank, ranks, 1)


def test_nodes_together(tmp_path: Path) -> None:
    for fault, words in (
        ("none", None),
        ("slow for a moment", None),
        ("version", "torch is 9.9, on 2 of 3 nodes 1.0"),
        ("slow", "matrix product ta"),
    ):
        found = run_distributed(check_in_rank, 3, tmp_path / fault, fault, timeout=100)
        assert found[0] == found[1] == found[2]
        if words is None:
            assert found[0] == {}
        else:
            assert "n2" in found[0] and any(problem.startswith(words) for problem in found[0]["n2"]), found[0]
            assert "n1" not in found[0]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Not a directory" in (preflight.write_and_read(tmp_path / "file" / "folder") or "")
    assert preflight.write_and_read(tmp_path / "folder") is None
    assert list((tmp_path / "folder").iterdir()) == []


def test_little_room(tmp_path: Path) -> None:
    args = argparse.Namespace(folder=tmp_path, min_memory=1e6, min_disk=1e9, min_device_memory=0.9)
    problems = preflight.look_at_node(args, 1)["problems"]
    assert [problem.split(" GB")[1] for problem in problems] == [
        " of memory are free, less than 1e+06",
        f" are free in {tmp_path}, less than 1e+09",
        " are free in /tmp, less than 1e+09",
    ]


def test_nodes_that_never_answer(tmp_path: Path) -> None:
    (tmp_path / "preflight").mkdir()
    (tmp_path / "preflight" / "n1.json").write_text(json.dumps({"problems": []}))
    (tmp_path / "preflight" / "n2.json").write_text(json.dumps({"problems": ["GPU 0 does not work"]}))
    assert checks.unfit(tmp_path, ["n1", "n2", "n3"]) == {
        "n2": ["GPU 0 does not work"],
        "n3": ["it did not answer"],
    }


def test_the_command(tmp_path: Path) -> None:
    """As torchrun starts it, on one node of two ranks."""
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_ports(1)),
        "-m",
    ]
    words += [preflight.__name__, "--folder", str(tmp_path), "--slow-factor", "1000"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "preflight.json").read_text()) == {}
