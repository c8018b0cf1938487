"""A cluster in virtual time: how often to save, for sizes that no test has. The decisions are the supervisor's own.

Nodes fail independently, at exponential times. The defaults are those of Llama 3's pretraining on 16,384 GPUs (The
Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.4 and table 5): 419 unexpected interruptions in 54 days on 2,048
nodes, so one in 264 days for a node, of the kinds there.

The closed form beside it is Daly's (A higher order estimate of the optimum checkpoint interval for restart dumps,
2006): with a mean time M between failures, a save of C seconds and R seconds to be back, the time for an interval of t
useful seconds is M exp(R/M) (exp((t + C)/M) - 1); Young's interval is sqrt(2 C M).
"""

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megagate.errors import UserError
from megagate.supervise.decide import Action, Attempt, Kind, Policy, decide

KINDS: tuple[tuple[Kind, float], ...] = (
    (Kind.CUDA, 0.301),  # faulty GPU: the log may not tell it from a fault of the program
    (Kind.DEVICE, 0.286),  # a GPU's memory, its processor, its heat, silent corruption
    (Kind.NODE, 0.131),  # host maintenance, other hardware of the host
    (Kind.HANG, 0.017),  # watchdog time-outs
    (Kind.FAILED, 0.265),  # software, network, storage
)
"""How an interruption looks to the supervisor, and its share."""

ON_A_NODE = (Kind.CUDA, Kind.DEVICE, Kind.NODE)
REMEMBERED = 100
"""Attempts that the decisions look back on; the supervisor's look back on all."""


@dataclass(frozen=True)
class Cluster:
    """What is simulated; times in seconds."""

    nodes: int
    node_mtbf: float = 264 * 86400.0
    step: float = 5.0
    save: float = 30.0
    """How long a save holds training up."""
    restart: float = 300.0
    """From a failure to the next step, in the same job: noticing, starting, loading."""
    requeue: float = 600.0
    """The same through the queue, with another node in the place of the failed one."""
    hang: float = 1800.0
    """Until a hang is noticed."""

    @property
    def mtbf(self) -> float:
        """Return the mean time between failures of the whole."""
        return self.node_mtbf / self.nodes

    @property
    def back(self) -> float:
        """Return the mean time from a failure until training goes on, which the closed form needs."""
        shares = dict(KINDS)
        queued = sum(shares[kind] for kind in ON_A_NODE)
        return queued * self.requeue + (1 - queued) * self.restart + shares[Kind.HANG] * self.hang


@dataclass(frozen=True)
class Result:
    """How a simulated run went."""

    interval: float
    """Useful seconds between two saves."""
    goodput: float
    """Share of the time that went into steps that count."""
    failures: int
    given_up: bool


def simulate(cluster: Cluster, interval: float, seconds: float, policy: Policy, seed: int = 0) -> Result:
    """Run for `seconds` of virtual time with a save after every `interval` useful seconds."""
    generator = random.Random(seed)
    steps_between = max(1, round(interval / cluster.step))
    period = steps_between * cluster.step + cluster.save
    now, saved, failures = 0.0, 0, 0
    attempts: list[Attempt] = []
    while now < seconds:
        alive = min(generator.expovariate(1 / cluster.mtbf), seconds - now)
        saves, rest = divmod(alive, period)
        started_at = saved
        saved += int(saves) * steps_between
        step = saved + min(steps_between, int(rest / cluster.step))
        now += alive
        if now >= seconds:
            saved = step  # the end of the experiment is no failure
            break
        failures += 1
        kind = generator.choices([kind for kind, _ in KINDS], [share for _, share in KINDS])[0]
        host = f"node{generator.randrange(cluster.nodes)}" if kind in ON_A_NODE else None
        attempts = [*attempts[1 - REMEMBERED :], Attempt(kind, started_at, step, saved, host)]
        decision = decide(attempts, policy)
        if decision.action is Action.GIVE_UP:
            return Result(interval, saved * cluster.step / seconds, failures, given_up=True)
        now += decision.wait + (cluster.hang if kind is Kind.HANG else 0.0)
        now += cluster.requeue if decision.action is Action.REQUEUE else cluster.restart
    return Result(interval, saved * cluster.step / seconds, failures, given_up=False)


