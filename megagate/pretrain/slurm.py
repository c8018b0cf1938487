"""Ranks that srun starts itself, without torchrun: `srun --ntasks-per-node 8 python -m megagate.pretrain ...`.

Slurm gives each task its number; torch wants it under other names. The place where rank 0 listens follows from the
job: every task comes to the same one without asking the others.
"""

import os
import re
import subprocess

from megagate.errors import UserError

NEEDED = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST")
FIRST_PORT, PORTS = 15000, 16000
"""Below the ports that Linux gives to outgoing connections."""


def set_ranks(tasks: int) -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from Slurm's variables.

    MASTER_ADDR and MASTER_PORT stay as they are where they are set.

    Args:
        tasks: how many this step has.

    Raises:
        UserError: variables are missing, or Slurm does not know the first node.
    """
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise UserError(
            f"srun started {tasks} tasks, but RANK is not set, and {missing[0]} to take it from neither: start one "
            "task per node that runs torchrun, or pass Slurm's variables on"
        )
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    os.environ["WORLD_SIZE"] = str(tasks)
    per_node = expand(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(os.environ.get("SLURM_NODEID", "0"))
    if node < len(per_node):
        os.environ["LOCAL_WORLD_SIZE"] = str(per_node[node])
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = first_address(os.environ["SLURM_STEP_NODELIST"])
    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ.get("SLURM_STEP_ID", "0"))
    os.environ.setdefault("MASTER_PORT", str(FIRST_PORT + (job + step) % PORTS))


def expand(counts: str) -> list[int]:
    """Return the numbers of Slurm's short form: "2(x3),1" is [2, 2, 2, 1]."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in groups for _ in range(int(times or 1))]


def first_address(nodes: str) -> str:
    """Return the address at which Slurm's daemons reach the first of the nodes.

    Raises:
        UserError: scontrol is missing or does not know the node.
    """
    first = _scontrol("show", "hostnames", nodes).split("\n")[0].strip()
    address = re.search(r"NodeAddr=(\S+)", _scontrol("show", "node", first))
    return address[1] if address else first


def _scontrol(*words: str) -> str:
    try:
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise UserError(
            f"scontrol {' '.join(words)} failed ({' '.join(said.split())}): set MASTER_ADDR to the first node's address"
        ) from error
