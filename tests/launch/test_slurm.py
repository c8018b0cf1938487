"""The shipped sbatch file on a real Slurm, with the real trainer."""

import sys
from pathlib import Path

import pytest

from megagate.supervise.status import screen
from tests.distributed import ROOT
from tests.launch.cluster import Cluster, wait_for
from tests.launch.runs import Run
from tests.training import TINY


def test_a_warning_before_the_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    """It saves, is requeued, resumes and ends; meanwhile a second job of the same name waits."""
    run = Run(cluster, tmp_path / "run", steps=60, name="warned")
    job = run.submit()
    second = run.submit()
    run.wait_for_step(4)
    assert cluster.job(second)["Reason"] == "Dependency"
    cluster.run("scancel", second)
    cluster.run("scancel", "--signal=USR1", "--batch", job)  # as --signal=B:USR1 does
    wait_for(lambda: cluster.job(job)["Restarts"] == "1", 60, f"requeue\n{run.log()}")
    run.wait_for_state(job, "COMPLETED")
    first, last = run.ends()
    assert (first["kind"], first["decision"], first["signal"]) == ("stopped", "requeue", "SIGUSR1"), run.log()
    assert 4 <= first["saved"] == first["step"] == last["started_at"] < 60
    assert (last["kind"], last["decision"], last["step"], last["saved"]) == ("finished", "done", 60, 60)
    assert first["steps_lost"] == last["steps_lost"] == 0
    run.check_equals_uninterrupted()
    assert "2: 1 stopped, 1 finished; 0 steps done again" in screen(run.save)


def test_srun_without_torchrun(cluster: Cluster, tmp_path: Path) -> None:
    trainer = [sys.executable, "-m", "megagate.pretrain", *TINY, "--tensorboard-dir", str(tmp_path)]
    printed = cluster.run("srun", "--nodes=2", "--ntasks=2", f"--chdir={ROOT}", *trainer)
    assert printed.count("iteration        2/") == 1, printed
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}


@pytest.mark.full
def test_the_time_limit_itself(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path / "run", steps=500, name="limited")
    job = run.submit("--time", "00:01:00", "--warn", "30", trainer=("--log-interval", "1"))
    wait_for(lambda: cluster.job(job)["JobState"] == "COMPLETED", 280, run.log())
    ends = run.ends()
    assert len(ends) > 1 and {end["kind"] for end in ends[:-1]} == {"stopped"}, run.log()
    assert sum(end["steps_lost"] for end in ends) == 0
    run.check_equals_uninterrupted()
