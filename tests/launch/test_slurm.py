"""The shipped sbatch file on a real Slurm, with the real trainer."""

import sys
from pathlib import Path

import pytest

from megagate.supervise.status import screen
from tests.distributed import ROOT
from tests.launch.cluster import Cluster, wait_for
from tests.launch.runs import Run
from tests.training import TINY


@pytest.mark.timeout(900)
def test_a_warning_before_the_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    """It saves, is requeued, resumes and ends; meanwhile a second job of the same name waits."""
    run = Run(cluster, tmp_path / "run", steps=40, name="warned")
    job = run.submit(interval=4)
    second = run.submit()
    wait_for(lambda: cluster.job(second)["Reason"] == "Dependency", 60, "the second job waits")
    cluster.run("scancel", second)
    run.wait_for_step(5)
    cluster.run("scancel", "--signal=USR1", "--batch", job)  # as --signal=B:USR1 does
    wait_for(lambda: cluster.job(job)["Restarts"] == "1", 60, "requeue", run.log)
    run.wait_for_state(job, "COMPLETED")
    first, last = run.ends()
    assert (first["kind"], first["decision"], first["signal"]) == ("stopped", "requeue", "SIGUSR1"), run.log()
    assert 5 <= first["saved"] == first["step"] == last["started_at"] < 40
    assert (last["kind"], last["decision"], last["step"], last["saved"]) == ("finished", "done", 40, 40)
    assert first["steps_lost"] == last["steps_lost"] == 0
    run.check_equals_uninterrupted(interval=4)
    assert "2: 1 stopped, 1 finished; 0 steps done again" in screen(run.save)


def test_srun_without_torchrun(cluster: Cluster, tmp_path: Path) -> None:
    trainer = [sys.executable, "-m", "megagate.pretrain", *TINY, "--tensorboard-dir", str(tmp_path)]
    printed = cluster.run("srun", "--nodes=2", "--ntasks=2", f"--chdir={ROOT}", *trainer)
    assert printed.count("iteration        2/") == 1, printed
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_time_limit_itself(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path / "run", steps=1500, name="limited")
    job = run.submit("--time", "00:02:00", "--warn", "50")
    run.wait_for_state(job, "COMPLETED", seconds=1200)
    ends = run.ends()
    assert len(ends) > 1 and {end["kind"] for end in ends[:-1]} == {"stopped"}, run.log()
    assert sum(end["steps_lost"] for end in ends) == 0
    run.check_equals_uninterrupted()


def kill_a_rank(cluster: Cluster, node: str) -> None:
    """SIGKILL the rank on a node."""
    ranks = [process for process in cluster.processes_on(node) if "RANK" in process.info["environ"]]
    assert ranks
    ranks[0].kill()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_killed_rank(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path / "run", steps=100, name="killed")
    job = run.submit(interval=10)
    run.wait_for_step(15)
    kill_a_rank(cluster, "n2")
    wait_for(lambda: len(run.ends()) == 1, 100, "the end of an attempt", run.log)
    run.wait_for_state(job, "COMPLETED", seconds=300)
    first, last = run.ends()
    assert (first["kind"], first["rank"], first["host"], first["decision"]) == ("killed", 1, "n2", "restart"), run.log()
    assert first["saved"] <= last["started_at"] and first["steps_lost"] <= 10
    assert cluster.job(job)["Restarts"] == "0"
    run.check_equals_uninterrupted(interval=10)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_node_that_goes_away(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path / "run", steps=100, name="lost")
    job = run.submit(interval=10)
    run.wait_for_step(15)
    cluster.kill_node("n2")
    wait_for(lambda: cluster.job(job)["Restarts"] == "1", 120, "requeue", run.log)
    run.wait_for_state(job, "COMPLETED", seconds=300)
    assert cluster.job(job)["NodeList"] == "n[1,3]"
    ends = run.ends()
    assert ends[-1]["kind"] == "finished" and len(ends) > 1
    assert sum(end["steps_lost"] for end in ends) <= 20
    run.check_equals_uninterrupted(interval=10)
    cluster.start_node("n2")
    wait_for(lambda: cluster.run("sinfo", "-h", "-n", "n2", "-o", "%T") == "idle", 60, "n2 is back")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_scancel(cluster: Cluster, tmp_path: Path) -> None:
    """It saves, ends, and does not come back; submitted again it goes on."""
    run = Run(cluster, tmp_path / "run", steps=100, name="cancelled")
    job = run.submit()
    run.wait_for_step(4)
    cluster.run("scancel", job)
    wait_for(lambda: cluster.run("squeue", "-h", "-j", job, check=False) == "", 100, "the job is gone", run.log)
    assert cluster.job(job)["JobState"] == "CANCELLED"
    again = run.submit()
    run.wait_for_state(again, "COMPLETED", seconds=300)
    first, last = run.ends()
    assert first["kind"] == "stopped" and first["saved"] == first["step"] == last["started_at"] >= 4, run.log()
    run.check_equals_uninterrupted()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_unfit_node(cluster: Cluster, tmp_path: Path) -> None:
    """A node with another version of a package is named, left out, and the job runs on the others."""
    other = tmp_path / "other" / "megatron_core-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 9.9.9\n")
    python = tmp_path / "python"
    condition = f'[ "$SLURMD_NODENAME" = n2 ] && export PYTHONPATH="{other.parent}:$PYTHONPATH"'
    python.write_text(f'#!/bin/bash\n{condition}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    run = Run(cluster, tmp_path / "run", steps=4, name="unfit")
    job = run.submit("--python", str(python), checks=True)
    wait_for(lambda: cluster.job(job).get("ExcNodeList") == "n2", 400, "n2 is left out", run.log)
    run.wait_for_state(job, "COMPLETED", seconds=400)
    assert cluster.job(job)["NodeList"] == "n[1,3]"
    first, last = run.ends()
    assert (first["kind"], first["host"], first["exclude"], last["kind"]) == ("preflight", "n2", ["n2"], "finished")
    assert "megatron-core is 9.9.9, on 1 of 2 nodes" in first["message"]
    lines = [line for line in run.log().splitlines() if "Traceback" in line]
    assert all("elastic/agent" in line for line in lines)  # torchrun's, whose store may go before its last agent
