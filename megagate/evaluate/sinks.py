"""Gate scores, attention sinks, massive activations and perplexity of checkpoints, side by side.

    python tools/evaluate.py sinks --load runs/gated runs/baseline --data-path data/held_out_text_document \\
        --figures figures --output sinks.json

The row of arXiv 2505.06708, table 4, for each checkpoint, and the same by block. The definitions are those of training
(`megagate.telemetry.gates`, `sinks`, `activations`), here over every row of every window, unless --telemetry-rows asks
for fewer; perplexity and windows are those of `megagate.evaluate.perplexity`.

A checkpoint is a directory that training saved to, or a Hugging Face directory that tools/convert_checkpoint.py can
import, which happens in a temporary directory.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megagate.data.tokenizer import quiet
from megagate.errors import UserError
from megagate.evaluate.directories import as_checkpoint, check_directory, is_hugging_face
from megagate.evaluate.documents import open_dataset
from megagate.evaluate.layout import refuse_ranks
from megagate.evaluate.load import LoadedModel, find_checkpoint, load_model, one_process_arguments
from megagate.evaluate.options import check_output, check_positive, write_file
from megagate.evaluate.perplexity import evaluate, tokenizer_for_text

if TYPE_CHECKING:
    from megagate.telemetry.observer import Findings

COLUMNS = {
    "gate score": "gate/mean-score",
    "first token": "attention/first-token-share",
    "with first rows": "attention/first-token-share-all-rows",
    "if uniform": "attention/first-token-share-uniform",
    "entropy": "attention/entropy",
    "max logit": "attention/max-logit",
    "max activation": "activation/max",
    "max/median": "activation/max-to-median",
}
"""The columns of the table, and the tags of what stands there."""

BY_BLOCK = ("gate score", "first token", "entropy", "max activation")
MAP_LENGTH = 256
"""Queries and keys of an attention map at most, from the beginning of the first window."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tools/evaluate.py sinks`; those that Megatron has bear its names."""
    add = parser.add_argument
    add("--load", "--ckpt", nargs="+", required=True, metavar="DIR", help="checkpoints or Hugging Face directories")
    add("--family", metavar="NAME", help="of models that Hugging Face directories are read as (recognised)")
    add("--ckpt-step", type=int, metavar="N", help="iteration to load (the newest complete one)")
    add("--data-path", "--data", nargs="+", required=True, metavar="PREFIX", help="held-out .bin/.idx files")
    add("--tokenizer-model", metavar="FILE", help="where the runs' tokenizer is now, if it has moved")
    add("--seq-length", type=int, metavar="N", help="tokens per window (as in training)")
    add("--micro-batch-size", type=int, default=1, metavar="N", help="windows computed at a time (1)")
    add("--telemetry-rows", type=int, metavar="N", help="rows of a window to look at (all)")
    add("--figures", metavar="DIR", help="write figures there, as PNG")
    add("--attention-blocks", type=int, nargs="+", metavar="B", help="blocks of the attention maps (first and last)")
    add("--attention-heads", type=int, nargs="+", default=[0], metavar="H", help="heads of the maps, from 0 (0)")
    add("--output", metavar="FILE", help="write the results as JSON")


def run(options: argparse.Namespace) -> int:
    """Run `tools/evaluate.py sinks`.

    Raises:
        UserError: something in the options is missing or does not fit a checkpoint.
    """
    refuse_ranks("tools/evaluate.py sinks")
    with quiet():
        reports, maps = _measure(options)
    print(table(reports))
    if options.output:
        _write(Path(options.output), json.dumps({"checkpoints": reports}, indent=2) + "\n")
    if options.figures:
        with quiet():
            for name, content in figures(reports, maps).items():
                _write(Path(options.figures) / name, content)
    return 0


def _write(path: Path, content: str | bytes) -> None:
    write_file(path, content)
    print(f"wrote {path}", file=sys.stderr, flush=True)


