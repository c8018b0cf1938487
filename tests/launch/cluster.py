"""A real Slurm on this machine: munge, one controller and several slurmd, each a node of its own name and port.

All of it runs as the user of the tests, below one folder, and ends with the session.
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("n1", "n2", "n3")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
SlurmdTimeout=15
KillWait=20
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Return the programs that are not installed."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    return [name for name in DAEMONS if shutil.which(name, path=path) is None]


def free_ports(count: int) -> int:
    """Return the first of `count` ports in a row on which nothing listens."""
    for first in range(17000, 32000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RuntimeError("no free ports")


def wait_for(condition: Callable[[], object], seconds: float, what: str, log: Callable[[], str] = str) -> None:
    """Wait until `condition` holds; fail with `what`, and the log as it then is, after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not after {seconds} s: {what}\n{log()}"
        time.sleep(0.2)


class Cluster:
    """The daemons, and Slurm's commands against them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen] = {}
        first = free_ports(len(NODES) + 1)
        host, user = socket.gethostname(), getpass.getuser()
        ports = {"port": first, "first": first + 1, "last": first + len(NODES)}
        self.configuration = folder / "slurm.conf"
        self.configuration.write_text(CONFIGURATION.format(folder=folder, host=host, user=user, **ports))
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        self.environment["SLURM_CONF"] = str(self.configuration)
        self.environment["PATH"] += ":/usr/sbin:/sbin"
        for name in ("state", *(f"spool/{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)

    def start(self) -> None:
        """Start everything and wait until every node is idle."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log"}
        words = [f"--{name}={self.folder / file}" for name, file in {**files, "seed-file": "munge.seed"}.items()]
        # --force: it refuses folders that others may write, such as /tmp.
        self._start("munged", "--foreground", "--force", *words)
        wait_for((self.folder / "munge.socket").exists, 60, "munged")
        self._start("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        wait_for(lambda: self.run("sinfo", "-h", "-o", "%T").split() == ["idle"], 60, "idle nodes")

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._start("slurmd", "-D", "-N", node, name=node)

    def kill_node(self, node: str) -> None:
        """End a node as a power failure does: its slurmd and all that runs there, at once."""
        for process in self.processes_on(node):
            process.kill()
        daemon = self.processes.pop(node)
        daemon.kill()
        daemon.wait()

    def processes_on(self, node: str) -> list[psutil.Process]:
        """Return what jobs of this cluster have running on a node."""
        mine = {"SLURMD_NODENAME": node, "SLURM_CONF": str(self.configuration)}
        found = psutil.process_iter(["environ"])
        return [process for process in found if mine.items() <= (process.info["environ"] or {}).items()]

    def _start(self, program: str, *words: str, name: str | None = None) -> None:
        log = open(self.folder / f"{name or program}.out", "ab")  # noqa: SIM115 - the daemon's
        environment = self.environment
        path = shutil.which(program, path=environment["PATH"])
        assert path is not None, program
        self.processes[name or program] = subprocess.Popen(
            [path, *words], env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        log.close()

    def stop(self) -> None:
        """End the jobs and the daemons."""
        self.run("scancel", "--user", getpass.getuser(), check=False)
        self.run("scancel", "--signal=KILL", "--full", "--user", getpass.getuser(), check=False)
        wait_for(lambda: not self.run("squeue", "-h", check=False), 40, "no jobs")
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()

    def run(self, *words: str, check: bool = True) -> str:
        """Run one of Slurm's commands and return what it prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what scontrol shows of a job."""
        words = self.run("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Start a cluster, and end it."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
