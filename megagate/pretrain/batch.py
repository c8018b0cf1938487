"""One micro batch and its loss: what Megatron's schedules ask of the caller."""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from megatron.core import mpu
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers
from torch import Tensor

from megagate.errors import UserError

stragglers = StragglerDetector()
"""Megatron's, of which there is one: it times what it is put around where --log-straggler is given."""

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def check_vocabulary(tokens: Tensor, vocabulary_size: int) -> None:
    """Raise UserError for a token that the embedding does not have.

    Under tensor parallelism Megatron's embedding takes such a token for one of another rank, and trains on nothing.
    """
    largest = int(tokens.max())
    if largest >= vocabulary_size:
        raise UserError(
            f"the data hold the token {largest}, but the model's vocabulary has {vocabulary_size} tokens: train with "
            "the --tokenizer-model that the data were preprocessed with"
        )


def get_batch(data_iterator: Iterator[dict[str, Tensor]] | None, vp_stage: int | None) -> dict[str, Tensor | None]:
    """Return this rank's part of the next micro batch.

    The first tensor-parallel rank reads, the others receive; context-parallel ranks keep their zig-zag part. Stages
    in the middle of a pipeline need no data and get None for every key.

    Returns:
        tokens, labels [b, s] int64; loss_mask [b, s] fp32; position_ids [b, s] int64; attention_mask [b, 1, s, S] bool
        (true where forbidden) or None. s is the local and S the whole sequence length.
    """
    args = get_args()
    first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    if not (first or last):
        return dict.fromkeys(BATCH_KEYS)
    batch: dict[str, Any] = dict.fromkeys((*BATCH_KEYS, "cu_seqlens"))
    if mpu.get_tensor_model_parallel_rank() == 0:
        sample = next(data_iterator)  # type: ignore[arg-type]  # this rank has one
        check_vocabulary(sample["tokens"], args.padded_vocab_size)
        batch |= {key: sample[key].cuda(non_blocking=True) for key in BATCH_KEYS if isinstance(sample.get(key), Tensor)}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        # Validation may use another size; every rank must broadcast the same shape.
        micro_batch_size=args.micro_batch_size if torch.is_grad_enabled() else args.eval_micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return {key: batch[key] for key in BATCH_KEYS}


def loss_function(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the cross entropy of the tokens that count.

    Args:
        loss_mask: [b, s] fp32, 1 where a token counts.
        losses: [b, s] per-token cross entropy in nats.

    Returns:
        The sum (fp32 scalar), the number of tokens that count (int32 scalar), and what is logged: "lm loss" as
        [sum, count], which Megatron adds up over micro batches and data-parallel ranks before it divides.
    """
    args = get_args()
    mask = loss_mask.view(-1)
    total = torch.sum(losses.view(-1).float() * mask)
    count = mask.sum()
    if args.check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=total,
            rejection_func=torch.isnan,
            message="NaN in the loss of a micro batch",
            tolerance=0.0,
            fatal=True,
        )
    report = torch.stack([total.detach(), count.detach()])
    return total, count.to(torch.int), {"lm loss": report}


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]] | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Run the model on one micro batch.

    Args:
        data_iterator: of micro batches, on ranks that read.
        model: a chunk, wrapped or not.
        return_schedule_plan: return what Megatron runs beside the pass of another micro batch instead of running it.

    Returns:
        The model's output (per-token losses [b, s] on the last stage, hidden states before it), or the plan that has
        it, and the function that turns it into a loss.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stragglers(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    loss_mask = cast(Tensor, batch["loss_mask"])  # None only where the schedule does not call the loss
    run = get_attr_wrapped_model(model, "build_schedule_plan") if return_schedule_plan else model
    with stragglers:
        output = run(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_function, loss_mask)
