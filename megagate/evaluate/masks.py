"""What documents that stand one after the other mean to a model, as in its training.

Under --reset-attention-mask a token sees those of its document alone, and under --reset-position-ids, which learned
positions can have, the positions of a document count from 0.
"""

import argparse

import torch


def tells_documents_apart(args: argparse.Namespace) -> bool:
    """Return whether a run's model needs to know where documents end."""
    return bool(args.reset_attention_mask or args.reset_position_ids)


def document_numbers(tokens: torch.Tensor, end_of_document: int) -> torch.Tensor:
    """Return which document of its row each token belongs to, from 0: int64 [b, s].

    Args:
        tokens: [b, s]; an end-of-document token belongs to the document that it ends.
        end_of_document: that token.
    """
    ends = tokens == end_of_document
    return ends.cumsum(dim=1) - ends.long()


def forbidden_keys(document: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return what tokens may not attend to: bool [b, 1, s - start, s], true at later tokens and other documents.

    Args:
        document: int [b, s], a number for each document; it may be the number of a single token, which is then alone.
        start: the first token that attends; those before it are keys only.
    """
    apart = document[:, start:, None] != document[:, None, :]
    future = torch.ones_like(apart).triu(diagonal=1 + start)
    return (apart | future)[:, None]


def document_mask(inputs: torch.Tensor, end_of_document: int) -> torch.Tensor:
    """Return the mask under which a document sees itself alone: bool [b, 1, s, s], true where attention is forbidden.

    Args:
        inputs: tokens [b, s].
        end_of_document: that token.
    """
    return forbidden_keys(document_numbers(inputs, end_of_document))


def document_positions(tokens: torch.Tensor, end_of_document: int, starts: torch.Tensor | None = None) -> torch.Tensor:
    """Return the position of each token in its document, from 0: int64 [b, s].

    Args:
        tokens: [b, s].
        end_of_document: that token.
        starts: int [b], where each row begins, after padding; 0 if None.
    """
    index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    first = torch.zeros_like(tokens, dtype=torch.bool)
    first[:, 1:] = tokens[:, :-1] == end_of_document
    if starts is not None:
        first = (first & (index >= starts[:, None])) | (index == starts[:, None])
    return index - torch.where(first, index, 0).cummax(dim=1).values


def masks_and_positions(
    args: argparse.Namespace, inputs: torch.Tensor, end_of_document: int | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the attention mask, None for the plain causal one, and the position ids [b, s] that training would have.

    Args:
        args: of the run.
        inputs: tokens [b, s].
        end_of_document: that token; not None where `tells_documents_apart`.
    """
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs).contiguous()
    mask = None
    if tells_documents_apart(args):
        assert end_of_document is not None
        mask = document_mask(inputs, end_of_document) if args.reset_attention_mask else None
        positions = document_positions(inputs, end_of_document) if args.reset_position_ids else positions
    return mask, positions
