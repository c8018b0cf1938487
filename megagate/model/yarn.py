"""YaRN (Peng et al. 2023, arXiv 2309.00071) that turns a part of each head's channels, as in Qwen3-Next.

Megatron's takes --rotary-percent and turns all channels. The part has the frequencies of a head that is as small, which
is what transformers makes of a partial_rotary_factor; attention is scaled on that part alone.
"""

from typing import Any

from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt import gpt_model
from megatron.core.models.hybrid import hybrid_model


class PartialYarn(YarnRotaryEmbedding):
    """Takes the constructor arguments of Megatron's, of which it is no other where all channels turn."""

    def __init__(self, kv_channels: int, rotary_percent: float = 1.0, **kwargs: Any) -> None:
        super().__init__(int(kv_channels * rotary_percent), **kwargs)


def apply() -> None:
    """Have Megatron's models build it, which look theirs up by name; idempotent."""
    for module in (gpt_model, hybrid_model):
        module.YarnRotaryEmbedding = PartialYarn
