"""Tiny random models of transformers, converted by a family's rules and run in megagate's real model.

The weights go through disk as transformers writes them, and from there through a checkpoint of Megatron's to each
layout. Every weight is random, norms, biases, gates and routers too, since zeros and ones hide errors.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megagate.checkpoint.families.base import Family, Rule, Weight
from tests.distributed import run_distributed
from tests.model.training import GLOBAL_BATCH, SEQUENCE, VOCABULARY, Case, build, pieces, sharded_state

Tensors = dict[str, Tensor]


class PlainCase(Case):
    """A case without what the flags of all cases cannot unset."""

    @property
    def argv(self) -> list[str]:
        """The command line."""
        return [flag for flag in super().argv if flag != "--qk-layernorm" or "--qk-layernorm" in self.flags]


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Draw every parameter and buffer that is saved; returns the model in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in sorted(model.state_dict().items()):
        drawn = torch.randn(value.shape, generator=generator) * 0.2
        value.copy_(drawn + 1 if name.endswith("norm.weight") else drawn)
    return model.eval()


def saved(model: Any, directory: Path) -> tuple[dict[str, Any], Tensors]:
    """Save a model as transformers does, and return its config.json and its tensors as they are on disk."""
    if not hasattr(model, "save_pretrained"):
        return model.config, model.on_disk()
    model.save_pretrained(directory)
    return json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")


def flags_of(arguments: Mapping[str, Any]) -> list[str]:
    """Return command-line tokens for arguments in a recipe's form."""
    from megagate.pretrain.arguments import build_parser
    from megagate.recipe import recipe_tokens

    parser, _ = build_parser()
    return recipe_tokens({name.replace("_", "-"): value for name, value in arguments.items()}, parser, "arguments")


def parsed(flags: str) -> argparse.Namespace:
    """Return the arguments as a checkpoint would have them; in a rank."""
    from megatron.training import get_args

    build(PlainCase(flags=flags, initial=True))
    return argparse.Namespace(**vars(get_args()))


def take(tensors: Mapping[str, Tensor], weight: Weight) -> Tensor:
    """Return a weight's tensor, whose shape must be as the rule says."""
    tensor = tensors[weight.name] if weight.index is None else tensors[weight.name][weight.index]
    assert tuple(tensor.shape) == weight.shape, (weight, tuple(tensor.shape))
    return tensor


def apply(rules: list[Rule], tensors: Mapping[str, Tensor], to_hf: bool = False) -> Tensors:
    """Convert all tensors, each of which must be used exactly once and be left as it is."""
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    used: list[tuple[str, int | None]] = []
    result: Tensors = {}
    slices: dict[str, dict[int, Tensor]] = {}
    for rule in rules:
        sources, targets = (rule.megatron, rule.hf) if to_hf else (rule.hf, rule.megatron)
        used += [(source.name, source.index) for source in sources]
        function = rule.to_hf if to_hf else rule.to_megatron
        outputs = function([take(tensors, source) for source in sources])
        for target, output in zip(targets, outputs, strict=True):
            assert tuple(output.shape) == target.shape, (target, tuple(output.shape))
            if target.index is None:
                assert target.name not in result, f"{target.name} is made twice"
                result[target.name] = output
            else:
                assert target.index not in slices.setdefault(target.name, {}), f"{target} is made twice"
                slices[target.name][target.index] = output
    for name, parts in slices.items():
        result[name] = torch.stack([parts[index] for index in range(len(parts))])
    indices = {name: len(tensors[name]) for name, index in used if index is not None}
    expected = [(name, index) for name in tensors for index in (range(indices[name]) if name in indices else [None])]
    assert sorted(used, key=str) == sorted(expected, key=str), "each tensor is used exactly once"
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors.items()), "arguments are not changed"
    return result


@dataclass(frozen=True)
class Converted:
    """A model on both sides."""

    family: Family
    config: dict[str, Any]
    tensors: Tensors
    """As on disk."""
    flags: str
    args: argparse.Namespace
    rules: list[Rule]
    weights: Tensors
    """By their keys in Megatron's checkpoint."""


def convert(family: Family, config: dict[str, Any], tensors: Tensors) -> Converted:
    """Convert a model to Megatron's weights, in this process."""
    assert family.recognises(config)
    flags = " ".join([*flags_of(family.arguments(config)), "--micro-batch-size 2"])
    args = run_distributed(parsed, 1, flags)[0]
    rules = list(family.rules(args, config, tensors.keys()))
    return Converted(family, config, tensors, flags, args, rules, apply(rules, tensors))


# ---------------------------------------------------------------------------------------------------------------------
# In the ranks


def load_and_save(flags: str, weights: Tensors, directory: str) -> None:
    """Put the weights into the model on one process, and save it as a checkpoint that any layout loads."""
    from megatron.core import dist_checkpointing

    model, _, _ = build(PlainCase(flags=flags, initial=True))
    chunk = model[0].module
    for parameter in chunk.parameters():
        parameter.data.fill_(torch.nan)
    found = set()
    for piece in pieces(chunk, buffers=True):
        assert piece.global_shape == tuple(weights[piece.key].shape), piece.key
        piece.value.data.copy_(weights[piece.key][piece.place])
        found.add(piece.key)
    assert found == weights.keys(), found ^ weights.keys()
    assert not any(parameter.isnan().any() for parameter in chunk.parameters())
    dist_checkpointing.save({"model0": sharded_state(chunk)}, directory)


def logits_in_rank(case: Case) -> Tensor | None:
    """Return the logits [b, s, v] of `tokens()` on the last pipeline stage, None on the others."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    model, _, _ = build(case)
    model[0].eval()
    positions = torch.arange(SEQUENCE).expand(GLOBAL_BATCH, -1)

    def step(_: Any, chunk: Any) -> Any:
        return chunk(tokens(), positions, None), lambda output, non_loss_data: output

    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=model[0],
            num_microbatches=1,
            seq_length=SEQUENCE,
            micro_batch_size=GLOBAL_BATCH,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not parallel_state.is_pipeline_last_stage():
        return None
    return gather_from_tensor_model_parallel_region(outputs[0])[..., :VOCABULARY]


def tokens(step: int = 0) -> Tensor:
    """Return the tokens [b, s] of a step, as `tests.model.training` draws them."""
    return batch(step)[:, :-1]


def batch(step: int = 0) -> Tensor:
    """Return the tokens of a step and the labels: [b, s + 1]."""
    return torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(3000 + step))


# ---------------------------------------------------------------------------------------------------------------------
# In the process that asks


def error_of(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of logits, over their scale."""
    return float((actual - expected).abs().max() / expected.abs().max())


def logits_of(flags: str, checkpoint: Path, ranks: int = 1) -> Tensor:
    """Return the logits of a checkpoint on a layout; all ranks of the last stage must agree."""
    outputs = run_distributed(logits_in_rank, ranks, PlainCase(flags=flags, load=str(checkpoint)))
    found = [output for output in outputs if output is not None]
    assert all(torch.equal(found[0], other) for other in found[1:])
    return found[0]
