"""Rules for the layers that families have in common.

Letters in shapes: q query heads, g KV groups, d channels per head, H hidden size, F intermediate size, E experts.
"""

import argparse
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from megagate.checkpoint.families.base import Rule, Weight
from megagate.errors import UserError
from megagate.gate.config import gate_config_from_args
from megagate.gate.layout import QKVLayout, query_groups

HEAD = "lm_head.weight"


def qkv_layout(args: argparse.Namespace) -> QKVLayout:
    """Return the layout of linear_qkv."""
    return QKVLayout(args.num_attention_heads, query_groups(args), args.kv_channels, gate_config_from_args(args))


def interleave(parts: Sequence[Tensor], count: int) -> Tensor:
    """Cut each of the parts [count * n_i, ...] into `count` blocks, and put their first blocks first, and so on."""
    return torch.cat([part.unflatten(0, (count, -1)) for part in parts], dim=1).flatten(0, 1)


def separate(tensor: Tensor, count: int, sizes: Sequence[int]) -> list[Tensor]:
    """Undo `interleave` of parts with count * size rows each."""
    return [part.flatten(0, 1) for part in tensor.unflatten(0, (count, -1)).split(list(sizes), dim=1)]


def equal(hf: str, megatron: str, *shape: int) -> Rule:
    """Return the rule of a tensor that both sides store alike."""
    return Rule((Weight(hf, shape),), (Weight(megatron, shape),))


def stacked(hf: Sequence[Weight], megatron: Weight) -> Rule:
    """Return the rule of a tensor of Megatron's that has those of Hugging Face one after another."""
    rows = [weight.shape[0] for weight in hf]
    return Rule(
        tuple(hf),
        (megatron,),
        to_megatron=lambda tensors: [torch.cat(list(tensors))],
        to_hf=lambda tensors: list(tensors[0].split(rows)),
    )


