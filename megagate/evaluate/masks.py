"""Who sees whom, for models that were trained with --reset-attention-mask: the tokens of its document alone."""

import torch


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
