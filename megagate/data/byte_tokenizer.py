"""Tokens that are bytes: no model file, nothing to train, any text.

Megatron has such a tokenizer and no `--tokenizer-type` for it. Its end-of-document and padding tokens are the bytes 0
and 1, and it drops white space from the end of a text. Here special tokens come after the bytes, and text is kept.

Import it through `megagate.data.tokenizer`: it needs Megatron.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from megatron.core.tokenizers.text.libraries import ByteLevelTokenizer
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

from megagate.errors import UserError

BYTES = 256
SPECIAL_TOKENS = ("<|endoftext|>", "<pad>")
"""They have the ids 256 and 257; what `--tokenizer-special-tokens` names follows."""


class ByteLibrary(ByteLevelTokenizer):
    """What the tokenizer is for Megatron's wrapper: UTF-8 bytes, and special tokens that no text contains."""

    def __init__(self, special_tokens: Sequence[str]) -> None:
        names = [*SPECIAL_TOKENS, *special_tokens]
        # It counts ids down from the end of the vocabulary.
        super().__init__(names[::-1], vocab_size=BYTES, _eos_id=BYTES, _pad_id=BYTES + 1)

    def ids_to_text(self, ids: Sequence[int] | np.ndarray, remove_special_tokens: bool = True) -> str:
        """Return the text of `ids`, without special tokens and without characters of which a byte is missing."""
        ids = np.asarray(ids, dtype=np.int64)
        return bytes(ids[ids < BYTES].astype(np.uint8)).decode("utf-8", errors="ignore")

    @property
    def unk_id(self) -> None:
        """No text is unknown; Megatron names an id that a special token has here."""
        return None


class ByteTokenizer(MegatronTokenizerText):
    """Megatron's wrapper around `ByteLibrary`.

    Args:
        special_tokens: names of further special tokens, for example those of fill-in-the-middle.

    Raises:
        UserError: a name comes twice.
    """

    def __init__(self, special_tokens: Sequence[str] | None = None) -> None:
        names = [*SPECIAL_TOKENS, *(special_tokens or ())]
        if len(set(names)) < len(names):
            raise UserError(
                f"--tokenizer-special-tokens names a token twice, or one of {', '.join(SPECIAL_TOKENS)}, which "
                "are there already: name every token once"
            )
        super().__init__("", {"library": "byte-level"}, special_tokens=list(special_tokens or ()))

    def _restore_model(self, special_tokens: Sequence[str], **_: Any) -> ByteLibrary:
        return ByteLibrary(special_tokens)


def encode_batch(texts: list[str]) -> list[np.ndarray]:
    """Return the bytes of each text, uint8."""
    return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
