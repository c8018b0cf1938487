"""What a family of models is to a conversion: which weights on the two sides hold the same numbers, and in which order.

A family is pure: it reads a config.json or Megatron's arguments and returns names, shapes and functions on tensors. Who
reads and writes files, checks that each tensor is used exactly once and streams them one after another is
`megagate.checkpoint.convert`.
"""

import argparse
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Weight:
    """A tensor of a checkpoint, or one expert's slice of a stacked one."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor on all ranks, or of the slice where there is an index."""
    index: int | None = None
    """Which slice along the first axis, where `name` is a tensor [experts, *shape]."""


def same(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors as they are: both sides store the same."""
    return tensors


@dataclass(frozen=True)
class Rule:
    """Weights of both sides that hold the same numbers, as few as can be converted on their own.

    The functions neither change their arguments nor the dtype, and are inverse to each other bit for bit.
    """

    hf: tuple[Weight, ...]
    megatron: tuple[Weight, ...]
    to_megatron: Callable[[Sequence[Tensor]], Sequence[Tensor]] = same
    """From the tensors of `hf`, in its order, to those of `megatron`."""
    to_hf: Callable[[Sequence[Tensor]], Sequence[Tensor]] = same
    """The way back."""


class Family(Protocol):
    """A kind of Hugging Face model and its counterpart in Megatron."""

    @property
    def name(self) -> str:
        """As `--family` has it."""
        ...

    @property
    def dropped(self) -> Mapping[str, str]:
        """Beginnings of names of tensors that are left out on import -> what they are and why."""
        ...

    def recognises(self, config: dict[str, Any]) -> bool:
        """Whether a config.json is of this family."""
        ...

    def arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return Megatron's and megagate's arguments for the model (flag -> value), as a recipe has them.

        The flags have underscores; one without a value has true or false.

        `num_layers` counts blocks. Only what describes the model; the vocabulary is given by `vocab_size` and
        `make_vocab_size_divisible_by`.

        Raises:
            UserError: the model has something that cannot be represented; says what.
        """
        ...

    def config(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the config.json of the model that `args` (complete, as in a checkpoint) describe.

        Raises:
            UserError: this family cannot hold the model exactly; says why.
        """
        ...

    def rules(self, args: argparse.Namespace, config: dict[str, Any], names: Collection[str] = ()) -> Iterator[Rule]:
        """Yield the rules of all weights, in the order of the layers; every weight of both sides is in exactly one.

        `names` are those of the tensors on disk on import: some models are stored in more than one way. It is empty on
        export.

        Vocabulary padding is not here: the rule of an embedding has `tokenizer_vocab_size` rows on both sides, and the
        driver adds and removes what Megatron pads.
        """
        ...
