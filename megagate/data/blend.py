"""Say what a blend of datasets draws from each, and write it as training reads it.

    python tools/blend.py blend.yaml --tokens 10B --output runs/blend.txt
    python -m megagate.pretrain --data-args-path runs/blend.txt ...

The file lists sources, each with a weight, a number of tokens or a number of epochs:

    sources:
      - {path: data/web_text_document, weight: 3}
      - {path: data/code_text_document, weight: 1}
      - {path: data/books_text_document, epochs: 2}

Sources with a weight share what those with tokens or epochs leave of the total.
"""

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megagate.data.index_file import open_index
from megagate.errors import UserError, nearest
from megagate.yaml_file import read_yaml

AMOUNTS = ("weight", "tokens", "epochs")
UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Drawn:
    """What a blend takes from a source."""

    path: str
    available: int
    """Tokens in the training part of the split."""
    drawn: int
    """Tokens that training reads."""
    share: float
    """Of all tokens; the weight that training is given."""

    @property
    def epochs(self) -> float:
        """How often each of its tokens is read, on average."""
        return self.drawn / self.available


def number(value: Any, name: str) -> float:
    """Return a positive number, which may end in K, M, B or T.

    Raises:
        UserError: it is none.
    """
    text = str(value).strip().upper()
    factor = UNITS.get(text[-1:], 1)
    try:
        result = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        result = math.nan
    if isinstance(value, bool) or not 0 < result < math.inf:
        raise UserError(f"{name} must be a positive number such as 0.3 or 20B, not {value!r}")
    return result


def read_sources(file: Path) -> list[dict[str, Any]]:
    """Return the sources of a blend file, each with its path and one amount.

    Raises:
        UserError: the file cannot be read or says something else.
    """
    content = read_yaml(file, "the blend file")
    sources = content.get("sources") if isinstance(content, dict) else None
    if not isinstance(sources, list) or not sources or not all(isinstance(source, dict) for source in sources):
        raise UserError(f"{file} must hold a list `sources`, each with a path and one of {', '.join(AMOUNTS)}")
    for place, source in enumerate(sources, start=1):
        where = f"{file}, source {place}"
        for key in source:
            if key not in ("path", *AMOUNTS):
                raise UserError(f"{where} has the unknown key {key}{nearest(str(key), ('path', *AMOUNTS))}")
        path = source.get("path")
        if not isinstance(path, str) or not path or path.split() != [path]:
            raise UserError(f"{where} needs a path without spaces, not {path!r}")
        if sum(key in source for key in AMOUNTS) != 1:
            raise UserError(f"{where} ({path}) needs exactly one of {', '.join(AMOUNTS)}")
    paths = [os.path.realpath(source["path"]) for source in sources]
    repeated = next((path for path in paths if paths.count(path) > 1), None)
    if repeated:
        raise UserError(f"{file} names {repeated} twice; name every dataset once")
    return sources