def interleaved(hf: Weight, megatron: Sequence[Weight], count: int = 1) -> Rule:
    """Return the rule of a tensor of Hugging Face that has those of Megatron's in `count` blocks, a part of each."""
    rows = [weight.shape[0] // count for weight in megatron]
    return Rule(
        (hf,),
        tuple(megatron),
        to_megatron=lambda tensors: separate(tensors[0], count, rows),
        to_hf=lambda tensors: [interleave(tensors, count)],
    )


def qkv_rules(
    args: argparse.Namespace, hf: str, megatron: str, gate_blocks: int = 0, gate_name: str | None = None
) -> Iterator[Rule]:
    """Yield the rule of queries, keys and values, and one for their biases where there are some.

    Args:
        args: of the model.
        hf: prefix of q_proj, k_proj and v_proj.
        megatron: prefix of linear_qkv.
        gate_blocks: into how many blocks q_proj falls, each first with query rows, then with their gate's.
        gate_name: of the tensor that holds the gate's rows, where they are not in q_proj.
    """
    layout = qkv_layout(args)
    groups, hidden = layout.num_query_groups, args.hidden_size
    query_rows, gate_rows = layout.num_attention_heads * layout.kv_channels, groups * layout.gate_rows
    key_rows = groups * layout.kv_channels

    def to_megatron(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        query, key, value, *gates = tensors
        gate = gates[0] if gates else None
        if gate_blocks:
            query, gate = separate(query, gate_blocks, [query_rows // gate_blocks, gate_rows // gate_blocks])
        return [layout.merge_weight(query, gate, key, value)]

    def to_hf(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        query, gate, key, value = layout.split_weight(tensors[0])
        if gate is None:
            return [query, key, value]
        if gate_blocks:
            return [interleave([query, gate], gate_blocks), key, value]
        return [query, key, value, gate]

    rows = [query_rows + (gate_rows if gate_blocks else 0), key_rows, key_rows]
    for kind, trailing in (("weight", (hidden,)), ("bias", ())):
        if kind == "bias" and not args.add_qkv_bias:
            continue
        names = [f"{hf}{name}_proj.{kind}" for name in "qkv"]
        weights = [Weight(name, (size, *trailing)) for name, size in zip(names, rows, strict=True)]
        if gate_name:
            weights.append(Weight(f"{hf}{gate_name}.{kind}", (gate_rows, *trailing)))
        fused = Weight(f"{megatron}linear_qkv.{kind}", (layout.total_rows, *trailing))
        yield Rule(tuple(weights), (fused,), to_megatron, to_hf)


def attention_rules(
    args: argparse.Namespace, hf: str, megatron: str, gate_blocks: int = 0, gate_name: str | None = None
) -> Iterator[Rule]:
    """Yield the rules of softmax attention; the gate as in `qkv_rules`."""
    yield from qkv_rules(args, hf, megatron, gate_blocks, gate_name)
    if args.qk_layernorm:
        for name in "qk":
            yield equal(f"{hf}{name}_norm.weight", f"{megatron}{name}_layernorm.weight", args.kv_channels)
    columns = args.num_attention_heads * args.kv_channels
    yield equal(f"{hf}o_proj.weight", f"{megatron}linear_proj.weight", args.hidden_size, columns)


def mlp_rules(hf: str, megatron: str, hidden: int, intermediate: int) -> Iterator[Rule]:
    """Yield the rules of a SwiGLU layer, dense or of shared experts: [F, H] twice, and [H, F]."""
    halves = [Weight(f"{hf}{name}_proj.weight", (intermediate, hidden)) for name in ("gate", "up")]
    yield stacked(halves, Weight(f"{megatron}linear_fc1.weight", (2 * intermediate, hidden)))
    yield equal(f"{hf}down_proj.weight", f"{megatron}linear_fc2.weight", hidden, intermediate)


def expert_rules(args: argparse.Namespace, hf: str, megatron: str, names: Collection[str] = ()) -> Iterator[Rule]:
    """Yield the rules of routed experts, expert by expert.

    transformers writes each projection of each expert by itself, as most released checkpoints have them. Qwen3.5's have
    gate_up_proj [E, 2F, H] and down_proj [E, H, F], which is what Megatron's hold.

    Args:
        args: of the model.
        hf: prefix of the experts.
        megatron: likewise.
        names: of the tensors that there are, on import.
    """
    hidden, intermediate = args.hidden_size, args.moe_ffn_hidden_size
    fused = f"{hf}gate_up_proj" in names
    for expert in range(args.num_experts):
        first = Weight(f"{megatron}linear_fc1.weight", (2 * intermediate, hidden), expert)
        second = Weight(f"{megatron}linear_fc2.weight", (hidden, intermediate), expert)
        if fused:
            yield Rule((Weight(f"{hf}gate_up_proj", first.shape, expert),), (first,))
            yield Rule((Weight(f"{hf}down_proj", second.shape, expert),), (second,))
            continue
        halves = [Weight(f"{hf}{expert}.{name}_proj.weight", (intermediate, hidden)) for name in ("gate", "up")]
        yield stacked(halves, first)
        yield Rule((Weight(f"{hf}{expert}.down_proj.weight", second.shape),), (second,))


def embedding_rule(args: argparse.Namespace, name: str, names: Collection[str] = ()) -> Rule:
    """Return the rule of the embedding, called `name`.

    Where it is tied, a checkpoint may still have lm_head.weight, which must then hold the same numbers.
    """
    shape = (args.tokenizer_vocab_size, args.hidden_size)
    megatron = Weight("embedding.word_embeddings.weight", shape)
    if args.untie_embeddings_and_output_weights or HEAD not in names:
        return Rule((Weight(name, shape),), (megatron,))

    def to_megatron(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if not tensors[0].is_meta and not torch.equal(*tensors):
            raise UserError(f"config.json has tie_word_embeddings, but {HEAD} and {name} differ")
        return tensors[:1]

    return Rule((Weight(name, shape), Weight(HEAD, shape)), (megatron,), to_megatron, lambda tensors: [*tensors] * 2)


def head_rules(args: argparse.Namespace, norm: str) -> Iterator[Rule]:
    """Yield the rules of the final norm, called `norm`, and of the output layer where it is not tied."""
    yield equal(norm, "decoder.final_norm.weight", args.hidden_size)
    if args.untie_embeddings_and_output_weights:
        yield equal(HEAD, "output_layer.weight", args.tokenizer_vocab_size, args.hidden_size)
