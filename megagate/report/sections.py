"""Which figures the page has, from which tags, and the definitions in their captions."""

from collections.abc import Sequence

import numpy as np

from megagate.report import figures, spikes
from megagate.report.builder import Builder, Section
from megagate.report.runs import Run, Series
from megagate.report.tables import FIRST_TOKEN, FLOOR, LOSS, Table, number, tokens_per_second, validation_losses

FIGURES = (
    "loss validation gradients gate gate-by-layer gate-histogram gate-heads attention attention-by-layer activations "
    "activations-by-layer experts experts-by-layer experts-histogram throughput time"
).split()
"""Every name that a figure can have."""
TIME_PARTS = ("data", "forward", "backward", "optimizer", "communication")
GATE = {
    "mean score": "gate/mean-score",
    "share of scores under 0.1": "gate/share-below-0.1",
    "share of scores under 0.01": "gate/share-below-0.01",
    "magnitude before the gate": "gate/magnitude-before",
    "magnitude after the gate": "gate/magnitude-after",
}
ATTENTION = {
    "share of the first token": FIRST_TOKEN,
    "share of the first token, all rows": "attention/first-token-share-all-rows",
    "attention entropy (nats)": "attention/entropy",
    "largest attention logit": "attention/max-logit",
}
ACTIVATIONS = {"largest activation": "activation/max", "largest over median": "activation/max-to-median"}
EXPERTS = {
    "largest load over mean load": "experts/max-to-mean-load",
    "experts without a token": "experts/dead",
    "router entropy (nats)": "experts/router-entropy",
    "share of dropped choices": "experts/drop-rate",
}


def build(runs: Sequence[Run], spike_deviations: float) -> list[Section]:
    """Return the page's sections, each with figures and what is missing for others."""
    builder = Builder(runs, spike_deviations)
    return [part(builder) for part in (_loss, _stability, _gate, _attention, _activations, _experts, _throughput)]


def _loss(b: Builder) -> Section:
    section = Section("loss", "Loss")
    panel = b.panel("training loss (nats per token)", LOSS)
    panel.marks = {name: spikes.find_spikes(y, b.spike_deviations) for name, (_, y) in panel.curves.items()}
    caption = f"Triangles: loss spikes. {figures.SMOOTHING} "
    b.curves(section, "loss", "Training loss", caption + spikes.definition(b.spike_deviations), [panel])
    caption = (
        "Mean over the validation batches. The test set, which Megatron logs at the end as validation, is left out."
    )
    panels = [b.panel(f"{name} (nats per token)", tag) for name, tag in validation_losses(b.runs).items()]
    b.curves(section, "validation", "Validation loss", caption, panels)
    return section


def _stability(b: Builder) -> Section:
    section = Section("stability", "Gradients and learning rate")
    norm = b.panel("gradient norm", "grad-norm", is_log=True)
    for run in b.runs:
        if run.name in norm.curves and LOSS in run.scalars:
            loss = run.scalars[LOSS]
            steps = loss.steps[spikes.find_spikes(loss.values, b.spike_deviations)]
            norm.marks[run.name] = np.flatnonzero(np.isin(run.scalars["grad-norm"].steps, steps))
    others = {"learning rate": "learning-rate", "parameter norm": "params-norm", "zeros in the gradient": "num-zeros"}
    panels = [norm, *(b.panel(title, tag) for title, tag in others.items())]
    scale = b.panel("loss scale", "loss-scale", is_log=True)
    if any(np.ptp(y) for _, y in scale.curves.values()):  # it is 1 throughout unless the run is in fp16
        panels.append(scale)
    caption = "Norm of all gradients, before clipping. Triangles: where the loss has a spike, as defined above."
    b.curves(section, "gradients", "Gradient norm and learning rate", caption, panels)
    return section


def _gate(b: Builder) -> Section:
    section = Section("gate", "Gate")
    caption = (
        "A score is the activation of a gate's logits, which multiplies what is gated (or is added to it). Means over "
        "tokens, heads, channels and blocks; shares are of absolute values. Magnitude: root mean square of the gated "
        "tensor."
    )
    panels = [b.panel(title, tag) for title, tag in GATE.items()]
    b.curves(section, "gate", "Gate scores", caption, panels)
    caption = "A block without a gate has no point."
    b.by_layer(section, "gate-by-layer", "Gate scores by layer", caption, dict(list(GATE.items())[:2]))
    title, caption = "Histogram of gate scores by layer", "Each row of an image is a block; its bins add up to 1."
    b.histograms(section, "gate-histogram", title, caption, "gate score", "gate/scores")
    caption = "Mean over the tokens and channels of a head; heads count from 0."
    b.by_head(section, "gate-heads", "Mean gate score of each head", caption, "mean score", "gate/head-mean")
    return section