def _measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Check the options, the cheap checks first, then measure one checkpoint after the other."""
    check_positive(options, "micro_batch_size", "telemetry_rows", "seq_length")
    check_output(options.output)
    if options.figures and os.path.exists(options.figures) and not os.path.isdir(options.figures):
        raise UserError(f"--figures {options.figures} is not a directory: name one")
    if options.figures and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--figures needs matplotlib: pip install 'megagate[plot]'")
    directories = [Path(directory) for directory in options.load]
    for directory in directories:
        check_directory(directory, None if is_hugging_face(directory) else options.ckpt_step)
    converted = [is_hugging_face(directory) for directory in directories]
    if all(converted):
        check_directory(directories[0], options.ckpt_step)
    if options.family is not None and not any(converted):
        raise UserError("--family has no effect: it is for Hugging Face directories. Leave it out")
    for path in options.data_path:
        open_dataset(path)
    reports: list[dict[str, Any]] = []
    maps: dict[str, np.ndarray] = {}
    for name, directory in zip(names_of(directories), directories, strict=True):
        step = None if is_hugging_face(directory) else options.ckpt_step
        with as_checkpoint(directory, options.family) as checkpoint:
            report, own_maps = _measure_one(name, checkpoint, step, options)
        reports.append(report | {"checkpoint": str(directory)})
        maps |= own_maps
    return reports, maps


def names_of(directories: Sequence[Path]) -> list[str]:
    """Return short names that differ: the ends of the paths, as many parts as are needed."""
    parts = [directory.absolute().parts for directory in directories]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError("--load names the same directory twice: name each once")


def _measure_one(
    name: str, directory: Path, step: int | None, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    args = one_process_arguments(find_checkpoint(directory, step))
    length = options.seq_length or args.seq_length
    if length > args.max_position_embeddings:
        raise UserError(
            f"--seq-length {length} is more than the {args.max_position_embeddings} positions of {name}: "
            "give at most that"
        )
    tokenizer = tokenizer_for_text(args, options.tokenizer_model)
    print(f"loading {directory}", file=sys.stderr, flush=True)
    with load_model(directory, step) as loaded:
        from megagate.telemetry.telemetry import Telemetry

        telemetry = Telemetry(loaded.args, [loaded.model], options.telemetry_rows or length)
        maps = AttentionMaps(loaded, options.attention_blocks, options.attention_heads) if options.figures else None
        with contextlib.ExitStack() as on_exit:
            if maps:
                maps.attach(telemetry.layers, on_exit)
            result = evaluate(
                loaded,
                options.data_path,
                seq_length=length,
                micro_batch_size=options.micro_batch_size,
                tokenizer=tokenizer,
                telemetry=telemetry,
            )
        assert result.findings is not None
        report = {"name": name, "seq_length": length} | describe(result.as_json(), result.findings)
        own = (
            {f"{name}, block {block}, head {head}": image for (block, head), image in maps.found.items()}
            if maps
            else {}
        )
    return report, own


def describe(perplexity: dict[str, Any], found: "Findings") -> dict[str, Any]:
    """Return a checkpoint's part of the JSON."""
    return {
        **{key: perplexity[key] for key in ("gate", "layers", "iteration", "tokens", "loss", "perplexity", "datasets")},
        "scalars": found.scalars,
        "by_block": found.by_block,
        "gate_histograms": {
            tag: {"limits": histogram.limits, "counts": histogram.counts}
            for tag, histogram in found.histograms.items()
            if tag.startswith("gate/scores/")
        },
    }


