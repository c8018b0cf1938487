"""What the observers find in one training step of a tiny model, and the same computed plainly from the whole model."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.model.training import SEQUENCE, Case, build, micro_batches

Scalars = dict[str, float]


@dataclasses.dataclass
class Observed:
    """What a rank knows after a step."""

    scalars: Scalars
    histograms: dict[str, tuple[list[float], list[float]]]
    """Limits and counts."""
    loss: float | None
    """None where the last stage is elsewhere."""


def observe_all(cases: list[Case], rows: int) -> list[Observed]:
    """Take a step of each case with all observers."""
    return [observe(case, rows) for case in cases]


def observe(case: Case, rows: int | None) -> Observed:
    """Take the first step of a case; with `rows` None nothing is observed."""
    from megatron.training import get_args

    from megagate.telemetry.telemetry import Telemetry

    with prepared(case) as (model, step):
        if rows is None:
            return Observed({}, {}, step())
        telemetry = Telemetry(get_args(), model, rows)
        with telemetry.observing():
            loss = step()
        found = telemetry.findings()
        left = [module for chunk in model for module in chunk.modules() if {"gated", "routing"} & vars(module).keys()]
        assert not left, "an observer is still there"
    histograms = {tag: (value.limits, value.counts) for tag, value in found.histograms.items()}
    return Observed(found.scalars, histograms, loss)


@contextlib.contextmanager
def prepared(case: Case) -> Iterator[tuple[list[Any], Any]]:
    """Build a case; the value is the model's chunks and a function that takes the first step and returns its loss."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training import training

    from megagate.pretrain.batch import forward_step

    model, optimizer, scheduler = build(case)
    config = model[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads

    def step() -> float | None:
        iterators = [micro_batches(0, case.mask_loss, get_num_microbatches()) for _ in model]
        data = iterators if len(model) > 1 else iterators[0]
        function = get_forward_backward_func()
        outcome = training.train_step(forward_step, data, model, optimizer, scheduler, config, function)
        return float(outcome[0]["lm loss"]) if outcome[0] else None

    yield model, step


def recompute(case: Case) -> Scalars:
    """Return the scalars over every row, from what one process computes, in float64 and without the observers' code.

    Attention from queries and keys, all rows at once; scores from the rows of linear_qkv; experts from the router's
    weight and its input.
    """
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.moe.router import TopKRouter

    from megagate.gate.config import GatePosition
    from megagate.gate.functional import gate_scores

    seen: dict[tuple[str, int], list[Any]] = {}

    def keep(kind: str, block: int, values: Any) -> None:
        seen.setdefault((kind, block), []).append(values)

    with prepared(case) as (model, step):
        stack = model[0].module.decoder
        for index, layer in enumerate(stack.layers):
            block = index // 2 + 1
            for module in layer.modules():
                if isinstance(module, SelfAttention):
                    module.linear_qkv.register_forward_hook(
                        lambda _, __, output, block=block: keep("mixed", block, output[0].detach().double())
                    )
                    module.core_attention.register_forward_hook(
                        lambda _, __, output, block=block: keep("context", block, output.detach().double())
                    )
                    module.core_attention.register_forward_pre_hook(
                        lambda _, inputs, block=block: keep(
                            "qk", block, [part.detach().double() for part in inputs[:2]]
                        )
                    )
                if isinstance(module, TopKRouter):
                    module.register_forward_pre_hook(
                        lambda module, inputs, block=block: keep(
                            "routed", block, inputs[0].detach().double() @ module.weight.detach().double().T
                        )
                    )
            if index % 2:
                layer.register_forward_hook(
                    lambda _, __, output, block=block: keep(
                        "hidden", block, (output[0] if isinstance(output, tuple) else output).detach().double()
                    )
                )
        attentions = [module for module in model[0].modules() if isinstance(module, SelfAttention)]
        step()
    by_block: dict[str, dict[int, float]] = {}
    by_head: Scalars = {}

    def found(tag: str, block: int, value: Any) -> None:
        by_block.setdefault(tag, {})[block] = float(value)

    for (kind, block), values in seen.items():
        match kind:
            case "mixed":
                attention: Any = attentions[block - 1]
                if getattr(attention, "gate", None) is None or not attention.gate.is_fused:
                    continue
                parts = [attention.layout.split(mixed) for mixed in values]
                scores = gate_scores(torch.cat([part.gate for part in parts], dim=1).float(), attention.gate).double()
                if attention.gate.position == GatePosition.VALUE:
                    gated = torch.cat([part.value for part in parts], dim=1)
                else:
                    gated = torch.cat(seen["context", block], dim=1).unflatten(-1, (*scores.shape[2:-1], -1))
                found("gate/magnitude-before", block, gated.square().mean().sqrt())
                experts = gated.unflatten(-1, (attention.gate.value_experts, -1))
                after = (experts * scores[..., None]).sum(dim=-2) if experts.shape[-2] > 1 else gated * scores
                found("gate/magnitude-after", block, after.square().mean().sqrt())
                for head, mean in enumerate(scores.mean(dim=(0, 1, -1)).flatten().tolist()):
                    by_head[f"gate/head-mean/layer-{block:02d}/head-{head:02d}"] = mean
                found("gate/mean-score", block, scores.mean())
                found("gate/share-below-0.1", block, (scores.abs() < 0.1).double().mean())
                found("gate/share-below-0.01", block, (scores.abs() < 0.01).double().mean())
            case "qk":
                for tag, value in attention_of(values).items():
                    found(tag, block, value)
            case "hidden":
                hidden = torch.cat(values, dim=1).abs()
                found("activation/max", block, hidden.max())
                found("activation/max-to-median", block, hidden.max() / hidden.median())
            case "routed":
                logits = torch.cat([part.flatten(0, -2) for part in values])
                load = torch.bincount(logits.topk(2).indices.flatten(), minlength=logits.shape[-1]).double()
                found("experts/max-to-mean-load", block, load.max() / load.mean())
                found("experts/dead", block, (load == 0).sum())
                entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
                found("experts/router-entropy", block, entropy)
                found("experts/drop-rate", block, 0)
    scalars = by_head
    for tag, values in by_block.items():
        scalars[tag] = max(values.values()) if tag == "attention/max-logit" else sum(values.values()) / len(values)
        scalars |= {f"{tag}/layer-{block:02d}": value for block, value in values.items()}
    return scalars


def attention_of(micro_batches: list[list[Tensor]]) -> dict[str, Tensor]:
    """Return what is said of attention, from queries [s, b, h, d] and keys [s, b, g, d] of each micro batch."""
    query, key = (torch.cat(parts, dim=1) for parts in zip(*micro_batches, strict=True))
    key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    logits = torch.einsum("sbhd,tbhd->bhst", query, key) * query.shape[-1] ** -0.5
    seen = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    probability = logits.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    entropy = torch.special.entr(probability).sum(dim=-1)
    return {
        "attention/first-token-share": probability[:, :, 1:, 0].mean(),
        "attention/first-token-share-all-rows": probability[..., 0].mean(),
        "attention/first-token-share-uniform": (1 / torch.arange(2, SEQUENCE + 1).double()).mean(),
        "attention/entropy": entropy[:, :, 1:].mean(),
        "attention/max-logit": logits.masked_fill(~seen, -torch.inf).max(),
    }