def _attention(b: Builder) -> Section:
    section = Section("attention", "Attention sink")
    panels = [b.panel(title, tag) for title, tag in ATTENTION.items()]
    uniform = b.panel("uniform", FLOOR).curves
    panels[0].floors = {name: curve for name, curve in uniform.items() if name in panels[0].curves}
    caption = (
        "Share of the first token: the attention probability that queries give to the first key, mean over queries, "
        "heads and blocks; without the first queries, which have few keys to choose from, and with them. Dotted: the "
        "share if every query attended to all of its keys alike. Entropy: mean over the same queries. Logits: as the "
        "softmax takes them, the largest of all blocks."
    )
    b.curves(section, "attention", "Attention on the first token", caption, panels)
    tags = {title: ATTENTION[title] for title in ("share of the first token", "attention entropy (nats)")}
    caption = "Means over queries and heads. Dotted: as above."
    floors = {"share of the first token": FLOOR}
    b.by_layer(section, "attention-by-layer", "Attention by layer", caption, tags, floors=floors)
    return section


def _activations(b: Builder) -> Section:
    section = Section("activations", "Massive activations")
    caption = (
        "Largest absolute value in the residual stream behind a block, and the same over the median absolute value; "
        "means over blocks."
    )
    panels = [b.panel(title, tag, is_log=True) for title, tag in ACTIVATIONS.items()]
    b.curves(section, "activations", "Largest activations", caption, panels)
    title, caption = "Largest activations by layer", "Behind each block."
    b.by_layer(section, "activations-by-layer", title, caption, ACTIVATIONS, log=list(ACTIVATIONS))
    return section


def _experts(b: Builder) -> Section:
    section = Section("experts", "Experts")
    caption = (
        "Load: tokens that an expert gets from the whole batch of a step. Dropped: of the tokens' choices of experts. "
        "Means over blocks."
    )
    losses = {"load-balancing loss": "load_balancing_loss", "router z-loss": "z_loss"}
    panels = [b.panel(title, tag) for title, tag in (EXPERTS | losses).items()]
    b.curves(section, "experts", "Load of the experts", caption, panels)
    title = "Load of the experts by layer"
    b.by_layer(section, "experts-by-layer", title, "A dense block has no point.", EXPERTS)
    caption = "Each row of an image is a block, whose experts have a mean of 1; its bins add up to 1."
    title, x_label = "Histogram of loads by layer", "tokens of an expert over the block's mean"
    b.histograms(section, "experts-histogram", title, caption, x_label, "experts/tokens", is_relative=True)
    return section


def _throughput(b: Builder) -> Section:
    section = Section("throughput", "Throughput")
    panels = [
        b.panel("tokens/s", tokens_per_second),
        b.panel("model TFLOP/s per device", _tflops),
        b.panel("model FLOPs utilization", "throughput/mfu"),
        b.panel("seconds per iteration", "iteration-time"),
        b.panel("largest memory of a rank (GiB)", "memory/max-allocated"),
    ]
    caption = (
        "Tokens/s of all devices together; where it is not logged, tokens of a batch over the time of an iteration. "
        "FLOPs are those of the model, with only the experts that a token uses, and without recomputation."
    )
    b.curves(section, "throughput", "Throughput and memory", caption, panels)
    split = {}
    for run in b.runs:
        parts = {part: run.scalars[f"time/{part}"] for part in TIME_PARTS if f"time/{part}" in run.scalars}
        if parts:
            split[run.name] = {part: float(np.median(series.values)) for part, series in parts.items()}
    title = "Where the time of a step goes"
    if split:
        figure = figures.stacked_shares(split, "seconds per step")
        rows = [[name, *(number(parts.get(part)) for part in TIME_PARTS)] for name, parts in split.items()]
        numbers = Table("Seconds per step", ["run", *TIME_PARTS], rows)
        caption = (
            "Means over ranks, medians over the logged steps. Communication: between pipeline stages, of gradients and "
            "of parameters, where it does not overlap; other communication is part of forward and backward."
        )
        b.add(section, "time", title, caption, figure, split, numbers)
    else:
        section.missing.append(title)
    return section


def _tflops(run: Run) -> Series | None:
    """Return megagate's number, or else Megatron's, of the same formula."""
    return run.scalars.get("throughput/tflops-per-device", run.scalars.get("throughput"))
