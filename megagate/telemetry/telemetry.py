"""All observers of a model together, with one reduction over the ranks."""

import argparse
import contextlib
from collections.abc import Iterable, Iterator

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megagate.gate.config import gate_config_from_args
from megagate.gate.layout import query_groups
from megagate.model.pattern import BOUNDARY, block_of_each_layer, layer_pattern
from megagate.telemetry.activations import ActivationObserver
from megagate.telemetry.experts import ExpertObserver
from megagate.telemetry.gates import GateObserver, heads_with_scores
from megagate.telemetry.observer import Findings, Observer, layers_of
from megagate.telemetry.rows import Sample
from megagate.telemetry.sinks import SinkObserver
from megagate.telemetry.speed import SpeedObserver
from megagate.telemetry.totals import Totals


class Telemetry:
    """Observers of a model, whichever part of it this rank holds.

    Args:
        args: of the run.
        chunks: of the model on this rank, wrapped or not.
        rows: how many rows of a sequence to look at after the first ones (`megagate.telemetry.rows`).
        only_gates: whether to leave the other observers out.
    """

    def __init__(
        self, args: argparse.Namespace, chunks: Iterable[nn.Module], rows: int, *, only_gates: bool = False
    ) -> None:
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        device = torch.device(torch.cuda.current_device())
        blocks = block_of_each_layer(layer_pattern(args).replace(BOUNDARY, ""))
        gate = gate_config_from_args(args)
        sample = Sample(rows, groups, args.sequence_parallel, device)
        replicated = not args.sequence_parallel
        self.layers = layers_of(chunks, layer_pattern(args))
        self.totals = Totals(blocks[-1], device)
        self.speed = SpeedObserver(self.totals)
        self.observers: list[Observer] = []
        if gate.has_gate:
            heads = heads_with_scores(gate, args.num_attention_heads, query_groups(args))
            self.observers.append(GateObserver(gate, heads, sample, self.totals))
        if only_gates:
            return
        self.observers.append(SinkObserver(sample, self.totals))
        self.observers.append(ActivationObserver(sample, self.totals, replicated, groups.tp))
        if args.num_experts:
            self.observers.append(ExpertObserver(args.num_experts, self.totals, replicated, groups.tp))

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Observe what the model does inside the context."""
        with contextlib.ExitStack() as on_exit:
            for observer in self.observers:
                observer.attach(self.layers, on_exit)
            yield

    def findings(self, tokens: float = 0, operations: float = 0, devices: int = 1) -> Findings:
        """Return what was observed since the last call, by all ranks, which must all call this.

        Args:
            tokens: of the steps since then, all ranks together.
            operations: floating-point operations of these steps, all ranks together.
            devices: number of ranks.
        """
        totals = self.totals.reduce()
        self.totals.reset()
        found = Findings()
        for observer in self.observers:
            found.update(observer.findings(totals))
        found.update(self.speed.findings(totals, tokens, operations, devices))
        return found
