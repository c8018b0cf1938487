"""The loss of windows of tokens, on any layout, through Megatron's own pipeline schedule.

A window whose length does not fit the layout is padded behind, where no token that counts sees it.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagate.evaluate.documents import Window
from megagate.evaluate.load import LoadedModel
from megagate.evaluate.masks import masks_and_positions


def summed_loss(loaded: LoadedModel, windows: Window, end_of_document: int | None = None, multiple: int = 1) -> Tensor:
    """Return this rank's part of the summed loss of the labels that count, in nats: fp64 scalar.

    All ranks of a model must call it with the same windows; the sum over all ranks is that of all windows. Labels are
    counted once, where they are computed: by the first tensor-parallel rank of the last pipeline stage.

    Args:
        loaded: the model.
        windows: several, as `megagate.evaluate.documents.batches` yields them.
        end_of_document: for a model that was trained with --reset-attention-mask or --reset-position-ids.
        multiple: of what the layout needs a length to be a multiple.
    """
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_batch_on_this_cp_rank

    batch = _batch(loaded, windows, end_of_document, multiple)
    size, length = batch["tokens"].shape
    part = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())

    def step(_: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
        losses = model(part["tokens"], part["position_ids"], part["attention_mask"], labels=part["labels"])
        return losses, lambda output, non_loss_data: output

    with torch.no_grad():
        losses = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=[loaded.model],
            num_microbatches=1,
            seq_length=length,
            micro_batch_size=size,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not mpu.is_pipeline_last_stage() or mpu.get_tensor_model_parallel_rank() > 0:
        return torch.zeros((), dtype=torch.float64, device=batch["tokens"].device)
    return (losses[0].double() * part["loss_mask"]).sum()


def _batch(loaded: LoadedModel, windows: Window, end_of_document: int | None, multiple: int) -> dict[str, Any]:
    """Return a batch under the names of training: int64 [b, s], loss_mask fp64 [b, s], attention_mask as there."""
    length = windows.tokens.shape[1] - 1
    padding = -length % multiple
    tokens = torch.from_numpy(np.pad(windows.tokens, ((0, 0), (0, padding)))).cuda()
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    index = torch.arange(inputs.shape[1], device=inputs.device)
    first = length - torch.from_numpy(windows.counted).to(index.device)  # of the labels that count, [b]
    mask, positions = masks_and_positions(loaded.args, inputs, end_of_document)
    return {
        "tokens": inputs,
        "labels": labels,
        "loss_mask": ((index >= first[:, None]) & (index < length)).double(),
        "position_ids": positions,
        "attention_mask": mask,
    }
