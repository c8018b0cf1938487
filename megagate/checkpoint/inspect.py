"""What a checkpoint or a Hugging Face directory holds, without building the model; and in what two of them differ.

    python tools/inspect_checkpoint.py DIR [--tensors]
    python tools/inspect_checkpoint.py --diff A B

Only names and shapes are read, unless tensors are asked for; then one after another, stacked ones slice by slice.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megagate.checkpoint.families import recognise
from megagate.checkpoint.huggingface import CONFIG, StoredTensor, WeightReader, read_json
from megagate.checkpoint.load import TRACKER, checkpoint_arguments, missing_piece
from megagate.checkpoint.torch_dist import TensorReader
from megagate.data.tokenizer import quiet
from megagate.errors import UserError
from megagate.evaluate.load import find_checkpoint
from megagate.gate.config import describe, gate_config_from_args

ROUTED_EXPERT = re.compile(r"\.experts\.|\.moe\.(gate|up|down)_proj\.")
EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts")
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "moe_top_k")
"""What architectures call these two in config.json."""

LAYOUT = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert-tensor": "expert_tensor_parallel_size",
    "context": "context_parallel_size",
}


class Reader(Protocol):
    """What both kinds of directories are read with."""

    tensors: dict[str, StoredTensor]

    def read(self, name: str, index: int | None = None) -> Tensor: ...


@dataclass
class Opened:
    """A directory that is looked into."""

    reader: Reader
    facts: dict[str, str] = field(default_factory=dict)
    active_share: float = 1.0
    """Of the routed experts' parameters, how many a token passes through."""


def open_directory(directory: Path, step: int | None = None) -> Opened:
    """Return what is known of a checkpoint, one of its iterations, or a Hugging Face directory.

    Raises:
        UserError: it is neither, or a piece is missing.
    """
    if (directory / "metadata.json").is_file():
        return _open_checkpoint(directory)
    if (directory / TRACKER).is_file() or any(directory.glob("iter_*")):
        return _open_checkpoint(find_checkpoint(directory, step))
    if (directory / CONFIG).is_file():
        return _open_hugging_face(directory)
    raise UserError(f"{directory} has neither {TRACKER} nor {CONFIG}: it is no checkpoint and no Hugging Face model")


def _open_checkpoint(checkpoint: Path) -> Opened:
    if problem := missing_piece(checkpoint):
        raise UserError(problem)
    args = checkpoint_arguments(checkpoint)
    opened = Opened(TensorReader(checkpoint))
    sizes = [f"{kind} {getattr(args, name, 1)}" for kind, name in LAYOUT.items()]
    opened.facts = {
        "checkpoint": str(checkpoint),
        "iteration": checkpoint.name.removeprefix("iter_").lstrip("0") or "0",
        "written on": f"{getattr(args, 'world_size', '?')} ranks: {', '.join(sizes)}",
        "gate": describe(gate_config_from_args(args)),
        "layers": str(getattr(args, "hybrid_layer_pattern", None) or f"{args.num_layers} blocks of a GPT model"),
        "optimizer": "no" if getattr(args, "no_save_optim", None) else str(getattr(args, "optimizer", "unknown")),
        "vocabulary": f"{getattr(args, 'tokenizer_vocab_size', '?')} tokens, {args.padded_vocab_size} rows",
    }
    if args.num_experts:
        opened.active_share = args.moe_router_topk / args.num_experts
    return opened


def _open_hugging_face(directory: Path) -> Opened:
    config = read_json(directory / CONFIG)
    opened = Opened(WeightReader(directory))
    try:
        family = recognise(config).name
    except UserError:
        family = f"none that is converted (model_type {config.get('model_type')!r})"
    opened.facts = {"Hugging Face model": str(directory), "family": family}
    text = config.get("text_config") or config
    experts, chosen = (
        next((text[name] for name in names if text.get(name)), None) for names in (EXPERTS, EXPERTS_OF_A_TOKEN)
    )
    if experts and chosen:
        opened.active_share = chosen / experts
    return opened


