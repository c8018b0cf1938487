"""Core attention on torch's scaled_dot_product_attention, with context parallelism.

Letters in shapes: s local query positions, t key positions, b batch, h local query heads, g local KV groups,
d channels per head, c context-parallel size.

Under context parallelism Megatron gives rank i the chunks i and 2c-1-i of the sequence cut into 2c chunks ("zig-zag"),
so that causal work is balanced. Keys and values are gathered over the group and put into sequence order; each rank's
two query chunks then attend to the keys up to their own end.
"""

import contextlib

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megagate.errors import UserError


class TorchCoreAttention(MegatronModule):
    """softmax(scale * Q K^T + mask) V for grouped-query attention (Vaswani et al. 2017; Ainslie et al. 2023).

    Takes the constructor arguments of Megatron's core attention modules.

    Raises:
        UserError: the config asks for something this module does not compute.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.softmax_type != "vanilla":
            raise UserError(
                f"--softmax-type {config.softmax_type} is not available in the torch backend: use vanilla, or gate the "
                "attention output, which removes attention sinks too"
            )
        if config.qk_clip:
            raise UserError("--qk-clip is not available in the torch backend, which does not keep the largest logit")
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = pg_collection.cp
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        # --apply-query-key-layer-scaling divides by the layer's number, and multiplies the logits by it again once they
        # are in fp32, in which this kernel keeps them anyhow.
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = tuple(config.window_size) if windowed else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [s, b, h, d].
            key: [t, b, g, d]; t == s in training.
            value: [t, b, g, d].
            attention_mask: bool, true where attention is forbidden, broadcastable to [b, h, s, t] with t the whole
                sequence; it replaces the causal mask, not the window. None for the mask that `attn_mask_type` names.
            attn_mask_type: overrides the type given at construction.
            attention_bias: not supported.
            packed_seq_params: not supported.

        Returns:
            [s, b, h*d] in the query's dtype.
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise UserError("the torch backend has no attention bias and no packed sequences (cu_seqlens)")
        size, rank = get_pg_size(self.cp_group), get_pg_rank(self.cp_group)
        if size > 1:
            key = zigzag_to_sequence(gather_from_sequence_parallel_region(key, group=self.cp_group), size)
            value = zigzag_to_sequence(gather_from_sequence_parallel_region(value, group=self.cp_group), size)
        # [s, b, h, d] -> [b, h, s, d]
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))

        # This rank's queries are two chunks of the sequence, or, with a key-value cache, the last ones.
        parts = query.chunk(2, dim=2) if size > 1 else (query,)
        length = parts[0].shape[2]
        starts = (rank * length, (2 * size - 1 - rank) * length) if size > 1 else (key.shape[2] - length,)

        mask_type = attn_mask_type or self.attn_mask_type
        if attention_mask is not None:
            mask = attention_mask.logical_not()
            if self.window is not None:
                position = torch.cat([torch.arange(start, start + length, device=query.device) for start in starts])
                mask = mask & self._within_window(position, key.shape[2])
            context = self._attend(query, key, value, mask=mask)
        elif mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal) and self.window is None:
            context = self._attend(query, key, value)
        else:
            chunks = zip(parts, starts, strict=True)
            contexts = [self._attend_causally(part, key, value, start) for part, start in chunks]
            context = torch.cat(contexts, dim=2) if len(contexts) > 1 else contexts[0]
        # [b, h, s, d] -> [s, b, h*d]
        return context.permute(2, 0, 1, 3).flatten(2)

    def _attend_causally(self, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        """Attend from positions start .. start+s-1 to the keys up to each (and within the window, if there is one)."""
        if start == 0 and key.shape[2] == query.shape[2] and self.window is None:
            return self._attend(query, key, value, causal=True)
        end = start + query.shape[2]
        position = torch.arange(start, end, device=query.device)
        mask = position.new_ones(len(position), end, dtype=torch.bool).tril(start)
        if self.window is not None:
            mask &= self._within_window(position, end)
        return self._attend(query, key[:, :, :end], value[:, :, :end], mask=mask)

    def _within_window(self, position: Tensor, keys: int) -> Tensor:
        """Return a bool mask [s, keys], true at keys that are not too far before the queries at `position` [s]."""
        assert self.window is not None
        before = self.window[0] if self.window[0] >= 0 else keys
        return torch.arange(keys, device=position.device) >= position[:, None] - before

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Call the kernel on [b, h, s, d]; `mask` is true where attention is allowed."""
        dropout = self.dropout if self.training else 0.0
        # Heads differ between tensor-parallel ranks, so their dropout must; under sequence parallelism it already does.
        separate_stream = dropout > 0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if separate_stream else contextlib.nullcontext():
            return scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=causal,
                scale=self.softmax_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )


def zigzag_to_sequence(gathered: Tensor, size: int) -> Tensor:
    """Order what `size` context-parallel ranks hold, concatenated on dimension 0 by rank, by sequence position."""
    chunks = gathered.chunk(2 * size)
    # Rank i holds chunks i and 2*size-1-i, so they stand at 2i and 2i+1.
    order = [2 * chunk if chunk < size else 2 * (2 * size - 1 - chunk) + 1 for chunk in range(2 * size)]
    return torch.cat([chunks[index] for index in order])
