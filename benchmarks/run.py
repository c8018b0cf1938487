"""Step times of every gate against the ungated model, and of the ungated model against transformers.

    make bench        or        python benchmarks/run.py [gates] [telemetry] [transformers] [--rounds N] [--threads N]

One process, one model of each kind, steps in turn, so that whatever else the machine does falls on all alike. Ratios
are medians over rounds of the ratio within a round. Read these; the times mean nothing elsewhere. On a machine with
other work, `--threads 1 --cpu-time` is the steadier measure: threads that wait for each other are then not counted.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

import megagate.platform  # noqa: F401  # before Megatron

# isort: split
import torch
from models import (
    MEGATRONS_GATE,
    MEGATRONS_LAYERS,
    Step,
    build,
    loss_of,
    megabytes_for_backward,
    observed,
    predicted_overhead,
    process_group,
    step_of,
    with_megatrons_functions,
)

from megagate.gate import PRESETS

PARTS = ("gates", "telemetry", "transformers")
WARM_UP = 2


class Rounds:
    """The times of steps that were taken in turn, in seconds, one of each in a round."""

    def __init__(self, steps: dict[str, Step], rounds: int, cpu_time: bool) -> None:
        clock = time.process_time if cpu_time else time.perf_counter
        self.times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(rounds + WARM_UP):
            for name, step in steps.items():
                start = clock()
                step()
                if turn >= WARM_UP:  # the first rounds allocate
                    self.times[name].append(clock() - start)

    def milliseconds(self, name: str) -> float:
        """Return the median time of a step."""
        return 1000 * statistics.median(self.times[name])

    def ratio(self, name: str, reference: str) -> float:
        """Return the median of the ratios within a round."""
        return statistics.median(a / b for a, b in zip(self.times[name], self.times[reference], strict=True))


def compare_gates(rounds: int, cpu_time: bool) -> None:
    """Print every preset's time, parameters and memory beside the baseline's, and the time that its FLOPs predict."""
    models = {name: build(name) for name in (*PRESETS, MEGATRONS_GATE)}
    measured = Rounds({name: step_of(model, loss_of(model)) for name, model in models.items()}, rounds, cpu_time)
    print(f"{'gate':34}{'parameters':>12}{'saved, MB':>11}{'step, ms':>10}{'of baseline':>13}{'by FLOPs':>10}")
    for name, model in models.items():
        size = sum(parameter.numel() for parameter in model.parameters())
        predicted = 1 + predicted_overhead(PRESETS.get(name, PRESETS["sdpa-elementwise"]))
        print(
            f"{name:34}{size:>12,}{megabytes_for_backward(model):>11.1f}{measured.milliseconds(name):>10.0f}"
            f"{measured.ratio(name, 'baseline'):>13.3f}{predicted:>10.3f}"
        )
    own = measured.ratio("sdpa-elementwise", MEGATRONS_GATE)
    print(f"sdpa-elementwise takes {own:.3f} of the time of {MEGATRONS_GATE}")


OBSERVED = ("baseline", "sdpa-headwise", "sdpa-elementwise")


def compare_telemetry(rounds: int, cpu_time: bool) -> None:
    """Print the time of a step that is observed, with the reduction of what is found, beside one that is not."""
    print(f"{'gate':34}{'step, ms':>10}{'observed':>10}{'every step':>12}{'every 10':>10}")
    for name in OBSERVED:
        model = build(name)
        step = step_of(model, loss_of(model))
        times = Rounds({"plain": step, "observed": observed(step, model, name)}, rounds, cpu_time)
        ratio = times.ratio("observed", "plain")
        print(
            f"{name:34}{times.milliseconds('plain'):>10.0f}{times.milliseconds('observed'):>10.0f}"
            f"{ratio - 1:>12.1%}{(ratio - 1) / 10:>10.2%}"
        )


def compare_transformers(rounds: int, cpu_time: bool) -> None:
    """Print the baseline's time beside that of transformers and of Megatron's local layers."""
    from transformers_moe import (
        IMPLEMENTATIONS,
        TOLERANCE,
        build_transformers,
        largest_difference,
        transformers_loss_of,
    )

    difference = largest_difference()
    print(f"same weights, same batch: loss and gradients of both models agree to {difference:.1e}")
    if not difference < TOLERANCE:
        raise SystemExit(f"the models do not compute the same: more than {TOLERANCE} apart")
    ours, local = build("baseline"), build(MEGATRONS_LAYERS)
    steps = {
        "megagate, baseline": step_of(ours, loss_of(ours)),
        MEGATRONS_LAYERS: with_megatrons_functions(step_of(local, loss_of(local))),
    }
    for implementation in IMPLEMENTATIONS:
        model = build_transformers(implementation)
        steps[f"transformers, {implementation}"] = step_of(model, transformers_loss_of(model))
    measured = Rounds(steps, rounds, cpu_time)
    fastest = min((name for name in steps if "transformers" in name), key=measured.milliseconds)
    print(f"{'model':34}{'step, ms':>10}  of {fastest}")
    for name in steps:
        print(f"{name:34}{measured.milliseconds(name):>10.0f}{measured.ratio(name, fastest):>13.3f}")


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all if none is given")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each variant")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of an operator")
    parser.add_argument("--cpu-time", action="store_true", help="time of the CPU instead of the clock's")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: give {', '.join(PARTS)}")
    torch.set_num_threads(arguments.threads)
    clock = "CPU time" if arguments.cpu_time else "medians"
    with process_group():
        for part in arguments.parts or PARTS:
            compare = {
                "gates": compare_gates,
                "telemetry": compare_telemetry,
                "transformers": compare_transformers,
            }[part]
            print(f"{part}: {arguments.rounds} rounds, {torch.get_num_threads()} threads, {clock}")
            compare(arguments.rounds, arguments.cpu_time)


if __name__ == "__main__":
    main()
