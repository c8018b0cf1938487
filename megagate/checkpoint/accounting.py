"""Whether each tensor of both sides of a conversion is in exactly one rule, with the shape that it has in the file.

All of this is known before a single weight is read: the rules' functions are run on tensors without memory.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from megagate.checkpoint.families.base import Rule, Weight, same
from megagate.checkpoint.huggingface import StoredTensor
from megagate.errors import UserError

Side = Literal["hf", "megatron"]
Shapes = dict[str, tuple[int, ...]]


def wanted(rules: Iterable[Rule], side: Side) -> Shapes:
    """Return the shapes of the whole tensors that the rules speak of on one side, stacked ones with their first axis.

    Raises:
        ValueError: a tensor or a slice is in two rules, or slices are missing or of different shapes.
    """
    whole: Shapes = {}
    slices: dict[str, dict[int, tuple[int, ...]]] = {}
    for rule in rules:
        for weight in getattr(rule, side):
            taken: Any = slices.setdefault(weight.name, {}) if weight.index is not None else whole
            key = weight.name if weight.index is None else weight.index
            if key in taken or weight.name in (slices if weight.index is None else whole):
                raise ValueError(f"{weight} is in two rules")
            taken[key] = weight.shape
    for name, shapes in slices.items():
        if set(shapes) != set(range(len(shapes))) or len(set(shapes.values())) != 1:
            raise ValueError(f"the slices of {name} are not numbered from 0, or differ in shape")
        whole[name] = (len(shapes), *shapes[0])
    return whole


def check_all_used(shapes: Shapes, present: Mapping[str, StoredTensor], where: str, mend: str) -> None:
    """Check that the tensors which are present are those that the rules want.

    Args:
        shapes: from `wanted`.
        present: what there is.
        where: names the place in messages.
        mend: what to do about a tensor that no rule wants.

    Raises:
        UserError: names the tensors that are missing, left over, or of another shape or an unknown dtype.
    """
    if missing := [name for name in shapes if name not in present]:
        raise UserError(f"{where} lacks {_some(missing)}")
    if left := [name for name in present if name not in shapes]:
        raise UserError(f"{where} has {_some(left)}, which the model does not: {mend}")
    for name, shape in shapes.items():
        if present[name].shape != shape:
            raise UserError(
                f"{where} has {name} with the shape {list(present[name].shape)}, but the model's is {list(shape)}"
            )
        if present[name].dtype is None:
            raise UserError(f"{where} has {name} in a data type other than fp32, bf16 and fp16: convert it first")


def _some(names: Sequence[str]) -> str:
    """Name a few of them."""
    listed = ", ".join(names[:3])
    return f"{listed} and {len(names) - 3} more" if len(names) > 3 else listed


def converted(
    rules: Iterable[Rule], source: Side, present: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredTensor]:
    """Return what the rules make of the tensors that are present, with the shapes and dtypes of whole tensors.

    Raises:
        UserError: tensors that become one have different dtypes.
        ValueError: a function returns something else than its rule says.
    """
    target: Side = "megatron" if source == "hf" else "hf"
    result: dict[str, StoredTensor] = {}
    for rule in rules:
        function = rule.to_megatron if source == "hf" else rule.to_hf
        given: tuple[Weight, ...] = getattr(rule, source)
        made: tuple[Weight, ...] = getattr(rule, target)
        dtypes = {present[weight.name].dtype for weight in given}
        if len(dtypes) > 1 and function is not same:
            kinds = ", ".join(f"{weight.name} {present[weight.name].dtype}" for weight in given)
            raise UserError(f"{where} has tensors in different data types that belong together: {kinds}")
        tensors = [torch.empty(weight.shape, dtype=present[weight.name].dtype, device="meta") for weight in given]
        outputs = function(tensors)
        shapes = [tuple(tensor.shape) for tensor in outputs]
        if shapes != [weight.shape for weight in made]:
            raise ValueError(f"the rule of {made} returns {shapes}")
        for weight, tensor in zip(made, outputs, strict=True):
            stacked = weight.index is not None
            shape = (1 + weight.index, *weight.shape) if stacked else weight.shape  # type: ignore[operator]
            known = result.get(weight.name)
            if known is not None and known.dtype != tensor.dtype:
                raise UserError(f"{where} has slices of {weight.name} in different data types")
            if known is None or math.prod(shape) > math.prod(known.shape):
                result[weight.name] = StoredTensor(shape, tensor.dtype)
    return result
