"""Over which ranks an evaluation is divided: torchrun's, with the flags of training.

Without torchrun it is one process. With it and no flag, every rank holds the whole model and computes its share of the
windows (data parallel); the other sizes divide the model as in training, whatever layout the checkpoint is from.

Where tokens are decoded one by one, tensor and expert parallel ranks divide the model, and all of them decode the same
prompts, in step: each has the logits of the whole vocabulary, and so chooses the same tokens.
"""

import argparse
import dataclasses
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagate.errors import UserError
from megagate.model.pattern import BOUNDARY, stage_sizes

SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}
"""Fields of `Layout` -> Megatron's arguments."""


@dataclass(frozen=True)
class Layout:
    """The ranks and how the model is divided over them; one process by default."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    decodes: bool = False
    """Whether tokens are computed one by one."""

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Layout":
        """Return the layout of the flags on the ranks that torchrun has started."""
        return cls(**{field: getattr(options, name) for field, name in SIZES.items()} | _ranks())

    @classmethod
    def to_decode(cls, options: argparse.Namespace) -> "Layout":
        """Return the layout of the flags of `DECODING`, on the ranks that torchrun has started.

        Raises:
            UserError: there are more or fewer ranks than the flags divide the model over.
        """
        sizes = {field: getattr(options, SIZES[field]) for field in DECODING}
        layout = dataclasses.replace(cls(**sizes | _ranks()), decodes=True)
        needed = math.lcm(layout.tensor, layout.expert)
        if layout.world_size != needed:
            raise UserError(
                f"--tensor-model-parallel-size {layout.tensor} and --expert-model-parallel-size {layout.expert} divide "
                f"the model over {needed} processes, but there are {layout.world_size}: start as many by torchrun, or "
                "change the sizes"
            )
        return layout

    def apply(self, args: argparse.Namespace) -> None:
        """Change the arguments of one process to those of this layout.

        Raises:
            UserError: the model or the number of processes does not fit.
        """
        if self.world_size == 1 and (self.tensor, self.pipeline, self.context, self.expert) == (1, 1, 1, 1):
            return
        if args.padded_vocab_size % self.tensor:
            raise UserError(
                f"the {args.padded_vocab_size} rows of the model's vocabulary do not divide over "
                f"--tensor-model-parallel-size {self.tensor}: choose a size that divides them"
            )
        from megagate.pretrain.layout import check_layout

        values: dict[str, Any] = {name: getattr(self, field) for field, name in SIZES.items()}
        values |= {name: getattr(self, name) for name in RANKS}
        values["transformer_pipeline_model_parallel_size"] = self.pipeline
        values["tensor_parallel_num_weight_shards"] = self.tensor
        # Experts want it, but a single token cannot be divided; only in training do they insist.
        values["sequence_parallel"] = self.tensor > 1 and not self.decodes
        values["skip_train"] = True
        for name, value in values.items():
            setattr(args, name, value)
        if self.pipeline > 1:
            args.hybrid_layer_pattern = divided(args.hybrid_layer_pattern, self.pipeline)
        args.seq_length = -(-args.seq_length // self.multiple) * self.multiple  # windows are padded, if need be
        args.global_batch_size = None
        check_layout(args)
        model = self.tensor * self.pipeline * self.context
        args.data_parallel_size = args.global_batch_size = self.world_size // model

    @property
    def multiple(self) -> int:
        """Of what the length of a sequence must be a multiple."""
        return self.tensor * self.context * (2 if self.context > 1 else 1)


DECODING = ("tensor", "expert")
"""Fields of `Layout` that divide a model whose tokens are computed one by one."""

RANKS = {"rank": 0, "local_rank": 0, "world_size": 1}
"""Fields of `Layout` that torchrun's environment gives, in capitals, and their values without it."""


def divided(pattern: str, stages: int) -> str:
    """Return a layer pattern with boundaries between pipeline stages of equally many blocks.

    Raises:
        UserError: the blocks do not divide evenly.
    """
    blocks = re.findall(r"[*G][-E]?|[-E]", pattern)
    parts, start = [], 0
    for size in stage_sizes(len(blocks), stages):
        parts.append("".join(blocks[start : start + size]))
        start += size
    return BOUNDARY.join(parts)


def _ranks() -> dict[str, int]:
    return {name: int(os.environ.get(name.upper(), default)) for name, default in RANKS.items()}


def of_first_rank(tokens: Tensor) -> Tensor:
    """Return the tokens [b] that the first rank has chosen, on all that decode in step.

    Theirs are the same, but for a choice that rounding decides; it would set them apart for good.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast(tokens, src=0)
    return tokens


def add_layout_arguments(parser: argparse.ArgumentParser, fields: Sequence[str] = tuple(SIZES)) -> None:
    """Add the flags of training that divide a model over ranks."""
    for name in (SIZES[field] for field in fields):
        what = name.replace("_parallel_size", "").replace("_model", "")
        help_text = f"{what} parallel size of this evaluation, under torchrun (1)"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=1, metavar="N", help=help_text)


def refuse_ranks(what: str) -> None:
    """Raise UserError where torchrun has started more than one process of something that one computes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"{what} runs on one process: start it with python, not torchrun")
