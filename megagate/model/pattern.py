"""From transformer blocks, as users count them, to Megatron's hybrid layer pattern.

A block is an attention layer and a feed-forward layer. HybridModel counts these as two and names them by symbols:
`*` attention, `E` experts, `-` dense MLP, `|` pipeline boundary. Users give `--num-layers` blocks and, with Megatron's
own `--moe-layer-freq`, say which of them have experts; this module writes the pattern.
"""

from collections.abc import Sequence

from megagate.errors import UserError

ATTENTION, EXPERTS, DENSE, BOUNDARY = "*", "E", "-", "|"
KNOWN_SYMBOLS = frozenset((ATTENTION, EXPERTS, DENSE, BOUNDARY))
PATTERN_FLAG = "--hybrid-layer-pattern"


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
    if len(moe_layer_freq) != num_blocks:
        raise UserError(
            f"--moe-layer-freq describes {len(moe_layer_freq)} blocks, but --num-layers is {num_blocks}: give one 0 or "
            "1 for each block"
        )
    return [bool(flag) for flag in moe_layer_freq]


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


def derive_pattern(has_experts: Sequence[bool], sizes: Sequence[int]) -> str:
    """Write the hybrid layer pattern, for example `*-*E|*E*E`.

    Args:
        has_experts: one entry per block, from `expert_blocks`.
        sizes: blocks per stage, from `stage_sizes`.
    """
    blocks = [ATTENTION + (EXPERTS if experts else DENSE) for experts in has_experts]
    stages, start = [], 0
    for size in sizes:
        stages.append("".join(blocks[start : start + size]))
        start += size
    return BOUNDARY.join(stages)


def check_pattern(pattern: str, num_experts: int | None) -> None:
    """Check a pattern that the user wrote.

    Raises:
        UserError: a symbol has no layer here, or experts and `--num-experts` disagree.
    """
    unknown = sorted(set(pattern) - KNOWN_SYMBOLS)
    if unknown:
        raise UserError(
            f"{PATTERN_FLAG} {pattern!r} has {', '.join(map(repr, unknown))}, for which there is no layer yet: use "
            "* (attention), E (experts), - (dense MLP) and | (pipeline boundary)"
        )
    if EXPERTS in pattern and not num_experts:
        raise UserError(f"{PATTERN_FLAG} {pattern!r} has expert layers (E), but --num-experts is not given")
    if num_experts and EXPERTS not in pattern:
        raise UserError(f"--num-experts is {num_experts}, but {PATTERN_FLAG} {pattern!r} has no expert layer (E)")
