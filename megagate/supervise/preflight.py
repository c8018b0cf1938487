"""Checks of every node before the ranks start, run by torchrun as the trainer will be: is one not as the others?

First each node by itself: devices, free memory and disk, a file written and read where the checkpoints go. Then
together, over gloo: versions, devices and clocks against those of most nodes, and the file of the first node, seen from
each. If all is well, the speed of a matrix product and of an exchange with two neighbours against the nodes' median.

Each node leaves FOLDER/preflight/NODE.json, so that one that never answers is known too; rank 0 writes
FOLDER/preflight.json with what is wrong, by node.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import statistics
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from megagate.errors import run_command
from megagate.parser import Parser
from megagate.supervise.records import host, write_whole

SUMMARY = "preflight.json"
PACKAGES = ("torch", "megatron-core", "numpy", "transformer-engine", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
CONNECT_SECONDS = 180
MATRIX = {"cuda": 8192, "cpu": 512}
EXCHANGE_BYTES = {"cuda": 2**28, "cpu": 2**22}
REPEATS = 20
MEASUREMENTS = 3
"""In each of which a node must be slow to count as such: others on the machine may be at work for a moment."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    parser = Parser(prog="python -m megagate.supervise.preflight", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the records go, on the checkpoints' file system"
    )
    parser.add_argument("--min-memory", type=float, default=1.0, metavar="GB", help="free main memory of a node")
    parser.add_argument(
        "--min-disk", type=float, default=1.0, metavar="GB", help="free space for checkpoints and in /tmp"
    )
    parser.add_argument("--min-device-memory", type=float, default=0.9, help="free share of a GPU's memory")
    parser.add_argument("--max-skew", type=float, default=10.0, metavar="SECONDS", help="clock against the median")
    parser.add_argument(
        "--slow-factor", type=float, default=2.0, help="times the median that a matrix product or exchange may take"
    )
    return parser


# ---------------------------------------------------------------------------------------------------------------------
# One node by itself


def look_at_node(args: argparse.Namespace, local_ranks: int) -> dict[str, Any]:
    """Return what this node is like: "problems", and "facts" that must be the same on all nodes."""
    import psutil
    import torch

    problems = []
    free = psutil.virtual_memory().available / 1e9
    if free < args.min_memory:
        problems.append(f"{free:.1f} GB of memory are free, less than {args.min_memory:g}")
    for place in (args.folder, Path("/tmp")):
        with contextlib.suppress(OSError):
            room = shutil.disk_usage(place).free / 1e9
            if room < args.min_disk:
                problems.append(f"{room:.2f} GB are free in {place}, less than {args.min_disk:g}")
    problem = write_and_read(args.folder / "preflight")
    if problem:
        problems.append(problem)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    given = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    if devices < given:  # without this a node whose driver has failed would train on its CPUs
        problems.append(f"torch sees {devices} of the {given} GPUs that Slurm gives")
    if devices:
        if devices < local_ranks:
            problems.append(f"{devices} GPUs for {local_ranks} ranks")
        problems += [text for index in range(devices) if (text := _look_at_device(index, args.min_device_memory))]
    facts = {name: _version(name) for name in PACKAGES}
    facts |= {"python": platform.python_version(), "GPUs": str(devices)}
    facts["GPU"] = "none"
    with contextlib.suppress(RuntimeError):  # of a GPU that does not work, which is named above
        facts["GPU"] = torch.cuda.get_device_name(0) if devices else "none"
    return {"problems": problems, "facts": facts}


def write_and_read(folder: Path) -> str | None:
    """Write a file of this node, read it, remove it; return what went wrong."""
    path = folder / f"{host()}.probe"
    content = os.urandom(2**16)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if path.read_bytes() != content:
            return f"{path} reads otherwise than it was written"
        path.unlink()
    except OSError as error:
        return f"{path} cannot be written or read: {error.strerror}"
    return None


def _look_at_device(index: int, minimum: float) -> str | None:
    import torch

    try:
        free, total = torch.cuda.mem_get_info(index)
        values = torch.arange(1000.0, device=f"cuda:{index}")
        if float(values.sum()) != 499500.0:
            return f"GPU {index} computes wrongly"
    except RuntimeError as error:
        return f"GPU {index} does not work: {' '.join(str(error).split())[:200]}"
    if free < minimum * total:
        return f"GPU {index} has {free / 1e9:.0f} of {total / 1e9:.0f} GB free: another process is using it"
    return None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


# ---------------------------------------------------------------------------------------------------------------------
# All nodes together


def compare_nodes(reports: dict[str, dict[str, Any]], max_skew: float) -> dict[str, list[str]]:
    """Return the problems of each node that has any, from the reports of all.

    Args:
        reports: node -> "problems", "facts", "clock" (seconds, read at the same moment) and "sees_first".
        max_skew: in seconds.
    """
    found = {node: list(report["problems"]) for node, report in reports.items()}
    for name in next(iter(reports.values()))["facts"]:
        usual, count = Counter(report["facts"][name] for report in reports.values()).most_common(1)[0]
        for node, report in reports.items():
            value = report["facts"][name]
            if value != usual:
                found[node].append(f"{name} is {value}, on {count} of {len(reports)} nodes {usual}")
    median = statistics.median_low(report["clock"] for report in reports.values())
    for node, report in reports.items():
        skew = report["clock"] - median
        if abs(skew) > max_skew:
            found[node].append(f"its clock is {skew:+.1f} s off the others'")
        if not report["sees_first"]:
            found[node].append("it does not see a file that the first node wrote: not the same file system")
    return {node: problems for node, problems in found.items() if problems}


