"""Hugging Face directories into Megatron's checkpoints and back, a few tensors at a time, on one process without a GPU.

    python tools/convert_checkpoint.py import --hf DIR --out CKPT
    python tools/convert_checkpoint.py export --ckpt CKPT --out DIR

An imported checkpoint is a release checkpoint: it has no optimizer and no iteration, and loads on any layout. Beside it
lie recipe.yaml, which describes the model to the trainer, and what else the Hugging Face directory held.
"""

import argparse
import fnmatch
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megagate.checkpoint import carried, described_model, torch_dist
from megagate.checkpoint.accounting import check_all_used, converted, wanted
from megagate.checkpoint.families import FAMILIES, family_named, holding, recognise
from megagate.checkpoint.families.base import Family, Rule
from megagate.checkpoint.families.megagate import MegagateFamily
from megagate.checkpoint.families.settings import ignored_keys
from megagate.checkpoint.huggingface import CONFIG, StoredTensor, WeightReader, WeightWriter, read_json
from megagate.checkpoint.load import RELEASE, TRACKER, checkpoint_arguments
from megagate.checkpoint.output_directory import complete_or_nothing
from megagate.checkpoint.side_files import SOURCE, copy_side_files, tokenizer_flags, write_side_files
from megagate.data.tokenizer import quiet
from megagate.errors import UserError
from megagate.evaluate.extension import Extension, add_extension_arguments
from megagate.evaluate.load import find_checkpoint
from megagate.model.pattern import as_hybrid, is_gpt
from megagate.progress import ByteProgress

RECIPE = "recipe.yaml"
VOCABULARY_ROWS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors whose rows Megatron pads."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Summary:
    """What a conversion has done."""

    family: str
    tensors: int = 0
    """Written."""
    nbytes: int = 0
    """Of what was written."""
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.nbytes / 1e6 / max(self.seconds, 1e-9)
        return f"{self.tensors} tensors, {self.nbytes / 1e9:.3f} GB in {self.seconds:.1f} s ({rate:.0f} MB/s)"


class Writing:
    """Writes in a thread, while the next tensors are read; few wait, so that memory holds few.

    Meanwhile torch's operators have one thread: copying gains nothing from more, which only wait for each other.
    Leaving the context waits for what is still to be written, and raises what went wrong.
    """

    WAITING = 2

    def __init__(self, write: Callable[..., None], progress: ByteProgress) -> None:
        self._write, self._progress = write, progress
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._waiting: deque[Future[None]] = deque()

    def __call__(self, name: str, tensor: Tensor, *place: Any) -> None:
        """Write a tensor in its turn."""
        self._waiting.append(self._thread.submit(self._write, name, tensor, *place))
        self._progress.add(tensor.nbytes)
        if len(self._waiting) > self.WAITING:
            self._waiting.popleft().result()

    def __enter__(self) -> "Writing":
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._thread.shutdown(cancel_futures=kind is not None)
        torch.set_num_threads(self._threads)
        if kind is None:
            for written in self._waiting:
                written.result()


