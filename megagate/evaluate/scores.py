"""How probable a model finds tokens after others: what multiple-choice tasks ask."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megagate.evaluate.load import LoadedModel
from megagate.evaluate.masks import masks_and_positions
from megagate.evaluate.vocabulary import whole_vocabulary

Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens, and those that follow them."""


def continuation_scores(
    loaded: LoadedModel, pairs: Sequence[Pair], *, micro_batch_size: int = 8, end_of_document: int | None = None
) -> Iterator[tuple[int, float, bool]]:
    """Yield, as they are computed, the number of a pair, ln p(second | first), and whether greedy decoding gives it.

    Args:
        loaded: the model.
        pairs: none of them empty; of what is longer than the model's positions the beginning is left out.
        micro_batch_size: pairs that are computed at a time; those of similar length, the longest first.
        end_of_document: for a model that was trained with --reset-attention-mask or --reset-position-ids.
    """
    longest = loaded.args.max_position_embeddings
    rows = [[*first, *second][-longest - 1 :] for first, second in pairs]
    order = sorted(range(len(pairs)), key=lambda number: -len(rows[number]))
    for start in range(0, len(order), micro_batch_size):
        numbers = order[start : start + micro_batch_size]
        yield from _scores(
            loaded,
            numbers,
            [rows[number] for number in numbers],
            [min(len(pairs[number][1]), len(rows[number]) - 1) for number in numbers],
            end_of_document,
        )


@torch.no_grad()
def _scores(
    loaded: LoadedModel, numbers: list[int], rows: list[list[int]], counts: list[int], end_of_document: int | None
) -> Iterator[tuple[int, float, bool]]:
    """Yield the results of a batch: rows of tokens, of which the last `counts` are scored."""
    from megatron.core.utils import unwrap_model

    length = max(map(len, rows)) - 1
    inputs = torch.tensor([row[:-1] + [0] * (length + 1 - len(row)) for row in rows]).cuda()
    mask, positions = masks_and_positions(loaded.args, inputs, end_of_document)
    # Padding stands behind, where nothing that counts sees it; logits are computed where they are asked for.
    places = [
        (index, row) for row, (tokens, count) in enumerate(zip(rows, counts, strict=True))
        for index in range(len(tokens) - 1 - count, len(tokens) - 1)
    ]  # fmt: skip
    at, of = (torch.tensor(column, device=inputs.device) for column in zip(*places, strict=True))
    head: Any = unwrap_model(loaded.model).output_layer
    hook = head.register_forward_pre_hook(lambda _, given: (given[0][at, of][:, None], *given[1:]))
    try:
        logits = loaded.model(inputs, positions, mask)
    finally:
        hook.remove()
    logits = whole_vocabulary(logits[0]).float()  # [scored tokens, v]
    labels = torch.tensor([token for row, count in zip(rows, counts, strict=True) for token in row[-count:]])
    labels = labels.to(logits.device)
    chosen = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0].double()
    greedy = logits.argmax(-1) == labels
    for number, part, is_greedy in zip(numbers, chosen.split(counts), greedy.split(counts), strict=True):
        yield number, float(part.sum()), bool(is_greedy.all())