def slow_nodes(times: dict[str, dict[str, float]], factor: float) -> dict[str, list[str]]:
    """Return the nodes that take more than `factor` times the median, with the numbers.

    Args:
        times: node -> kind of work -> seconds.
        factor: how many times the median.
    """
    found: dict[str, list[str]] = {}
    for kind in next(iter(times.values())):
        median = statistics.median_low(entry[kind] for entry in times.values())  # of two nodes the faster one
        for node, entry in times.items():
            if entry[kind] > factor * median:
                found.setdefault(node, []).append(
                    f"{kind} takes {1e3 * entry[kind]:.1f} ms, {entry[kind] / median:.1f} times the median of all nodes"
                )
    return found


def time_matrix_product(device: str) -> float:
    """Return the seconds of a matrix product: the shortest of several, which only a slow device makes long."""
    import torch

    size = MATRIX[device]
    left = torch.ones(size, size, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    return _shortest(lambda: left @ left, device)


def time_exchange(rank: int, ranks: int, nodes: int, device: str) -> float:
    """Return the seconds of an exchange with the same rank of a neighbouring node: of two, the faster one.

    A node is slow if both its neighbours say so; a neighbour of a slow node has another one. Every rank must call it.
    """
    import torch
    from torch import distributed

    node, per_node = rank // (ranks // nodes), ranks // nodes
    sent = torch.ones(EXCHANGE_BYTES[device] // 4, device=device)
    received = torch.empty_like(sent)
    times = []
    for offset in (0, 1):
        distributed.barrier()
        partner = node + 1 if (node - offset) % 2 == 0 else node - 1
        if not 0 <= partner < nodes:
            continue
        peer = partner * per_node + rank % per_node

        def exchange(peer: int = peer) -> None:
            operations = [
                distributed.P2POp(distributed.isend, sent, peer),
                distributed.P2POp(distributed.irecv, received, peer),
            ]
            for request in distributed.batch_isend_irecv(operations):
                request.wait()

        times.append(_shortest(exchange, device))
    return min(times, default=0.0)


def _shortest(work: Any, device: str) -> float:
    import torch

    times = []
    for _ in range(REPEATS + 1):  # the first warms up
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def check(args: argparse.Namespace, rank: int, ranks: int, local_ranks: int) -> dict[str, list[str]]:
    """Check all nodes, in a process group over gloo that exists; return each unfit node's problems, on every rank."""
    import torch
    from torch import distributed

    nodes, first_of_node = ranks // local_ranks, rank % local_ranks == 0
    report = look_at_node(args, local_ranks) if first_of_node else None
    token = args.folder / "preflight" / "first_node"
    if report is not None:
        write_whole(args.folder / "preflight" / f"{host()}.json", json.dumps(report))
    if rank == 0:
        write_whole(token, str(time.time()))
    distributed.barrier()
    if report is not None:
        report |= {"clock": time.time(), "sees_first": _sees(token), "node": host()}
    everyone: list[Any] = [None] * ranks
    distributed.all_gather_object(everyone, report)
    found = compare_nodes({entry["node"]: entry for entry in everyone if entry is not None}, args.max_skew)
    if found:
        return found
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank % local_ranks)
        distributed.destroy_process_group()
        distributed.init_process_group("cpu:gloo,cuda:nccl")
    for number in range(MEASUREMENTS):
        slow = slow_nodes(_times(rank, ranks, nodes, device), args.slow_factor)
        found = {node: problems for node, problems in slow.items() if number == 0 or node in found}
        if not found:
            break
    return found


def _times(rank: int, ranks: int, nodes: int, device: str) -> dict[str, dict[str, float]]:
    """Measure on all ranks at once; return node -> kind of work -> seconds of its slowest rank, on every rank."""
    from torch import distributed

    mine = {
        "node": host(),
        "matrix product": time_matrix_product(device),
        "exchange": time_exchange(rank, ranks, nodes, device),
    }
    everyone: list[Any] = [None] * ranks
    distributed.all_gather_object(everyone, mine)
    times: dict[str, dict[str, float]] = {}
    for entry in everyone:
        slowest = times.setdefault(entry["node"], {"matrix product": 0.0, "exchange": 0.0})
        for kind in slowest:
            slowest[kind] = max(slowest[kind], entry[kind])
    return times


def _sees(path: Path, seconds: float = 10.0) -> bool:
    """Whether a file appears: a file system may show it late."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def main() -> int:
    """Run as one rank of torchrun."""
    args = build_parser().parse_args()
    import torch

    rank, ranks, local_ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # a rank connects to those it talks to, not to all 16,384
    timeout = datetime.timedelta(seconds=CONNECT_SECONDS)
    torch.distributed.init_process_group("gloo", timeout=timeout)
    found = check(args, rank, ranks, local_ranks)
    if rank == 0:
        write_whole(args.folder / SUMMARY, json.dumps(found))
        for node, problems in found.items():
            print(f"megagate: preflight: {node}: {'; '.join(problems)}", flush=True)
    torch.distributed.destroy_process_group()
    return 0  # also with unfit nodes: torchrun would print a traceback on each of thousands


if __name__ == "__main__":
    run_command(main)
