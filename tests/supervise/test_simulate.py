"""The simulation agrees with the closed form where that holds, and its decisions are the supervisor's."""

import argparse
import subprocess
import sys

import pytest

from megagate.errors import UserError
from megagate.supervise.decide import PATIENCE, Policy
from megagate.supervise.simulate import (
    Cluster,
    add_arguments,
    daly,
    expected_goodput,
    run,
    simulate,
    sweep,
    table,
    young,
)
from tests.distributed import ROOT

POLICY = Policy(can_requeue=True)
PATIENT = Policy(can_requeue=True, without_progress=10**9, same_step=10**9, back_off=0)
"""Waits for nothing and never gives up, as the closed form assumes."""


@pytest.mark.parametrize("nodes", [1024, 4096, 16384])
@pytest.mark.parametrize("factor", [0.5, 1, 2])
def test_agrees_with_the_closed_form(nodes: int, factor: float) -> None:
    cluster = Cluster(nodes, hang=0.0, requeue=300.0)  # one time to be back
    interval = factor * young(cluster)
    runs = [simulate(cluster, interval, 60 * 86400, PATIENT, seed).goodput for seed in range(3)]
    # The closed form lets nodes fail while the run is coming back; here they fail while it trains.
    rate = cluster.mtbf / (cluster.mtbf + cluster.back)
    closed = expected_goodput(Cluster(nodes, restart=0.0, requeue=0.0, hang=0.0), interval) * rate
    assert sum(runs) / 3 == pytest.approx(closed, rel=0.03)


def test_young_and_daly() -> None:
    """A save of 30 s and a failure every 6.19 h."""
    cluster = Cluster(1024)
    assert cluster.mtbf == pytest.approx(22275)
    assert young(cluster) == pytest.approx(1156.07, rel=1e-4)
    assert daly(cluster) == pytest.approx(1136.1, rel=1e-3)
    best = max(range(200, 4000, 10), key=lambda interval: expected_goodput(cluster, interval))
    assert daly(cluster) == pytest.approx(best, abs=10)


def test_the_recommended_interval_is_near_the_closed_form() -> None:
    cluster = Cluster(2048)
    results = sweep(cluster, 60, POLICY, seeds=4)
    best = max(results, key=lambda pair: pair[0].goodput)[0]
    assert daly(cluster) / 2.1 < best.interval < daly(cluster) * 2.1
    shown = table(cluster, results)
    assert "recommended: save every" in shown and "Young" in shown


def test_a_run_that_never_saves_in_time_is_given_up() -> None:
    cluster = Cluster(16384)
    result = simulate(cluster, 20 * cluster.mtbf, 86400, POLICY)
    assert result.given_up
    assert POLICY.without_progress <= result.failures <= PATIENCE * POLICY.without_progress
    assert not simulate(cluster, young(cluster), 10 * 86400, POLICY).given_up


@pytest.mark.parametrize("factor", [0.5, 1, 2])
def test_a_run_that_comes_on_is_not_given_up(factor: float) -> None:
    """Of the two thousand failures that random nodes have in a month, some meet at one step or before a save."""
    cluster = Cluster(16384)
    runs = [simulate(cluster, factor * young(cluster), 30 * 86400, POLICY, seed) for seed in range(20)]
    assert not any(run.given_up for run in runs)
    assert min(run.failures for run in runs) > 1000


def test_the_command() -> None:
    words = [sys.executable, "-m", "megagate.supervise", "simulate", "--nodes", "1024", "2048", "--days", "1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("recommended: save every") == 2


@pytest.mark.parametrize(("flag", "value"), [("--save-seconds", "0"), ("--days", "inf"), ("--node-mtbf-days", "nan")])
def test_refused(flag: str, value: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(UserError, match=f"^{flag} must be a number above 0, not {value}$"):
        run(parser.parse_args([flag, value]))


def test_a_cluster_that_never_comes_to_a_save(capsys: pytest.CaptureFixture) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["--nodes", "100000000", "--days", "0.1", "--seeds", "1"])) == 0
    assert "no interval keeps this run alive" in capsys.readouterr().out
