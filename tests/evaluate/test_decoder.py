"""The decoder's logits are those of the full forward pass, step by step, for every gate and every kind of layer."""

import argparse
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megagate.gate.config import ALL_PRESETS
from tests.distributed import run_distributed
from tests.model.training import SEQUENCE, VOCABULARY, Case, build

SHAPE = (
    "--num-query-groups 2 --ffn-hidden-size 48 --num-layers 2 --micro-batch-size 1 --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
CASES = {preset: f"{SHAPE} {EXPERTS} --gate-preset {preset}" for preset in ALL_PRESETS} | {
    "sliding window": f"{SHAPE} --window-size 3,0 --window-attn-skip-freq 2 --gate-preset sdpa-headwise",
    "window, documents apart": f"{SHAPE} --window-size 4,0 --reset-attention-mask --null-tokenizer-eod-id 3",
    "documents apart": f"{SHAPE} --reset-attention-mask --null-tokenizer-eod-id 3 --gate-preset sdpa-elementwise",
    "learned positions": f"{SHAPE} --position-embedding-type learned_absolute --gate-preset value-headwise",
    "positions by document": f"{SHAPE} --position-embedding-type learned_absolute --reset-position-ids "
    "--reset-attention-mask --null-tokenizer-eod-id 3 --gate-preset sdpa-headwise",
    "YaRN": f"{SHAPE} --position-embedding-type yarn --rotary-scaling-factor 4 --mscale 0.7 "
    "--yarn-original-max-position-embeddings 8 --gate-preset sdpa-headwise",
    "delta net": f"{SHAPE} {EXPERTS} --gate-preset sdpa-elementwise --hybrid-layer-pattern GE*- "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8",
    "bf16": f"{SHAPE} {EXPERTS} --gate-preset sdpa-elementwise --bf16",
}
LENGTHS = (7, 1, 4)
END = 3
STEPS = 6


def rows() -> list[list[int]]:
    """Return rows that go on for `STEPS` tokens after the prompts, with ends of documents in them."""
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randint(4, VOCABULARY - 1, (length + STEPS,), generator=generator).tolist() for length in LENGTHS]
    drawn[0][2] = drawn[0][5] = drawn[2][3] = END
    assert max(map(len, drawn)) <= SEQUENCE
    return drawn


def differences(name: str) -> list[float]:
    """Return, by step, how far the decoder is from the full forward pass, of the largest logit; in a rank."""
    from megatron.training import get_args

    from megagate.evaluate.decoder import Decoder
    from megagate.evaluate.load import LoadedModel
    from megagate.evaluate.masks import document_mask, document_positions

    model = build(Case(flags=CASES[name]))[0][0].module.eval().requires_grad_(False)
    args = argparse.Namespace(**vars(get_args()))

    def expected(tokens: list[int]) -> Tensor:
        inputs = torch.tensor([tokens])
        mask = document_mask(inputs, END) if args.reset_attention_mask else None
        positions = document_positions(inputs, END) if args.reset_position_ids else torch.arange(len(tokens))[None]
        return model(inputs, positions, mask)[0, -1].float()

    decoder = Decoder(LoadedModel(model, args, Path(), 0), [row[:-STEPS] for row in rows()], STEPS, END)
    assert decoder.has_cache == (name != "delta net")
    found = []
    for step in range(STEPS):
        logits = decoder.next_logits()
        full = torch.stack([expected(row[: length + step]) for row, length in zip(rows(), LENGTHS, strict=True)])
        assert full.std(dim=0).max() > 0.01, "rows differ"
        found.append(float((logits - full).abs().max() / full.abs().max()))
        decoder.append(torch.tensor([row[length + step] for row, length in zip(rows(), LENGTHS, strict=True)]))
    return found


def past_the_positions() -> list[tuple[int, str]]:
    """Continue a row that has one position left beside one that has many, and say how each ends; in a rank."""
    from megatron.training import get_args

    from megagate.evaluate.generation import generate_tokens
    from megagate.evaluate.load import LoadedModel

    model = build(Case(flags=CASES["learned positions"]))[0][0].module.eval().requires_grad_(False)
    args = argparse.Namespace(**vars(get_args()))
    prompts = [[5] * (args.max_position_embeddings - 1), [6]]
    loaded = LoadedModel(model, args, Path(), 0)
    found = generate_tokens(loaded, prompts, max_new_tokens=4, end_of_document=-1, vocabulary=VOCABULARY)
    return [(len(tokens), finish) for tokens, finish in found]


def test_a_row_ends_with_its_positions_and_others_go_on() -> None:
    assert run_distributed(past_the_positions, 1)[0] == [(1, "positions"), (4, "length")]


@pytest.mark.parametrize("name", CASES)
def test_each_step_is_the_full_forward(name: str) -> None:
    found = run_distributed(differences, 1, name)[0]
    assert max(found) < (2e-2 if name == "bf16" else 1e-5), found


def test_positions_count_from_the_beginning_of_a_document() -> None:
    """Padding in front, which may be the very token that ends documents, is none."""
    from megagate.evaluate.masks import document_positions

    tokens = torch.tensor([[5, 0, 6, 7, 0, 0, 8], [0, 0, 9, 0, 5, 6, 7]])
    assert document_positions(tokens, 0)[0].tolist() == [0, 1, 0, 1, 2, 0, 0]
    padded = document_positions(tokens, 0, torch.tensor([0, 2]))
    assert padded[0].tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert padded[1, 2:].tolist() == [0, 1, 0, 1, 2]