def summary(opened: Opened) -> str:
    """Return lines about the directory as a whole."""
    sizes = {name: math.prod(tensor.shape) for name, tensor in opened.reader.tensors.items()}
    routed = sum(size for name, size in sizes.items() if ROUTED_EXPERT.search(name))
    total = sum(sizes.values())
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in opened.reader.tensors.values()})
    facts = opened.facts | {
        "parameters": f"{total:,} in {len(sizes)} tensors",
        "active": f"{total - routed + round(routed * opened.active_share):,} for a token",
        "data types": ", ".join(dtypes),
        "bytes": f"{sum(tensor.nbytes for tensor in opened.reader.tensors.values()):,}",
    }
    return "\n".join(f"{name:20}{value}" for name, value in facts.items())


def pieces(reader: Reader, name: str) -> Iterator[Tensor]:
    """Yield a tensor in fp32, one of three dimensions slice by slice."""
    stored = reader.tensors[name]
    if stored.dtype is None:
        raise UserError(f"{name} is in a data type other than fp32, bf16 and fp16")
    if not math.prod(stored.shape):
        return
    for index in range(stored.shape[0]) if len(stored.shape) == 3 else [None]:
        yield reader.read(name, index).float()


def largest_finite(tensor: Tensor) -> float:
    """Return the largest absolute value, NaN and infinity left aside; 0 if there is none."""
    return float(tensor.abs().nan_to_num(nan=0.0, posinf=0.0).max())


def show_tensors(reader: Reader) -> int:
    """Print a line for each tensor; returns how many hold NaN or infinity."""
    bad = 0
    print(f"{'norm':>12}{'largest':>12}{'not finite':>12}  tensor")
    for name, stored in reader.tensors.items():
        squares, largest, wrong = 0.0, 0.0, 0
        for piece in pieces(reader, name):
            squares += float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2
            largest = max(largest, largest_finite(piece))
            wrong += int((~piece.isfinite()).sum())
        bad += bool(wrong)
        print(f"{math.sqrt(squares):12.5g}{largest:12.5g}{wrong:12}  {name} {list(stored.shape)}")
    return bad


def differences(first: Reader, second: Reader) -> Iterator[str]:
    """Yield a line for each tensor that is not bit for bit the same in both."""
    for name in first.tensors.keys() | second.tensors.keys():
        if name not in first.tensors or name not in second.tensors:
            yield f"{name}: only in {'A' if name in first.tensors else 'B'}"
    for name, stored in first.tensors.items():
        other = second.tensors.get(name)
        if other is None:
            continue
        if stored != other:
            yield f"{name}: {stored.dtype} {list(stored.shape)} in A, {other.dtype} {list(other.shape)} in B"
        if stored.shape != other.shape:
            continue
        differ, largest, scale = False, 0.0, 0.0
        for a, b in zip(pieces(first, name), pieces(second, name), strict=True):
            other_bits = a.view(torch.int32) != b.view(torch.int32)
            if other_bits.any():
                differ = True
                difference = (a - b)[other_bits].abs().max()
                largest = max(largest, float(difference)) if not difference.isnan() else math.nan
            scale = max(scale, largest_finite(a))
        if differ:
            yield f"{name}: differs by {largest:.3g}, {largest / max(scale, 1e-30):.1e} of the largest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tools/inspect_checkpoint.py`."""
    add = parser.add_argument
    add("directory", nargs="?", type=Path, metavar="DIR", help="checkpoint or Hugging Face directory")
    add("--ckpt-step", type=int, metavar="N", help="iteration to look at (the newest complete one)")
    add("--tensors", action="store_true", help="read all tensors: norms, largest values, NaN and infinity")
    add("--diff", nargs=2, type=Path, metavar=("A", "B"), help="say in what two directories of a kind differ")


def run(options: argparse.Namespace) -> int:
    """Run `tools/inspect_checkpoint.py`; returns 1 where tensors are not finite, or differ.

    Raises:
        UserError: a directory cannot be read or is incomplete.
    """
    if (options.directory is None) == (options.diff is None):
        raise UserError("give one directory, or two with --diff")
    with quiet():
        if options.diff is not None:
            first, second = (open_directory(path) for path in options.diff)
            lines = list(differences(first.reader, second.reader))
            print("\n".join(lines) or f"the same {len(first.reader.tensors)} tensors, bit for bit")
            return int(bool(lines))
        opened = open_directory(options.directory, options.ckpt_step)
        print(summary(opened))
        bad = show_tensors(opened.reader) if options.tensors else 0
    if bad:
        print(f"{bad} tensors hold NaN or infinity", file=sys.stderr, flush=True)
    return int(bad > 0)