class AttentionMaps:
    """Keeps the attention probabilities of some blocks and heads, for the beginning of the first window."""

    def __init__(self, loaded: LoadedModel, blocks: Sequence[int] | None, heads: Sequence[int]) -> None:
        self._blocks, self._heads = blocks, heads
        self.found: dict[tuple[int, int], np.ndarray] = {}
        """(block, head) -> [queries, keys]."""
        count = loaded.args.num_attention_heads
        for head in heads:
            if not 0 <= head < count:
                raise UserError(f"--attention-heads {head} is none of the model's heads, 0 to {count - 1}: give one")

    def attach(self, layers: Sequence[Any], on_exit: contextlib.ExitStack) -> None:
        """Look at the queries and keys of the blocks that were asked for."""
        from functools import partial

        from megatron.core.transformer.attention import SelfAttention

        softmax = [
            layer for layer in layers if isinstance(getattr(layer.module, "self_attention", None), SelfAttention)
        ]
        present = [layer.block for layer in softmax]
        wanted = self._blocks or sorted({present[0], present[-1]}) if present else []
        for block in wanted:
            if block not in present:
                raise UserError(f"--attention-blocks {block} has no softmax attention: choose from {present}")
        for layer in softmax:
            if layer.block in wanted:
                attention: Any = layer.module.self_attention
                hook = partial(self._keep, layer.block, attention)
                handle = attention.core_attention.register_forward_pre_hook(hook)
                on_exit.callback(handle.remove)

    def _keep(self, block: int, attention: Any, core: Any, inputs: tuple[Any, ...]) -> None:
        import torch

        from megagate.telemetry.sinks import forbidden_keys, window_of

        if (block, self._heads[0]) in self.found:
            return
        query, key, _, mask = inputs[:4]
        query, key = query[:MAP_LENGTH, 0].float(), key[:MAP_LENGTH, 0].float()  # [s, h, d], [s, g, d]
        per_group, length = query.shape[1] // key.shape[1], len(query)
        own_mask = None if mask is None else mask[:1, :, :length, :length]
        position = torch.arange(length, device=query.device)
        (forbidden,) = forbidden_keys(position, length, own_mask, window_of(attention))
        for head in self._heads:
            logits = query[:, head] @ key[:, head // per_group].T * core.softmax_scale
            self.found[block, head] = logits.masked_fill(forbidden, -torch.inf).softmax(dim=-1).cpu().numpy()


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the readable form of the results."""
    width = max(len("checkpoint"), *(len(report["name"]) for report in reports))
    head = "  ".join(f"{column:>15}" for column in COLUMNS)
    lines = [f"{'checkpoint':<{width}}  {'gate':<26}  {head}  {'perplexity':>10}"]
    for report in reports:
        cells = "  ".join(f"{_number(report['scalars'].get(tag)):>15}" for tag in COLUMNS.values())
        lines.append(f"{report['name']:<{width}}  {report['gate']:<26}  {cells}  {report['perplexity']:>10.3f}")
    lines.append("")
    columns = [f"{report['name']}: {column}" for column in BY_BLOCK for report in reports]
    lines.append("  ".join(("block", *columns)))
    blocks = sorted({block for report in reports for values in report["by_block"].values() for block in values})
    for block in blocks:
        values = [report["by_block"].get(COLUMNS[column], {}).get(block) for column in BY_BLOCK for report in reports]
        of_block = [f"{_number(value):>{len(column)}}" for value, column in zip(values, columns, strict=True)]
        lines.append("  ".join((f"{block:>5}", *of_block)))
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"


def figures(reports: Sequence[Mapping[str, Any]], maps: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Return PNG files by name: what is said by block, gate scores by block, attention maps.

    Raises:
        UserError: matplotlib is not installed.
    """
    from megagate.report.figures import attention_maps, by_layer, histograms_by_layer
    from megagate.report.style import to_png

    names = [report["name"] for report in reports]
    panels = {
        column: {
            report["name"]: (list(values), np.array(list(values.values())))
            for report in reports
            if (values := report["by_block"].get(COLUMNS[column]))
        }
        for column in ("first token", "entropy", "max activation", "max/median")
    }
    drawn = {"by_block.png": by_layer(panels, log=("max activation", "max/median"), names=names)}
    histograms, limits = {}, None
    for report in reports:
        counts = [np.array(histogram["counts"]) for histogram in report["gate_histograms"].values()]
        if counts and limits in (None, (own := next(iter(report["gate_histograms"].values()))["limits"])):
            limits = own
            blocks = list(report["by_block"]["gate/mean-score"])
            histograms[report["name"]] = blocks, np.stack([count / count.sum() for count in counts])
    if limits:
        edges = np.array([2 * limits[0] - limits[1], *limits])
        drawn["gate_scores.png"] = histograms_by_layer(histograms, edges, "gate score")
    if maps:
        drawn["attention_maps.png"] = attention_maps(maps)
    return {name: to_png(figure) for name, figure in drawn.items()}
