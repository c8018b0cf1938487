"""Step times: gates against the baseline and Megatron's own gate, and a stack of the 15A2B model's layers."""

import copy
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megagate.platform  # noqa: F401  # before Megatron

# isort: split
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megagate.gpu_check.machine import Call, Machine, median_ratio, time_in_turn
from megagate.gpu_check.result import Row, Skip
from megagate.gpu_check.trainer import batches, trainer
from megagate.model.builder import model_config
from megagate.plan.gpus import TERA

STOCK = "Megatron's own gate"
VARIANTS = ("baseline", "sdpa-elementwise", "sdpa-headwise", STOCK)
RECIPE = Path(__file__).parents[2] / "examples" / "moe_15a2b" / "recipe.yaml"
ONE_RANK = (
    "--expert-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 1 --train-iters 1000 --lr-warmup-iters 0 "
    "--eval-iters 0"
).split()
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16 --vocab-size 255 "
    "--ffn-hidden-size 64 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --seq-length 64 "
    "--max-position-embeddings 64"
).split()
"""Sizes for a CPU."""


def gate_steps(machine: Machine) -> Iterator[Row]:
    """Yield the time of forward and backward of two blocks with each gate, in turns, and its ratio to the baseline's.

    Experts are few, so that the blocks are mostly attention, and ratios are larger than in the whole model.
    """
    few = "--num-layers 2 --num-experts 8 --moe-router-topk 2 --vocab-size 32000".split()
    argv = [*_recipe(), *(few if machine.is_cuda else SMALL), *ONE_RANK]
    with trainer(argv) as run:
        iterator = batches(run.args, _random_tokens(run.args))
        batch = {name: tensor.cuda() for name, tensor in next(iterator).items()}
        calls = {name: _forward_and_backward(_model(run.args, name), batch) for name in VARIANTS}
        times = time_in_turn(calls, machine, machine.seconds)
    for name in VARIANTS:
        yield Row(f"{name}", 1000 * statistics.median(times[name]), "ms", note=f"{len(times[name])} rounds")
    for name in VARIANTS[1:]:
        yield Row(f"{name} over baseline", median_ratio(times, name, "baseline"), "ratio")
    yield Row(f"sdpa-elementwise over {STOCK}", median_ratio(times, "sdpa-elementwise", STOCK), "ratio")


def _model(args: Any, variant: str) -> Any:
    """Return a model that differs from that of `args` in the gate alone."""
    args = copy.copy(args)
    args.gate_preset = "sdpa-elementwise" if variant == STOCK else variant
    args.attention_output_gate = args.gate_preset == "sdpa-elementwise"
    args.gradient_accumulation_fusion = False  # it adds to buffers that only a wrapped model has
    config = model_config(args)
    if variant == STOCK:
        attention = config.hybrid_stack_spec.submodules.attention_layer.submodules.self_attention
        attention.module = SelfAttention
        attention.params = {"attn_mask_type": attention.params["attn_mask_type"]}
    config.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return config.get_builder_cls()(config).build_distributed_models(groups, wrap_with_ddp=False)[0]


def _forward_and_backward(model: Any, batch: dict[str, Tensor]) -> Call:
    def call() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).mean().backward()

    return call


def stack_15a2b(machine: Machine) -> Iterator[Row]:
    """Yield tokens/s, TFLOP/s and MFU of the trainer's whole step on two blocks, with the embedding and the output."""
    from megagate.pretrain.flops import num_floating_point_operations

    argv = [*_recipe(), *(["--num-layers", "2"] if machine.is_cuda else SMALL), *ONE_RANK]
    with trainer(argv) as run:
        iterator = batches(run.args, _random_tokens(run.args))
        times = time_in_turn({"step": lambda: run.step(iterator)}, machine, machine.seconds)
        operations = num_floating_point_operations(run.args, run.args.global_batch_size)
        tokens = run.args.global_batch_size * run.args.seq_length
        parameters = sum(parameter.numel() for model in run.models for parameter in model.parameters())
    seconds = statistics.median(times["step"])
    yield Row("parameters", parameters / 1e6, "M")
    yield Row("step", 1000 * seconds, "ms", note=f"{len(times['step'])} steps of {tokens} tokens, with the optimizer")
    yield Row("throughput", tokens / seconds, "tokens/s")
    yield Row("model operations", operations / seconds / TERA, "TFLOP/s")
    gpu = machine.gpu()
    if gpu:
        yield Row("MFU", 100 * operations / seconds / gpu.bf16, "%", note=f"of {gpu.bf16 / TERA:.0f} TFLOP/s")
    if machine.is_cuda:
        yield Row("peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")


def _recipe() -> list[str]:
    if not RECIPE.exists():
        raise Skip(f"{RECIPE} is not there: run it in a clone")
    return ["--recipe", str(RECIPE)]


def _random_tokens(args: Any) -> Any:
    return lambda shape: torch.randint(args.vocab_size, shape)
