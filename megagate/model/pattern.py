"""From transformer blocks, as users count them, to Megatron's hybrid layer pattern.

A block is an attention layer and a feed-forward layer. HybridModel counts these as two and names them by symbols:
`*` attention, `G` Gated DeltaNet, `E` experts, `-` dense MLP, `|` pipeline boundary. Users give `--num-layers` blocks
and, with Megatron's own `--moe-layer-freq` and `--linear-attention-freq`, say which of them have experts and which
have linear attention; this module writes the pattern.
"""

import argparse
import copy
from collections.abc import Sequence

from megagate.errors import UserError

ATTENTION, DELTA_NET, EXPERTS, DENSE, BOUNDARY = "*", "G", "E", "-", "|"
KNOWN_SYMBOLS = frozenset((ATTENTION, DELTA_NET, EXPERTS, DENSE, BOUNDARY))
PATTERN_FLAG = "--hybrid-layer-pattern"
HYBRID, GPT = "hybrid", "gpt"
"""Megatron's models, as `--model-impl` names them."""


def expert_blocks(num_blocks: int, moe_layer_freq: int | Sequence[int], num_experts: int | None) -> list[bool]:
    """Return for each block whether its feed-forward layer has experts.

    Args:
        num_blocks: blocks of the whole model.
        moe_layer_freq: as Megatron's flag: an integer n puts experts into the blocks 0, n, 2n, ...; a list has one
            0 or 1 per block.
        num_experts: None or 0 for a dense model.

    Raises:
        UserError: the list has another length than the model.
    """
    if not num_experts:
        return [False] * num_blocks
    if isinstance(moe_layer_freq, int):
        return [block % moe_layer_freq == 0 for block in range(num_blocks)]
    return _each_block("--moe-layer-freq", moe_layer_freq, num_blocks)


def linear_attention_blocks(num_blocks: int, linear_attention_freq: int | Sequence[int] | None) -> list[bool]:
    """Return for each block whether its attention is linear, that is, Gated DeltaNet.

    Args:
        num_blocks: blocks of the whole model.
        linear_attention_freq: as Megatron's flag: an integer n puts softmax attention into the blocks n-1, 2n-1, ...
            and linear attention into the others; a list has one 0 or 1 per block. None for softmax attention only.

    Raises:
        UserError: the list has another length than the model.
    """
    if linear_attention_freq is None:
        return [False] * num_blocks
    if isinstance(linear_attention_freq, int):
        return [(block + 1) % linear_attention_freq != 0 for block in range(num_blocks)]
    return _each_block("--linear-attention-freq", linear_attention_freq, num_blocks)


def _each_block(flag: str, values: Sequence[int], num_blocks: int) -> list[bool]:
    if len(values) != num_blocks:
        raise UserError(
            f"{flag} describes {len(values)} blocks, but --num-layers is {num_blocks}: give one 0 or 1 for each block"
        )
    return [bool(value) for value in values]


