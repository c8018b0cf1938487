"""The logits of the next token for rows of tokens that grow by one at a time, with a key-value cache.

    decoder = Decoder(loaded, [[5, 7, 2], [9]], room=20)
    logits = decoder.next_logits()                       # after the prompts, [2, v]
    decoder.append(logits.argmax(dim=-1))
    logits = decoder.next_logits()                       # after one token more; only that token is computed

Keys and values are kept by Megatron's own StaticInferenceContext, so every layer, gate and norm is the one of training.
Rows of different lengths end at the same place: shorter ones are padded in front, where nothing sees the padding, and
padding sees itself alone. Rotary embedding depends on distances only, and learned positions are given, so a row's
logits are those that it has on its own, up to rounding.

Gated DeltaNet has no such cache in Megatron. A model with such layers is computed anew from the first token for each
token, with the padding behind the rows, since a recurrence would carry what stands before them: the same result, in
time that grows with the length.

Letters in shapes: b rows, s tokens of the longest row, v vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagate.evaluate.load import LoadedModel
from megagate.evaluate.masks import document_numbers, document_positions, forbidden_keys
from megagate.evaluate.vocabulary import whole_vocabulary
from megagate.model.pattern import DELTA_NET


class Decoder:
    """A batch of rows, and the state of the model after them.

    Args:
        loaded: the model, in evaluation mode.
        prompts: the tokens of each row, at least one.
        room: how many tokens can be appended.
        end_of_document: that token, which some models know (`megagate.evaluate.masks`).
    """

    def __init__(self, loaded: LoadedModel, prompts: Sequence[Sequence[int]], room: int, end_of_document: int) -> None:
        from megatron.core.inference.contexts.static_context import StaticInferenceContext
        from megatron.core.utils import unwrap_model

        self._model = loaded.model
        self._head: nn.Module = unwrap_model(loaded.model).output_layer
        self._args, self._end_of_document = loaded.args, end_of_document
        self.has_cache = DELTA_NET not in loaded.args.hybrid_layer_pattern
        device = next(loaded.model.parameters()).device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        longest = int(lengths.max())
        self._starts = longest - lengths if self.has_cache else torch.zeros_like(lengths)  # of the rows, [b]
        self._ends = self._starts + lengths
        self._tokens = torch.zeros(len(prompts), longest + room, dtype=torch.int64, device=device)
        for row, start, prompt in zip(self._tokens, self._starts.tolist(), prompts, strict=True):
            row[start : start + len(prompt)] = torch.tensor(prompt, device=device)
        self._has_padding_in_front = bool(self._starts.any())
        self._context: Any = StaticInferenceContext(len(prompts), longest + room) if self.has_cache else None

    def append(self, tokens: Tensor) -> None:
        """Add one token to each row: int [b]."""
        self._tokens[torch.arange(len(tokens), device=tokens.device), self._ends] = tokens
        self._ends += 1

    @torch.no_grad()
    def next_logits(self) -> Tensor:
        """Compute what has been appended since, and return the logits after each row's last token: fp32 [b, v]."""
        begin = self._context.sequence_len_offset if self.has_cache else 0
        end = int(self._ends.max())
        if self._args.reset_position_ids:
            positions = document_positions(self._tokens[:, :end], self._end_of_document, self._starts)[:, begin:]
        else:
            positions = torch.arange(begin, end, device=self._tokens.device) - self._starts[:, None]
        # A row that is over may go on beyond the last position, of which there is no learned embedding.
        positions = positions.clamp(0, self._args.max_position_embeddings - 1)
        cache = {"inference_context": self._context} if self.has_cache else {}
        last = self._ends - 1 - begin
        # Logits of every token of a long prompt would need more memory than all else.
        hook = self._head.register_forward_pre_hook(lambda _, inputs: (_take(inputs[0], last), *inputs[1:]))
        try:
            logits = self._model(self._tokens[:, begin:end], positions, self._mask(begin, end), **cache)
        finally:
            hook.remove()
        if self.has_cache:
            self._context.increment_sequence_len_offset(end - begin)
        return whole_vocabulary(logits[:, 0]).float()

    def _mask(self, begin: int, end: int) -> Tensor | None:
        """Return the mask of the tokens from `begin` to `end`, None where the plain causal one is right."""
        if not self._args.reset_attention_mask and not self._has_padding_in_front:
            return None
        tokens = self._tokens[:, :end]
        document = torch.zeros_like(tokens)
        if self._args.reset_attention_mask:
            document = document_numbers(tokens, self._end_of_document)
        index = torch.arange(end, device=tokens.device).expand_as(tokens)
        return forbidden_keys(torch.where(index < self._starts[:, None], -1 - index, document), begin)


def _take(hidden: Tensor, positions: Tensor) -> Tensor:
    """Return the hidden states [1, b, H] at one position of each row, of [s, b, H]."""
    return hidden[positions, torch.arange(len(positions), device=hidden.device)][None]
