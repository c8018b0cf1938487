"""Whether the checkpoint that a run loads is of the model, optimizer, schedule and data that the run describes.

Megatron compares shapes, so a gate of the same size in another place would load without a word; an optimizer or a
schedule that does not fit ends in an assertion on every rank once the model is built. Here both are one sentence before
any process group exists.
"""

import argparse
from pathlib import Path
from typing import Any

from megagate.checkpoint import warm_start
from megagate.checkpoint.load import RELEASE, common_state
from megagate.checkpoint.names import translate_on_load
from megagate.errors import UserError
from megagate.gate.config import describe, gate_config_from_args
from megagate.model.pattern import (
    BOUNDARY,
    DELTA_NET,
    GPT,
    derive_pattern,
    expert_blocks,
    is_gpt,
    linear_attention_blocks,
)
from megagate.pretrain import data_record

MODEL_ARGUMENTS = (
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "swiglu",
    "squared_relu",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "softmax_type",
    "multi_latent_attention",
    "experimental_attention_variant",
    "heterogeneous_layers_config_path",
    "rotary_interleaved",
    "untie_embeddings_and_output_weights",
)
"""Arguments that change what the model computes from its weights, or their shapes."""

CONTEXT_ARGUMENTS = (
    "position_embedding_type",
    "rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "mscale",
    "mscale_all_dim",
    "rotary_base",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "window_size",
)
"""Those that a run may change which goes on with the weights at another context length."""


def check_fits(args: argparse.Namespace, checkpoint: Path) -> None:
    """Check that the run described by `args` can go on from the checkpoint, and prepare the process to load it.

    Args:
        args: validated; `warm_start_from` is set by `choose_start`.
        checkpoint: from `choose_checkpoint`; one in another than Megatron's distributed format is not looked into.

    Raises:
        UserError: names the first thing that differs, and both values.
    """
    if not (checkpoint / "metadata.json").is_file():
        return
    translate_on_load()
    common = common_state(checkpoint)
    saved = common.get("args")
    if not isinstance(saved, argparse.Namespace):
        return
    starts_anew = args.finetune or checkpoint.name == RELEASE or checkpoint.parent != Path(args.load or "")
    _check_model(args, saved, checkpoint, CONTEXT_ARGUMENTS if not starts_anew else ())
    _check_vocabulary(args, saved, checkpoint)
    if starts_anew:
        args.no_load_optim = True  # Megatron would take over the optimizer of a GPTModel all the same
    if not (args.no_load_optim or getattr(saved, "no_save_optim", None)):
        _check_optimizer(args, common, checkpoint)
        _check_schedule(args, common, checkpoint)
    if not (starts_anew or args.skip_train):
        _check_data(args, saved, checkpoint)
        args.spike_averages = getattr(saved, "spike_averages", None)  # of pretrain/spikes.py
    warm_start.prepare(args)


def _differs(checkpoint: Path, saved: str, here: str, mend: str) -> UserError:
    return UserError(f"{checkpoint} was written with {saved}, but this run has {here}: {mend}")


def _check_model(
    args: argparse.Namespace, saved: argparse.Namespace, checkpoint: Path, resume_only: tuple[str, ...]
) -> None:
    saved_gate, gate = gate_config_from_args(saved), gate_config_from_args(args)
    if args.warm_start_from is None and describe(saved_gate) != describe(gate):
        mend = "use the same"
        if saved_gate.is_baseline:
            mend += ", or add --gate-warm-start to give the model a new gate"
        raise _differs(checkpoint, f"the gate {describe(saved_gate)}", describe(gate), mend)
    if is_gpt(args) and _pattern(saved) is not None:
        raise _differs(
            checkpoint, "the hybrid model", f"--model-impl {GPT}", "leave that out; the other way round works"
        )
    layers = _layers(saved), _layers(args)
    if layers[0] is not None and layers[0] != layers[1]:
        raise _differs(checkpoint, f"the layers {layers[0]}", str(layers[1]), "use the same")
    check_delta_net_norm(saved, checkpoint, getattr(args, "layernorm_zero_centered_gamma", False))
    kinds = [getattr(given, "position_embedding_type", "rope") for given in (saved, args)]
    if kinds[0] != kinds[1] and not set(kinds) <= {"rope", "yarn"}:
        raise _differs(checkpoint, f"--position-embedding-type {kinds[0]}", kinds[1], "use the same")
    for name in (*MODEL_ARGUMENTS, *resume_only):
        if not hasattr(saved, name) or not hasattr(args, name):
            continue  # written by another version of Megatron
        values = getattr(saved, name), getattr(args, name)
        if values[0] != values[1]:
            mend = (
                "use the same" if name in MODEL_ARGUMENTS else "use the same, or add --finetune to start anew from it"
            )
            raise _differs(checkpoint, f"{_flag(name)} {values[0]}", str(values[1]), mend)