def import_checkpoint(
    source: Path,
    out: Path,
    *,
    family_name: str | None = None,
    drop: Sequence[str] = (),
    overwrite: bool = False,
) -> Summary:
    """Convert a Hugging Face directory to a checkpoint that any layout loads.

    Args:
        source: with config.json and the weights.
        out: the checkpoint, as `--load` takes it.
        family_name: of the family to read it as; recognised from config.json if None.
        drop: patterns of names of tensors to leave out.
        overwrite: replace a checkpoint that is there.

    Raises:
        UserError: the model cannot be represented, or a tensor is missing, left over or of another shape.
    """
    config = read_json(source / CONFIG)
    family = recognise(config, family_name)
    if not family.recognises(config):
        config["model_type"] = getattr(family, "model_types", (family.name,))[-1]
    reader = WeightReader(source)
    present = _without_dropped(reader.tensors, family, drop)
    dtype = _usual_dtype(present)
    arguments = family.arguments(config)
    if not isinstance(family, MegagateFamily) and (ignored := ignored_keys(config)):
        print(f"config.json has keys that are ignored: {', '.join(ignored)}", file=sys.stderr, flush=True)
    flags = described_model.recipe_flags(arguments, dtype, tokenizer_flags(source))
    args = described_model.complete_arguments(flags)
    if isinstance(family, MegagateFamily):
        family.check_understood(config, args)
    rules = list(family.rules(args, config, present.keys()))
    state = described_model.model_state(args)
    check_all_used(wanted(rules, "hf"), present, str(source), "leave it out with --drop, if the model does not need it")
    _check_megatron(rules, state.tensors, args.tokenizer_vocab_size, "Megatron's model")
    made = converted(rules, "hf", present, str(source))
    summary = Summary(family.name, tensors=len(made))
    with complete_or_nothing(out, (TRACKER,), overwrite, (source,)) as staging:
        checkpoint = staging / RELEASE
        checkpoint.mkdir()
        writer = torch_dist.TensorWriter(checkpoint)
        progress = ByteProgress(sum(tensor.nbytes for tensor in made.values()))
        with Writing(writer.write, progress) as write:
            for rule in rules:
                outputs = rule.to_megatron([reader.read(weight.name, weight.index) for weight in rule.hf])
                for weight, tensor in zip(rule.megatron, outputs, strict=True):
                    if weight.name in VOCABULARY_ROWS:
                        tensor = _with_rows(tensor, args.padded_vocab_size)
                    write(weight.name, tensor, weight.index, made[weight.name].shape[0] if tensor.dim() else 0)
        for key in state.objects:
            writer.write_object(key, None)
        if args.tokenizer_model is not None:
            args.tokenizer_model = flags["tokenizer-model"] = str(out.absolute() / SOURCE)
        common = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
        writer.write_object(torch_dist.COMMON_STATE, common)
        writer.close()
        copy_side_files(source, staging / SOURCE)
        beside = {
            name: tensor
            for name, tensor in carried.names(family, reader.tensors).items()
            if not any(fnmatch.fnmatch(name, pattern) for pattern in drop)
        }
        carried.keep(reader, beside, staging / SOURCE / carried.FOLDER)
        reader.close()
        head = f"# {family.name} model, imported; add data, batch size and schedule to train on with --load\n"
        (staging / RECIPE).write_text(head + yaml.safe_dump(flags, sort_keys=False), encoding="utf-8")
        (staging / TRACKER).write_text(RELEASE)
        summary.nbytes, summary.seconds = progress.done, time.monotonic() - progress.started
    return summary