def young(cluster: Cluster) -> float:
    """Return Young's interval."""
    return math.sqrt(2 * cluster.save * cluster.mtbf)


def daly(cluster: Cluster) -> float:
    """Return Daly's interval of higher order (his equation 37)."""
    half = cluster.save / (2 * cluster.mtbf)
    if half >= 1:
        return cluster.mtbf
    return young(cluster) * (1 + math.sqrt(half) / 3 + half / 9) - cluster.save


def expected_goodput(cluster: Cluster, interval: float) -> float:
    """Return the goodput that the closed form gives."""
    mtbf = cluster.mtbf
    try:
        return interval / (mtbf * math.exp(cluster.back / mtbf) * math.expm1((interval + cluster.save) / mtbf))
    except OverflowError:  # it never comes to a save
        return 0.0


def sweep(cluster: Cluster, days: float, policy: Policy, seeds: int) -> list[tuple[Result, float]]:
    """Return results over intervals around Young's, each a mean over seeds, with the closed form's goodput."""
    results = []
    for power in range(-6, 7):
        interval = max(cluster.step, young(cluster) * 2 ** (power / 2))
        runs = [simulate(cluster, interval, 86400 * days, policy, seed) for seed in range(seeds)]
        mean = replace(
            runs[0],
            goodput=sum(run.goodput for run in runs) / seeds,
            failures=round(sum(run.failures for run in runs) / seeds),
            given_up=any(run.given_up for run in runs),
        )
        results.append((mean, expected_goodput(cluster, interval)))
    return results


def table(cluster: Cluster, results: Sequence[tuple[Result, float]]) -> str:
    """Return the results as text, with the recommended interval."""
    lines = [
        f"{cluster.nodes} nodes: a failure every {cluster.mtbf / 3600:.2f} h, a save takes {cluster.save:g} s",
        "",
        f"{'save every':>12} {'steps':>7} {'goodput':>9} {'closed form':>12} {'failures':>9}",
    ]
    for result, closed in results:
        end = "  gives up" if result.given_up else ""
        lines.append(
            f"{result.interval / 60:>8.1f} min {round(result.interval / cluster.step):>7} "
            f"{100 * result.goodput:>7.1f} % {100 * closed:>10.1f} % {result.failures:>9}{end}"
        )
    best = max(
        (result for result, _ in results if not result.given_up), key=lambda result: result.goodput, default=None
    )
    lines.append("")
    if best is None:
        lines.append("no interval keeps this run alive: make saves or restarts faster")
        return "\n".join(lines)
    lines.append(
        f"recommended: save every {best.interval / 60:.1f} min (--save-interval "
        f"{round(best.interval / cluster.step)}); Young: {young(cluster) / 60:.1f} min, "
        f"Daly: {daly(cluster) / 60:.1f} min"
    )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `python -m megagate.supervise simulate`."""
    parser.add_argument("--nodes", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--days", type=float, default=30, help="of virtual time (default: 30)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument(
        "--node-mtbf-days", type=float, default=264, help="mean days between failures of one node (default: 264)"
    )
    defaults = {"step": "a step", "save": "training held up by a save", "restart": "a restart", "requeue": "a requeue"}
    for name, what in {**defaults, "hang": "until a hang is noticed"}.items():
        default = getattr(Cluster, name)
        parser.add_argument(
            f"--{name}-seconds", type=float, default=default, metavar="S", help=f"{what} (default: {default:g})"
        )


def run(args: argparse.Namespace) -> int:
    """Print a table for each size."""
    times = {name: getattr(args, f"{name}_seconds") for name in ("step", "save", "restart", "requeue", "hang")}
    given = {f"{name}-seconds": value for name, value in times.items()}
    given |= {"days": args.days, "node-mtbf-days": args.node_mtbf_days, "seeds": args.seeds}
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise UserError(f"--{name} must be a number above 0, not {value:g}")
    for nodes in args.nodes:
        if nodes < 1:
            raise UserError(f"--nodes must be at least 1, not {nodes}")
        cluster = Cluster(nodes, args.node_mtbf_days * 86400, **times)
        print(table(cluster, sweep(cluster, args.days, Policy(can_requeue=True), args.seeds)), end="\n\n", flush=True)
    return 0