def stage_sizes(num_blocks: int, num_stages: int, first: int | None = None, last: int | None = None) -> list[int]:
    """Divide the blocks over the pipeline stages, virtual ones included, in order.

    Args:
        num_blocks: blocks of the whole model.
        num_stages: pipeline stages, physical times virtual.
        first: blocks of the first stage, or None for an equal share.
        last: blocks of the last stage, or None for an equal share.

    Raises:
        UserError: the blocks do not divide evenly.
    """
    remaining = num_blocks - (first or 0) - (last or 0)
    equal_stages = num_stages - (first is not None) - (last is not None)
    if remaining < 0 or (equal_stages and remaining % equal_stages) or (not equal_stages and remaining):
        described = f"{num_blocks} blocks (--num-layers)"
        if first is not None or last is not None:
            described += f", of which {first or 0} are in the first and {last or 0} in the last stage,"
        raise UserError(
            f"{described} do not divide evenly over {num_stages} pipeline stages: change the layers, "
            f"the pipeline size, or --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
        )
    sizes = [remaining // equal_stages] * equal_stages if equal_stages else []
    if first is not None:
        sizes.insert(0, first)
    if last is not None:
        sizes.append(last)
    return sizes


def derive_pattern(has_experts: Sequence[bool], is_linear: Sequence[bool], sizes: Sequence[int]) -> str:
    """Write the hybrid layer pattern, for example `*-*E|GE*E`.

    Args:
        has_experts: one entry per block, from `expert_blocks`.
        is_linear: one entry per block, from `linear_attention_blocks`.
        sizes: blocks per stage, from `stage_sizes`.
    """
    blocks = [
        (DELTA_NET if linear else ATTENTION) + (EXPERTS if experts else DENSE)
        for experts, linear in zip(has_experts, is_linear, strict=True)
    ]
    stages, start = [], 0
    for size in sizes:
        stages.append("".join(blocks[start : start + size]))
        start += size
    return BOUNDARY.join(stages)


def is_gpt(args: argparse.Namespace) -> bool:
    """Whether the model of a run, or of a checkpoint's run, is a GPTModel, whose layers are whole blocks."""
    return getattr(args, "model_impl", HYBRID) == GPT


def layer_pattern(args: argparse.Namespace) -> str:
    """Return the pattern of a run's model, with its stages, also where the model is a GPTModel."""
    pattern: str = args.gpt_layer_pattern if is_gpt(args) else args.hybrid_layer_pattern
    return pattern


def as_hybrid(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments of the hybrid model that computes the same as the run's GPTModel."""
    if not is_gpt(args):
        return args
    hybrid = copy.copy(args)
    hybrid.model_impl = HYBRID
    restate_in_layers(hybrid, args.gpt_layer_pattern)
    return hybrid


def restate_in_layers(args: argparse.Namespace, pattern: str) -> None:
    """Say in hybrid layers what arguments say in blocks.

    Args:
        args: changed: `num_layers` and what is set for each of them; what says how pipeline stages divide the blocks
            is unset, since the pattern's boundaries say it.
        pattern: of the blocks.
    """
    blocks = args.num_layers
    args.hybrid_layer_pattern = pattern
    args.num_layers = len(pattern.replace(BOUNDARY, ""))
    args.moe_layer_freq = 1
    args.num_layers_per_virtual_pipeline_stage = args.num_virtual_stages_per_pipeline_rank = None
    args.decoder_first_pipeline_num_layers = args.decoder_last_pipeline_num_layers = None
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        setattr(args, name, 2 * getattr(args, name))
    # Megatron reads both lists by hybrid layer: an attention layer has its block's value, and so has its FFN layer.
    for name, last_of_period in (("window_attn_skip_freq", 0), ("no_rope_freq", 1)):
        setting = getattr(args, name)
        if isinstance(setting, int):
            setting = [last_of_period if (block + 1) % setting == 0 else 1 - last_of_period for block in range(blocks)]
        if setting:
            setattr(args, name, [value for value in setting for _ in range(2)])


def block_of_each_layer(layers: str) -> list[int]:
    """Return the transformer block, from 1, that each layer belongs to.

    A block is an attention layer with the feed-forward layer after it; in a pattern that the user wrote, a layer
    without its other half is a block of its own.

    Args:
        layers: a pattern without boundaries.
    """
    blocks: list[int] = []
    open_block = False  # whether the last block waits for its feed-forward layer
    for layer in layers:
        feed_forward = layer in (EXPERTS, DENSE)
        joins = feed_forward and open_block
        blocks.append((blocks[-1] if blocks else 0) + (not joins))
        open_block = not feed_forward
    return blocks


def check_pattern(pattern: str, num_experts: int | None) -> None:
    """Check a pattern that the user wrote.

    Raises:
        UserError: a symbol has no layer here, or experts and `--num-experts` disagree.
    """
    unknown = sorted(set(pattern) - KNOWN_SYMBOLS)
    if unknown:
        raise UserError(
            f"{PATTERN_FLAG} {pattern!r} has {', '.join(map(repr, unknown))}, for which there is no layer yet: use "
            "* (attention), G (Gated DeltaNet), E (experts), - (dense MLP) and | (pipeline boundary)"
        )
    if EXPERTS in pattern and not num_experts:
        raise UserError(f"{PATTERN_FLAG} {pattern!r} has expert layers (E), but --num-experts is not given")
    if num_experts and EXPERTS not in pattern:
        raise UserError(f"--num-experts is {num_experts}, but {PATTERN_FLAG} {pattern!r} has no expert layer (E)")
