"""A longer context than a model was trained with: another base of the rotary embedding, and YaRN, without training.

The flags are those of training, where they have the same meaning (--position-embedding-type yarn there). Whatever
computes with a checkpoint takes them, and an export writes them into config.json.
"""

import argparse
from dataclasses import dataclass, fields

from megagate.errors import UserError

HINT = "extend it with --rotary-scaling-factor (YaRN), or with --rotary-base and --max-position-embeddings"
"""How to have more positions."""


@dataclass(frozen=True)
class Extension:
    """What is changed about a model's positions; by default nothing."""

    rotary_base: int | None = None
    rotary_scaling_factor: float | None = None
    """By which factor YaRN makes the context longer (arXiv 2309.00071)."""
    yarn_original_max_position_embeddings: int | None = None
    """The positions that the factor starts from; those of the model if None."""
    mscale: float | None = None
    """Of the attention scaling, 0.1 mscale ln(factor) + 1; 1 if None."""
    max_position_embeddings: int | None = None
    """If None, with a factor that times the original ones, else those of the model."""

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Extension":
        """Return what the flags say."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    def apply(self, args: argparse.Namespace) -> None:
        """Change a model's arguments.

        Raises:
            UserError: the model cannot be extended so.
        """
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if not given:
            return
        kind, factor = args.position_embedding_type, self.rotary_scaling_factor
        for name in given:
            if getattr(self, name) <= 0:
                raise UserError(f"--{name.replace('_', '-')} must be positive, not {getattr(self, name)}")
        if kind not in ("rope", "yarn"):
            raise UserError(
                f"--{given[0].replace('_', '-')} changes the rotary embedding, but the model has "
                f"--position-embedding-type {kind}: leave it out"
            )
        if factor is None and (unused := {"yarn_original_max_position_embeddings", "mscale"} & set(given)):
            raise UserError(f"--{min(unused).replace('_', '-')} has no effect without --rotary-scaling-factor: add it")
        if self.rotary_base is not None:
            args.rotary_base = self.rotary_base
        if factor is not None:
            if factor <= 1:
                raise UserError(f"--rotary-scaling-factor {factor} makes no context longer: give more than 1")
            original = self.yarn_original_max_position_embeddings or (
                args.yarn_original_max_position_embeddings if kind == "yarn" else args.max_position_embeddings
            )
            args.position_embedding_type = "yarn"
            args.rotary_scaling_factor, args.mscale = factor, self.mscale or 1.0
            args.yarn_original_max_position_embeddings = original
            args.max_position_embeddings = int(factor * original)
            check_yarn(args)
        if self.max_position_embeddings is not None:
            args.max_position_embeddings = self.max_position_embeddings


def check_yarn(args: argparse.Namespace) -> None:
    """Raise UserError for what --position-embedding-type yarn would ignore."""
    if args.rotary_seq_len_interpolation_factor is not None:
        raise UserError(
            f"YaRN and --rotary-seq-len-interpolation-factor {args.rotary_seq_len_interpolation_factor} both scale the "
            "positions: use one of them"
        )


def add_extension_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an extension, with Megatron's names."""
    add = parser.add_argument_group("a longer context than in training").add_argument
    add(
        "--max-position-embeddings", type=int, metavar="N", help="tokens of the context (the model's, times the factor)"
    )
    add("--rotary-base", type=int, metavar="N", help="of the rotary embedding (the model's)")
    add("--rotary-scaling-factor", type=float, metavar="S", help="YaRN: how many times longer the context is")
    add("--yarn-original-max-position-embeddings", type=int, metavar="N", help="YaRN: times longer than (the model's)")
    add("--mscale", type=float, metavar="M", help="YaRN: attention is scaled by 0.1 M ln(S) + 1 (1)")