def export_checkpoint(
    checkpoint_directory: Path,
    out: Path,
    *,
    step: int | None = None,
    family_name: str | None = None,
    source: Path | None = None,
    tokenizer: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
    overwrite: bool = False,
    extension: Extension | None = None,
) -> Summary:
    """Convert a checkpoint of any layout to a Hugging Face directory.

    Args:
        checkpoint_directory: as `--load` takes it.
        out: the directory to make.
        step: the iteration, the newest complete one if None.
        family_name: of the family to write; if None that of the import, else the first that can hold the model.
        source: a directory to take what no checkpoint holds from, instead of what an import has kept.
        tokenizer: a directory with the tokenizer's files, or a SentencePiece model.
        dtype: of the weights; as they are stored if None.
        max_shard_size: bytes after which a further file begins.
        overwrite: replace an export that is there.
        extension: to a longer context than that of training, which config.json then has.

    Raises:
        UserError: no family holds the model exactly, or a tensor is missing, left over or of another shape.
    """
    checkpoint = find_checkpoint(checkpoint_directory, step)
    saved = checkpoint_arguments(checkpoint)
    args = as_hybrid(saved)
    if getattr(args, "hybrid_layer_pattern", None) is None:
        raise UserError(f"{checkpoint} does not hold a hybrid model: it was not written by megagate.pretrain")
    with quiet():
        from megagate.checkpoint.fit import check_delta_net_norm
        from megagate.checkpoint.gpt_names import HybridNames
    check_delta_net_norm(args, checkpoint)
    if extension is not None:
        extension.apply(args)
    source = source or _kept_source(checkpoint_directory, args)
    family, config = _family_for(args, read_json(source / CONFIG) if source else {}, family_name)
    rules = list(family.rules(args, config))
    held = torch_dist.TensorReader(checkpoint)
    reader = HybridNames(held) if is_gpt(saved) else held
    _check_megatron(rules, reader.tensors, args.tokenizer_vocab_size, str(checkpoint))
    made = converted(rules, "megatron", reader.tensors, str(checkpoint))
    if wanted(rules, "hf").keys() != made.keys():
        raise ValueError(f"the family {family.name} does not name each of its tensors once")
    if dtype is not None:
        made = {name: StoredTensor(tensor.shape, dtype) for name, tensor in made.items()}
    summary = Summary(family.name, tensors=len(made))
    kept = carried.kept(family, source, args.hidden_size)
    beside = carried.names(family, kept.tensors) if kept else {}
    if beside:
        print(
            f"{len(beside)} tensors for multi-token prediction are written as {source} has them: training has not "
            "changed them",
            file=sys.stderr,
            flush=True,
        )
    if dtype is not None:
        beside = {name: StoredTensor(tensor.shape, dtype) for name, tensor in beside.items()}
    with complete_or_nothing(out, (CONFIG,), overwrite, (checkpoint,)) as staging:
        writer = WeightWriter(staging, made | beside, max_shard_size)
        progress = ByteProgress(sum(tensor.nbytes for tensor in (made | beside).values()))
        with Writing(writer.write, progress) as write:
            for rule in rules:
                tensors = [reader.read(weight.name, weight.index) for weight in rule.megatron]
                tensors = [
                    tensor[: weight.shape[0]] if weight.name in VOCABULARY_ROWS else tensor
                    for weight, tensor in zip(rule.megatron, tensors, strict=True)
                ]
                for weight, tensor in zip(rule.hf, rule.to_hf(tensors), strict=True):
                    write(weight.name, tensor.to(made[weight.name].dtype), weight.index)
            for name, stored in beside.items():
                assert kept is not None
                write(name, kept.read(name).to(stored.dtype))
        reader.close()
        if kept is not None:
            kept.close()
        writer.close()
        write_side_files(staging, config, _usual_dtype(made), args, source, tokenizer)
        for file in getattr(family, "files", ()):
            (staging / Path(file).name).write_bytes(Path(file).read_bytes())
        summary.nbytes, summary.seconds = progress.done, time.monotonic() - progress.started
    return summary


def _without_dropped(
    tensors: Mapping[str, StoredTensor], family: Family, patterns: Sequence[str]
) -> dict[str, StoredTensor]:
    """Return the tensors to convert; says which ones are left out, because the family or the user says so."""
    kept = dict(tensors)
    reasons = {f"{prefix}*": why for prefix, why in family.dropped.items()}
    reasons |= dict.fromkeys(patterns, "--drop names them")
    for pattern, why in reasons.items():
        names = fnmatch.filter(kept, pattern)
        if names:
            print(f"left out: {len(names)} tensors {pattern} ({why})", file=sys.stderr, flush=True)
        elif pattern in patterns:
            raise UserError(f"--drop {pattern!r} fits no tensor: correct it")
        for name in names:
            del kept[name]
    return kept