def training_part(split: str) -> float:
    """Return the part of a dataset's sequences that `--split` gives to training.

    Raises:
        UserError: it is not a list of up to three numbers.
    """
    try:
        parts = [float(part) for part in split.split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or not 0 < parts[0] <= sum(parts) < math.inf:
        raise UserError(f"--split {split} must be numbers such as 969,30,1, of which the first is above 0")
    return parts[0] / sum(parts)


def blend(sources: Sequence[dict[str, Any]], total: float | None = None, split: str = "1,0,0") -> list[Drawn]:
    """Return what is drawn from each source.

    Args:
        sources: from `read_sources`.
        total: tokens to draw in all; needed where a source has a weight.
        split: Megatron's `--split`; training sees the first part of each dataset's sequences.

    Raises:
        UserError: a dataset is not whole or has nothing to train on, or the amounts do not fit the total.
    """
    part = training_part(split)
    available = []
    for source in sources:
        index = open_index(source["path"])
        tokens = index.tokens_of_first(round(part * len(index.lengths)))
        if not tokens:
            raise UserError(
                f"{source['path']} has {len(index.lengths)} sequences, of which --split {split} gives training none: "
                "change the split"
            )
        available.append(tokens)
    fixed = [_fixed(source, tokens) for source, tokens in zip(sources, available, strict=True)]
    weights = [
        number(source["weight"], f"the weight of {source['path']}") if "weight" in source else 0 for source in sources
    ]
    budget = math.fsum(amount for amount in fixed if amount is not None)
    rest = 0.0 if total is None else total - budget
    if any(weights) and total is None:
        raise UserError("a source has a weight, so the total is needed: give --tokens, or each source tokens or epochs")
    if any(weights) and rest <= 0:
        raise UserError(
            f"the sources with tokens or epochs take {budget:,.0f} of {total:,.0f} tokens and leave none: raise it"
        )
    if not any(weights) and total is not None and abs(rest) > 0.001 * total:
        raise UserError(f"the sources add up to {budget:,.0f} tokens, not to --tokens {total:,.0f}; give one a weight")
    drawn = [
        rest * weight / math.fsum(weights) if amount is None else amount
        for amount, weight in zip(fixed, weights, strict=True)
    ]
    for source, amount in zip(sources, drawn, strict=True):
        if amount < 1:
            raise UserError(f"{source['path']} would give {amount:.2g} tokens, less than one: give it more")
    whole = math.fsum(drawn)
    return [
        Drawn(source["path"], tokens, round(amount), amount / whole)
        for source, tokens, amount in zip(sources, available, drawn, strict=True)
    ]


def _fixed(source: dict[str, Any], available: int) -> float | None:
    """Return the tokens that a source gives whatever the total; None for one with a weight."""
    if "tokens" in source:
        return number(source["tokens"], f"the tokens of {source['path']}")
    if "epochs" in source:
        return number(source["epochs"], f"the epochs of {source['path']}") * available
    return None


def describe(drawn: Sequence[Drawn], maximum_epochs: float) -> str:
    """Return a table of what is drawn, and a warning for each source that is repeated more often than wanted."""
    width = max(len("source"), *(len(source.path) for source in drawn))
    lines = [f"{'source':{width}} {'available':>18} {'drawn':>18} {'share':>8} {'epochs':>8}"]
    for source in drawn:
        numbers = f"{source.available:>18,} {source.drawn:>18,} {source.share:>8.4f} {source.epochs:>8.2f}"
        lines.append(f"{source.path:{width}} {numbers}")
    sums = sum(source.available for source in drawn), sum(source.drawn for source in drawn)
    lines.append(f"{'all':{width}} {sums[0]:>18,} {sums[1]:>18,} {1:>8.4f} {sums[1] / sums[0]:>8.2f}")
    lines += [
        f"warning: {source.path} is repeated {source.epochs:.2f} times, more than {maximum_epochs:g} (--max-epochs)"
        for source in drawn
        if source.epochs > maximum_epochs
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tools/blend.py."""
    parser = argparse.ArgumentParser(
        prog="blend.py",
        description="Say what a blend draws from each dataset, and write it for --data-args-path.",
        allow_abbrev=False,
    )
    parser.add_argument("blend", type=Path, help="YAML file with sources: a path, and a weight, tokens or epochs each")
    parser.add_argument("--tokens", metavar="N", help="tokens to train on in all, such as 400B")
    parser.add_argument("--split", default="969,30,1", help="as in training (969,30,1); its first part is drawn from")
    parser.add_argument("--max-epochs", default="4", metavar="N", help="warn where a source is repeated more often (4)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write weights and paths for --data-args-path")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if options.output is not None and options.output.exists():
        raise UserError(f"{options.output} exists; choose another --output or remove it")
    total = None if options.tokens is None else number(options.tokens, "--tokens")
    drawn = blend(read_sources(options.blend), total, options.split)
    if options.json:
        print(json.dumps([asdict(source) | {"epochs": source.epochs} for source in drawn]))
    else:
        print(describe(drawn, number(options.max_epochs, "--max-epochs")))
    if options.output is not None:
        temporary = options.output.with_name(f"{options.output.name}.partial-{os.getpid()}")
        try:
            temporary.write_text("".join(f"{source.share!r} {source.path}\n" for source in drawn), encoding="utf-8")
            temporary.replace(options.output)
        except OSError as error:
            raise UserError(
                f"cannot write {options.output}: {error.strerror}; choose an --output in a directory that takes it"
            ) from error
    return 0