def check_delta_net_norm(saved: argparse.Namespace, checkpoint: Path, is_shifted: bool = False) -> None:
    """Check that the output norm of Gated DeltaNet means what megagate's does; name and shape do not tell.

    Args:
        saved: the arguments in the checkpoint.
        checkpoint: an iteration's directory.
        is_shifted: whether the run that loads it has --apply-layernorm-1p; an old checkpoint may not say it itself.

    Raises:
        UserError: the checkpoint is Megatron's own, of a model with --apply-layernorm-1p.
    """
    is_megagates = hasattr(saved, "gate_preset")
    is_shifted = getattr(saved, "layernorm_zero_centered_gamma", is_shifted)
    if DELTA_NET in (_layers(saved) or "") and is_shifted and not is_megagates:
        raise UserError(
            f"{checkpoint} is Megatron's own, with Gated DeltaNet and --apply-layernorm-1p: its out_norm.weight is "
            "w - 1, where megagate has w; add 1 to it first"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _pattern(args: argparse.Namespace) -> str | None:
    """Return the layer pattern; None for a GPT model."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    return pattern or getattr(args, "hybrid_override_pattern", None)  # the name in older versions of Megatron


def _layers(args: argparse.Namespace) -> str | None:
    """Return the layer pattern without pipeline boundaries, also of a GPT model; None where too little is known."""
    pattern = _pattern(args)
    if pattern is not None:
        return pattern.replace(BOUNDARY, "")
    blocks = getattr(args, "num_layers", None)
    if blocks is None:
        return None
    has_experts = expert_blocks(blocks, getattr(args, "moe_layer_freq", 1), getattr(args, "num_experts", None))
    is_linear = linear_attention_blocks(blocks, getattr(args, "linear_attention_freq", None))
    return derive_pattern(has_experts, is_linear, [blocks])


def _check_vocabulary(args: argparse.Namespace, saved: argparse.Namespace, checkpoint: Path) -> None:
    size, now = getattr(saved, "tokenizer_vocab_size", None), args.tokenizer_vocab_size
    if size == now:  # with --vocab-size both may be that, whatever the tokenizers; it may have got more tokens
        size, now = getattr(saved, "tokenizer_own_vocab_size", None), args.tokenizer_own_vocab_size
        is_any = saved.tokenizer_type == "NullTokenizer"  # as of an import without tokenizer: all rows are its tokens
        if size is not None and (size < now or is_any):
            return
    if size is not None and size != now:
        raise UserError(
            f"{checkpoint} was written with a tokenizer of {size} tokens, but {args.tokenizer_model or 'this one'} has "
            f"{now}: use the same --tokenizer-model"
        )


def _check_data(args: argparse.Namespace, saved: argparse.Namespace, checkpoint: Path) -> None:
    before = getattr(saved, "data_record", None)  # older checkpoints have none
    if before is None or args.data_record is None:
        return
    for was, now in data_record.changes(before, args.data_record):
        if not args.allow_data_change:
            raise _differs(checkpoint, was, now, "use the same, or add --allow-data-change to go on with these data")
        if args.rank == 0:
            print(f"megagate: {checkpoint} was written with {was}; now it is {now}, as --allow-data-change allows")


def _check_optimizer(args: argparse.Namespace, common: dict[str, Any], checkpoint: Path) -> None:
    saved, afresh = common["args"], "add --no-load-optim to load the weights only"
    kinds = _optimizer_kind(saved), _optimizer_kind(args)
    if kinds[0] != kinds[1]:
        raise _differs(checkpoint, kinds[0], kinds[1], f"use the same, or {afresh}")
    if args.num_experts and 0 not in common.get("optimizer", {0: None}):
        raise UserError(
            f"{checkpoint} has the state of experts and other weights in one optimizer, as Megatron writes it without "
            f"expert parallelism: {afresh}"
        )
    sharding = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if sharding == "dp_reshardable" and _pattern(saved) is None and not is_gpt(args):
        raise UserError(
            f"{checkpoint} is of Megatron's GPTModel, with the optimizer's state as it lay in memory, where it lies "
            f"otherwise here: {afresh}, or write it with --dist-ckpt-optim-fully-reshardable"
        )
    layouts = _optimizer_layout(saved), _optimizer_layout(args)
    if sharding == "dp_reshardable" and layouts[0] != layouts[1]:
        raise _differs(
            checkpoint,
            f"{layouts[0]} and --no-dist-ckpt-optim-fully-reshardable",
            layouts[1],
            f"use the same sizes, or {afresh}",
        )


def _optimizer_kind(args: argparse.Namespace) -> str:
    """Name the optimizer, and the precision where its state depends on that."""
    optimizer = getattr(args, "optimizer", "adam")
    if getattr(args, "use_distributed_optimizer", False):
        return f"--optimizer {optimizer} --use-distributed-optimizer"
    precision = next((name for name in ("bf16", "fp16") if getattr(args, name, False)), "fp32")
    return f"--optimizer {optimizer} in {precision} without --use-distributed-optimizer"


def _optimizer_layout(args: argparse.Namespace) -> str:
    kinds = ("tensor", "pipeline", "expert")
    return ", ".join(f"{kind} parallel {getattr(args, f'{kind}_model_parallel_size', 1)}" for kind in kinds)


def _check_schedule(args: argparse.Namespace, common: dict[str, Any], checkpoint: Path) -> None:
    saved = common.get("opt_param_scheduler") or {}
    if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler:
        return
    for key, (what, value) in _schedule(args).items():
        if key in saved and saved[key] != value:
            raise _differs(
                checkpoint,
                f"{what} {saved[key]}",
                str(value),
                "use the same, or add --override-opt-param-scheduler to follow this run's schedule, or "
                "--use-checkpoint-opt-param-scheduler to keep the checkpoint's",
            )


def _schedule(args: argparse.Namespace) -> dict[str, tuple[str, Any]]:
    """Return key in the checkpoint -> (what it is, value) of the schedule, whose lengths Megatron counts in samples."""
    unit, size = ("samples", 1) if args.train_samples else ("iters", args.global_batch_size)
    length = getattr(args, f"train_{unit}")
    if not length:
        return {}  # nothing to train
    decay = size * (getattr(args, f"lr_decay_{unit}") or length)
    warmup = size * getattr(args, f"lr_warmup_{unit}")
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    counted = "" if unit == "samples" else " in samples (times --global-batch-size)"
    return {
        "max_lr": ("--lr", args.lr),
        "min_lr": ("--min-lr", args.min_lr),
        "lr_decay_style": ("--lr-decay-style", args.lr_decay_style),
        "lr_warmup_steps": (f"a learning rate warm-up{counted} of", warmup),
        "lr_decay_steps": (f"--lr-decay-{unit}{counted}", decay),
        "wd_incr_steps": (f"--train-{unit}{counted}", size * length),
        "start_wd": ("--start-weight-decay", args.start_weight_decay),
        "end_wd": ("--end-weight-decay", args.end_weight_decay),
        "wd_incr_style": ("--weight-decay-incr-style", args.weight_decay_incr_style),
    }
