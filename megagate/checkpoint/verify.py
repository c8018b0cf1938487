"""Whether a model of transformers and a checkpoint compute the same."""

from pathlib import Path

import torch
from torch import Tensor

from megagate.data.tokenizer import quiet
from megagate.errors import UserError, reason
from megagate.evaluate.extension import Extension
from megagate.evaluate.load import load_model

TOLERANCE = 1e-4
"""Of the largest logit, in fp32."""

BATCH, LENGTH = 4, 32
"""Of random tokens. Rounding alone exceeds the tolerance at about one token in ten thousand of a tiny random model, one
whose hidden state is so short that a norm enlarges it; a deviation shows in the median too."""


def verify(
    hf: Path,
    checkpoint: Path,
    step: int | None = None,
    text: str | None = None,
    run_code: bool = False,
    extension: Extension | None = None,
) -> str:
    """Compare the logits of both models in fp32, and return a line about it.

    Args:
        hf: a directory that transformers loads.
        checkpoint: as `--load` takes it.
        step: the iteration, the newest complete one if None.
        text: what to compare them on; random tokens if None.
        run_code: whether transformers may run Python from the directory.
        extension: with which the directory was written.

    Raises:
        UserError: the largest difference is above `TOLERANCE` of the largest logit, or transformers cannot load it.
    """
    with load_model(checkpoint, step, in_fp32=True, extension=extension) as loaded:
        vocabulary = loaded.args.tokenizer_vocab_size
        tokens = _tokens(hf, vocabulary, min(LENGTH, loaded.args.max_position_embeddings), text)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
        with torch.no_grad():
            ours = loaded.model(tokens, positions, None).float()[..., :vocabulary]
    theirs = _transformers_logits(hf, tokens, run_code)
    scale = theirs.abs().max().item()
    of_tokens = (ours - theirs).abs().amax(-1) / scale
    difference = of_tokens.max().item()
    line = (
        f"logits of {tokens.numel()} tokens differ by at most {difference:.1e} of the largest, {scale:.3g}; "
        f"half of the tokens by less than {of_tokens.median().item():.1e}"
    )
    if not difference <= TOLERANCE:
        raise UserError(f"{line}, which is more than {TOLERANCE:.0e}: the two models do not compute the same")
    return line


def _tokens(hf: Path, vocabulary: int, length: int, text: str | None) -> Tensor:
    """Return the tokens [1, n] of a text, or [4, n] random ones."""
    if text is None:
        return torch.randint(vocabulary, (BATCH, length), generator=torch.Generator().manual_seed(1))
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(hf)(text, return_tensors="pt")["input_ids"][:, :length]
    if not tokens.numel():
        raise UserError("--verify-text has no tokens")
    return tokens


def _transformers_logits(hf: Path, tokens: Tensor, run_code: bool) -> Tensor:
    try:
        with quiet():
            from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise UserError("--verify needs transformers: pip install transformers") from error
    try:
        model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32, trust_remote_code=run_code)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"--verify cannot load {hf} with transformers: {reason(error)}") from error
    with torch.no_grad():
        return model.eval()(tokens).logits.float()
