"""Fill-in-the-middle: `--fim-data` has documents read as prefix, suffix, middle (Bavarian et al., arXiv 2207.14255).

Megatron's dataset cuts a document's text at two random places. It draws them from one stream per process, so that a
sample would depend on the number of loader workers and on where a run was resumed; here each sample has its own. It
also has padding learned, where tokenizing the parts gives fewer tokens than the whole; here that has no loss.
"""

import argparse
from typing import Any

import numpy
import torch
from megatron.core.utils import accepts_parameter
from megatron.training.datasets.fim_dataset import GPTFIMDataset

from megagate.errors import UserError
from megagate.pretrain.checked_datasets import CheckedGPTDataset

PARTS = ("prefix", "middle", "suffix", "pad", "eod")
"""Each has a flag, `--fim-PART-token`."""

OPTIONS = ("fim_rate", "fim_spm_rate", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix")


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the dataset's configuration that `--fim-data` fills."""
    tokens = {part: getattr(args, f"fim_{part}_token") for part in PARTS}
    return {name: getattr(args, name) for name in OPTIONS} | {"fim_extra_tokens": tokens}


def describe(args: argparse.Namespace) -> str:
    """Return, in words, how documents are cut and put together again."""
    values = {name: getattr(args, name) for name in OPTIONS if args.fim_data}
    given = [f"--{name.replace('_', '-')} {value}" for name, value in values.items() if value is not None]
    return ", ".join(given) or "off"


def check(args: argparse.Namespace, tokenizer: Any) -> None:
    """Check that the tokenizer and the flags can do fill-in-the-middle.

    Raises:
        UserError: they cannot.
    """
    library = tokenizer._tokenizer
    if not accepts_parameter(library.ids_to_text, "remove_special_tokens") or library.text_to_ids(""):
        raise UserError(
            f"--fim-data decodes text without special tokens and encodes its parts alone, which --tokenizer-type "
            f"{args.tokenizer_type} cannot: use ByteLevelTokenizer, TikTokenizer, or HuggingFaceTokenizer with "
            "--tokenizer-hf-no-include-special-tokens"
        )
    tokens = {f"--fim-{part}-token": getattr(args, f"fim_{part}_token") for part in PARTS}
    if args.fim_split_sample is not None:
        tokens["--fim-split-sample"] = args.fim_split_sample
    ids = {flag: _id(library, token) for flag, token in tokens.items()}
    for flag, token in ids.items():
        if token is None:
            raise UserError(
                f"the tokenizer has no token {tokens[flag]} ({flag}): name one that it has, or add it "
                "(--tokenizer-special-tokens)"
            )
    end = "--fim-eod-token"
    if ids[end] != tokenizer.eod:
        raise UserError(
            f"{end} {tokens[end]} is token {ids[end]}, but documents end with {tokenizer.eod}: name that one, or parts "
            "of two documents would be mixed"
        )
    if len({ids[f"--fim-{part}-token"] for part in PARTS if part != "pad"}) < len(PARTS) - 1:
        raise UserError("--fim-prefix-token, -middle-token, -suffix-token and -eod-token must differ")
    if args.fim_split_sample is not None and args.fim_fragment_rate is None:
        raise UserError("--fim-split-sample has no effect without --fim-fragment-rate: add it")
    for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
        rate = getattr(args, name)
        if rate is not None and not 0 < rate <= 1:
            raise UserError(f"--{name.replace('_', '-')} {rate} is not above 0 and at most 1: give a probability")
    if args.dataloader_defer_npy_index_mmap:
        raise UserError("--fim-data cannot be combined with --dataloader-defer-npy-index-mmap: leave one of them out")


def _id(library: Any, token: str) -> int | None:
    """Return the id of a token; None where the tokenizer has no such token."""
    try:
        (found,) = library.tokens_to_ids([token])
    except KeyError:
        return None
    return found if isinstance(found, int) and found != library.unk_id else None


class FimDataset(CheckedGPTDataset, GPTFIMDataset):
    """Megatron's dataset; what becomes of a sample depends on the seed and on its place in the order alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.masks_and_position_ids_are_cacheable = False  # the loss mask differs between samples

    def _query_document_sample_shuffle_indices(self, idx: int) -> Any:
        self.np_rng = numpy.random.RandomState([self.config.random_seed, self.index_split.value, idx])
        return super()._query_document_sample_shuffle_indices(idx)

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Return the sample, in which padding does not count."""
        sample = super().__getitem__(idx)
        sample["loss_mask"][sample["labels"] == self.pad_tok_id] = 0.0
        return sample
