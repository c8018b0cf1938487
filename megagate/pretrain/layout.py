"""Refuse layouts that cannot be, before any process group is made, with the numbers in the message.

Megatron finds most of these late, on every rank at once and as assertions deep inside a constructor. The letters in
messages are the flags' own names.
"""

import argparse
import math

from megatron.core.ssm.gated_delta_net import HAVE_FLA

from megagate.errors import UserError
from megagate.gate.layout import layout_from_args, query_groups
from megagate.model.pattern import BOUNDARY, DELTA_NET, layer_pattern
from megagate.platform import on_cpu


def check_layout(args: argparse.Namespace) -> None:
    """Check the parallel sizes against the model, the batch and the world.

    Args:
        args: parsed and completed, not yet validated by Megatron.

    Raises:
        UserError: the first thing that does not fit.
    """
    _check_attention(args)
    _check_world(args)
    if args.num_experts:
        _check_experts(args)
    if DELTA_NET in layer_pattern(args):
        _check_delta_net(args)
    _check_sequence(args)
    _check_batch(args)


def _require_divisible(number: int, what: str, divisor: int, by: str) -> None:
    if number % divisor:
        raise UserError(f"{what} is {number}, which {by} {divisor} does not divide: change one of the two")


def _stages(args: argparse.Namespace) -> int:
    """Return the pipeline stages, physical times virtual."""
    return layer_pattern(args).count(BOUNDARY) + 1


def _check_world(args: argparse.Namespace) -> None:
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    model_size = sizes[0] * sizes[1] * sizes[2]
    if args.world_size % model_size:
        raise UserError(
            f"{args.world_size} processes cannot hold tensor parallel {sizes[0]} x pipeline parallel {sizes[1]} x "
            f"context parallel {sizes[2]} = {model_size} ranks: start a multiple of {model_size} processes"
        )

    stages, pipeline = _stages(args), args.pipeline_model_parallel_size
    if stages > 1 and (stages % pipeline or pipeline == 1):
        raise UserError(
            f"--hybrid-layer-pattern has {stages} stages (separated by |), which do not fit "
            f"--pipeline-model-parallel-size {pipeline}"
        )


def _check_attention(args: argparse.Namespace) -> None:
    heads, tensor = args.num_attention_heads, args.tensor_model_parallel_size
    groups = query_groups(args)
    if tensor > heads:
        raise UserError(
            f"--tensor-model-parallel-size {tensor} is larger than --num-attention-heads {heads}: a rank needs a head"
        )
    _require_divisible(heads, "--num-attention-heads", tensor, "--tensor-model-parallel-size")
    _require_divisible(heads, "--num-attention-heads", groups, "--num-query-groups")
    if groups % tensor and tensor % groups:
        raise UserError(
            f"--num-query-groups {groups} and --tensor-model-parallel-size {tensor} do not fit: one must divide the "
            "other"
        )
    if args.ffn_hidden_size:
        _require_divisible(args.ffn_hidden_size, "--ffn-hidden-size", tensor, "--tensor-model-parallel-size")
    if args.kv_channels is None:
        _require_divisible(args.hidden_size, "--hidden-size", heads, "--num-attention-heads")
    layout = layout_from_args(args)
    rows = layout.total_rows
    if rows % tensor:
        change = "--kv-channels"
        if layout.gate.is_padded:
            change = f"--gate-row-alignment to a multiple of {tensor // math.gcd(groups, tensor)}"
        raise UserError(
            f"linear_qkv has {rows} rows, the gate's included, which --tensor-model-parallel-size {tensor} does not "
            f"divide: change {change}"
        )


def _check_experts(args: argparse.Namespace) -> None:
    experts, expert_parallel = args.num_experts, args.expert_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size
    _require_divisible(experts, "--num-experts", expert_parallel, "--expert-model-parallel-size")
    if args.swiglu and args.add_bias_linear and args.bias_swiglu_fusion:
        raise UserError("experts with --swiglu cannot have biases: add --disable-bias-linear")
    if args.moe_router_topk > experts:
        raise UserError(f"--moe-router-topk {args.moe_router_topk} is larger than --num-experts {experts}")
    if args.moe_ffn_hidden_size:
        _require_divisible(
            args.moe_ffn_hidden_size, "--moe-ffn-hidden-size", expert_tensor, "--expert-tensor-parallel-size"
        )
    expert_ranks = expert_parallel * expert_tensor * args.pipeline_model_parallel_size
    if args.world_size % expert_ranks:
        raise UserError(
            f"{args.world_size} processes cannot hold expert parallel {expert_parallel} x expert tensor parallel "
            f"{expert_tensor} x pipeline parallel {args.pipeline_model_parallel_size} = {expert_ranks} ranks: start a "
            f"multiple of {expert_ranks} processes"
        )
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel and not args.skip_train:
        raise UserError(
            f"experts with --tensor-model-parallel-size {args.tensor_model_parallel_size} are trained only under "
            "--sequence-parallel: add it"
        )


def _check_delta_net(args: argparse.Namespace) -> None:
    if not (HAVE_FLA or on_cpu()):
        raise UserError(
            "Gated DeltaNet (G) needs flash-linear-attention on GPUs, which cannot be imported: install it with "
            "`pip install 'megagate[gdn]'`"
        )
    if not args.swiglu:
        raise UserError("Gated DeltaNet (G) needs the activation SiLU: add --swiglu, which sets it for the whole model")
    if args.reset_attention_mask:
        raise UserError(
            "--reset-attention-mask has no effect on Gated DeltaNet (G), whose state goes on from document to "
            "document: leave it out"
        )
    key_heads, value_heads = args.linear_num_key_heads, args.linear_num_value_heads
    _require_divisible(value_heads, "--linear-num-value-heads", key_heads, "--linear-num-key-heads")
    ranks = args.tensor_model_parallel_size * args.context_parallel_size
    _require_divisible(
        key_heads, "--linear-num-key-heads", ranks, "--tensor-model-parallel-size x --context-parallel-size ="
    )


def _check_sequence(args: argparse.Namespace) -> None:
    context, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    if context > 1:
        _require_divisible(args.seq_length, "--seq-length", 2 * context, "twice --context-parallel-size, that is,")
    if args.sequence_parallel and tensor > 1:
        _require_divisible(
            args.seq_length // context, "the sequence length on one rank", tensor, "--tensor-model-parallel-size"
        )
    stages = _stages(args)
    if args.reset_attention_mask and stages > 2:
        raise UserError(
            f"--reset-attention-mask reaches only the first and the last of {stages} pipeline stages: use at most 2"
        )


def _check_batch(args: argparse.Namespace) -> None:
    if args.micro_batch_size is None:
        raise UserError("--micro-batch-size is not given: say how many sequences one rank computes at a time")
    ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    data_parallel = args.world_size // ranks
    step = args.micro_batch_size * data_parallel
    batch = args.global_batch_size or step
    if batch % step and not args.decrease_batch_size_if_needed:
        raise UserError(
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {args.micro_batch_size} x "
            f"data parallel {data_parallel} = {step}"
        )
    pipeline = args.pipeline_model_parallel_size
    virtual = _stages(args) // pipeline
    if virtual > 1 and (batch // step) % pipeline:
        raise UserError(
            f"{batch // step} micro batches per step are not a multiple of --pipeline-model-parallel-size {pipeline}, "
            "which virtual pipeline stages need: change --global-batch-size"
        )