def _usual_dtype(tensors: Mapping[str, StoredTensor]) -> torch.dtype:
    """Return the dtype that most of the bytes have."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        if tensor.dtype is not None:
            sizes[tensor.dtype] += tensor.nbytes
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def _check_megatron(rules: Sequence[Rule], tensors: Mapping[str, StoredTensor], vocabulary: int, where: str) -> None:
    """Check that the rules are about Megatron's tensors, padding of the vocabulary left aside.

    Raises:
        UserError: they are not, or there are fewer rows than tokens.
    """
    present = dict(tensors)
    for name in VOCABULARY_ROWS:
        if name in present and present[name].shape[0] > vocabulary:
            present[name] = StoredTensor((vocabulary, *present[name].shape[1:]), present[name].dtype)
    check_all_used(wanted(rules, "megatron"), present, where, "the family has no place for it")


def _with_rows(tensor: Tensor, count: int) -> Tensor:
    """Return the tensor with rows of zeros added, `count` in all."""
    if tensor.shape[0] == count:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(count - tensor.shape[0], *tensor.shape[1:])])


def _kept_source(checkpoint_directory: Path, args: argparse.Namespace) -> Path | None:
    """Return what an import has kept of its source, beside the checkpoint or where the run had its tokenizer."""
    places = [checkpoint_directory / SOURCE, *([Path(args.tokenizer_model)] if args.tokenizer_model else [])]
    return next((place for place in places if (place / CONFIG).is_file()), None)


def _family_for(
    args: argparse.Namespace, original: Mapping[str, Any], name: str | None
) -> tuple[Family, dict[str, Any]]:
    """Return the family to write and the model's config.json."""
    if name is not None:
        family = family_named(name)
        return family, family.config(args)
    preferred = next((family for family in FAMILIES if original and family.recognises(dict(original))), None)
    return holding(args, preferred)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `tools/convert_checkpoint.py`."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="{import,export}")
    names = ", ".join(family.name for family in FAMILIES)
    for name, summary in (("import", "Hugging Face to Megatron"), ("export", "Megatron to Hugging Face")):
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        add = command.add_argument
        if name == "import":
            add("--hf", required=True, type=Path, metavar="DIR", help="directory with config.json and weights")
            add("--out", required=True, type=Path, metavar="CKPT", help="checkpoint to make, for --load")
            add("--drop", nargs="+", default=[], metavar="PATTERN", help="names of tensors to leave out, with * and ?")
        else:
            add("--ckpt", required=True, type=Path, metavar="CKPT", help="directory that training saved to")
            add("--ckpt-step", type=int, metavar="N", help="iteration to export (the newest complete one)")
            add("--out", required=True, type=Path, metavar="DIR", help="directory to make")
            add("--hf", type=Path, metavar="DIR", help="directory to take from what checkpoints lack (the import's)")
            add("--tokenizer", type=Path, metavar="PATH", help="directory with a tokenizer, or SentencePiece model")
            add("--dtype", choices=DTYPES, help="of the weights (as they are stored)")
            add_extension_arguments(command)
            add("--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="of a weight file (5GB)")
        add("--family", metavar="NAME", help=f"one of {names} (recognised)")
        add("--overwrite", action="store_true", help="replace what --out holds")
        add("--verify", action="store_true", help="compute both models' logits and compare them; both in memory")
        add("--verify-text", metavar="TEXT", help="text to compare the models on (random tokens)")
        add("--trust-remote-code", action="store_true", help="let --verify run Python from the Hugging Face directory")


def _size(text: str) -> int:
    """Parse a number of bytes such as 500MB or 5GB."""
    for unit, factor in (("KB", 10**3), ("MB", 10**6), ("GB", 10**9)):
        if text.upper().endswith(unit):
            return max(1, int(float(text[:-2]) * factor))
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Run `tools/convert_checkpoint.py`.

    Raises:
        UserError: something in the options, the model or its files is wrong.
    """
    with quiet():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    if options.command == "import":
        summary = import_checkpoint(
            options.hf, options.out, family_name=options.family, drop=options.drop, overwrite=options.overwrite
        )
        hf, checkpoint, step, run_code = options.hf, options.out, None, options.trust_remote_code
    else:
        dtype = DTYPES[options.dtype] if options.dtype else None
        summary = export_checkpoint(
            options.ckpt,
            options.out,
            step=options.ckpt_step,
            family_name=options.family,
            source=options.hf,
            tokenizer=options.tokenizer,
            dtype=dtype,
            max_shard_size=options.max_shard_size,
            overwrite=options.overwrite,
            extension=Extension.of(options),
        )
        if dtype is not None:
            print(f"the weights are written as {options.dtype}, whatever they were trained in", file=sys.stderr)
        hf, checkpoint, step = options.out, options.ckpt, options.ckpt_step
        run_code = options.trust_remote_code or hasattr(family_named(summary.family), "files")  # ours, just written
    print(f"{options.out}: {summary.family}, {summary}", flush=True)
    if options.verify:
        from megagate.checkpoint.verify import verify

        extension = Extension.of(options) if options.command == "export" else None
        print(verify(hf, checkpoint, step, options.verify_text, run_code, extension), flush=True)
    return 0
