"""Builds models of Transformer Engine's layers and of torch's, and writes what they are made of, as JSON.

    python -m tests.te.describe FILE PRESET [gpt]

A process of its own, since `machine` must be imported before anything of megagate. One rank of each tensor-parallel
size is built on the meta device, in a process group that only pretends to have the others.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.te import machine

# isort: split
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.fp8_utils import get_fp8_context, get_fp8_recipe
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, skip_routed_expert_padding

from megagate.plan import dry_run
from megagate.pretrain import arguments

RECIPES = ("", "delayed", "tensorwise", "blockwise", "mxfp8")
"""Values of --fp8-recipe; the first for no FP8."""
TENSOR_SIZES = (1, 2, 4, 8)
MODEL = (
    "--hidden-size 256 --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 64 "
    "--ffn-hidden-size 512 --swiglu --disable-bias-linear --normalization RMSNorm --qk-layernorm --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 511 --num-experts 8 --moe-ffn-hidden-size 256 --moe-router-topk 2 "
    "--moe-shared-expert-intermediate-size 256 --expert-model-parallel-size 2 --use-distributed-optimizer --bf16 "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --gate-row-alignment 64"
).split()
HYBRID = (
    "--hybrid-layer-pattern G-*E --experimental-attention-variant gated_delta_net --linear-num-key-heads 16 "
    "--linear-num-value-heads 128 --linear-key-head-dim 16 --linear-value-head-dim 16"
).split()
"""A layer of every kind: Gated DeltaNet, dense MLP, attention, experts with a shared one."""
GPT = "--model-impl gpt --num-layers 2 --moe-layer-freq [0,1]".split()


def build(flags: list[str], layers: list[str] = HYBRID) -> dict[str, Any]:
    """Return what the last rank of 8 holds of the model that the flags, added to `MODEL` and `layers`, describe."""
    os.environ |= {"RANK": "7", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}
    args = arguments.finish(arguments.read([*MODEL, *layers, *flags]))
    with dry_run.build(args) as rank:
        model = rank.chunks[0].module.module
        state = model.sharded_state_dict(
            metadata={"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        )
        apply_factories(state)
        entries = list(nested_values(state))
        config = model.config
        linear_qkv = next(module for name, module in model.named_modules() if name.endswith("linear_qkv"))
        recipe = None
        if config.fp8:
            recipe = get_fp8_recipe(config)
            with get_fp8_context(config):  # which asks whether the GPU has it
                pass
        return {
            "modules": {name: type(module).__name__ for name, module in model.named_modules()},
            "parameters": {
                name: [list(parameter.shape), str(parameter.dtype)] for name, parameter in model.named_parameters()
            },
            "tensors": {
                f"{entry.key} {list(entry.global_offset)}": [list(entry.global_shape), list(entry.local_shape)]
                for entry in entries
                if isinstance(entry, ShardedTensor)
            },
            "objects": sorted({entry.key for entry in entries if isinstance(entry, ShardedObject)}),
            "fuses gradients": linear_qkv.fuse_wgrad_accumulation
            if args.transformer_impl == "transformer_engine"
            else None,
            "tokens": [get_align_size_for_quantization(config), skip_routed_expert_padding(config)],
            "recipe": None if recipe is None else type(recipe).__name__,
            "attention": None if recipe is None else [recipe.fp8_dpa, recipe.fp8_mha],
            "experts": sorted(
                name for name, parameter in model.named_parameters() if not getattr(parameter, "allreduce", True)
            ),
        }


def flags_for(implementation: str, preset: str, recipe: str, tensor: int) -> list[str]:
    """Return the flags of one model."""
    flags = ["--transformer-impl", implementation, "--gate-preset", preset]
    if tensor > 1:
        flags += ["--tensor-model-parallel-size", str(tensor), "--sequence-parallel"]
    if recipe:
        flags += ["--fp8-format", "e4m3", "--fp8-recipe", recipe]
    return flags


def main(file: str, preset: str, model: str = "hybrid") -> None:
    """Describe every model of a preset; GPTModels with one recipe, and without FP8."""
    machine.pretend(machine.BLACKWELL)
    layers, recipes = (GPT, RECIPES[:2]) if model == "gpt" else (HYBRID, RECIPES)
    described = {
        f"{tensor} {recipe}": build(flags_for("transformer_engine", preset, recipe, tensor), layers)
        for tensor in TENSOR_SIZES
        for recipe in recipes
    }
    described |= {f"{tensor} torch": build(flags_for("local", preset, "", tensor), layers) for tensor in TENSOR_SIZES}
    Path(file).write_text(json.dumps(described), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
