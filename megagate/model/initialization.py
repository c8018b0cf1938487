"""Initial weights that do not depend on the parallel layout.

Megatron seeds pipeline stages differently and draws experts from per-rank streams, so another layout starts from
another model. Under `--use-cpu-initialization`, whose purpose is that the tensor-parallel size makes no difference,
megagate goes all the way: every parameter is drawn from a generator seeded by the run's seed and the parameter's
global name, and each rank keeps its slice. Memory is bounded by the largest whole parameter; the distributions are
those of Megatron's config.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.extensions.transformer_engine import TERowParallelGroupedLinear, TERowParallelLinear
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel.layers import RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megagate.model.attention import GatedSelfAttention

ROW_PARALLEL = tuple(
    kind for kind in (RowParallelLinear, TERowParallelLinear, TERowParallelGroupedLinear) if isinstance(kind, type)
)
"""Linear layers at the end of a block; without Transformer Engine its names stand for something else."""


@torch.no_grad()
def initialize_by_name(model: list[MegatronModule], seed: int) -> list[MegatronModule]:
    """Draw every weight of the model's chunks anew, the same for all layouts; norms and biases are left alone.

    Args:
        model: the chunks of this rank, before any wrapping.
        seed: the run's seed.

    Returns:
        `model`, changed in place.
    """
    for chunk in model:
        drawn = 0
        init_methods = dict(_init_methods(chunk))
        for shard in _parameter_shards(chunk):
            init_method = init_methods.get(shard.data.untyped_storage().data_ptr())
            if init_method is not None:
                shard.data.copy_(_draw(shard, init_method, seed))
                drawn += shard.data.numel()
        storages = ((parameter.untyped_storage().data_ptr(), parameter) for parameter in chunk.parameters())
        weights = sum(parameter.numel() for address, parameter in storages if address in init_methods)
        if drawn != weights:
            raise RuntimeError(f"drew {drawn} of {weights} weights: a parameter is missing from the sharded state")
        for module in chunk.modules():
            if isinstance(module, GatedSelfAttention):
                module.reset_padding()
    return model


def _init_methods(chunk: MegatronModule) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
    """Yield (storage address, init method) of each weight."""
    config: TransformerConfig = chunk.config
    for module in chunk.modules():
        if isinstance(module, ROW_PARALLEL):
            init_method = config.output_layer_init_method
        elif isinstance(module, (VocabParallelEmbedding, nn.Embedding)):
            init_method = config.embedding_init_method
        elif isinstance(module, nn.Conv1d):  # of Gated DeltaNet, where Megatron keeps torch's distribution
            init_method = partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
        else:
            init_method = config.init_method
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                yield parameter.untyped_storage().data_ptr(), init_method
        if isinstance(module, GatedDeltaNet):
            yield module.A_log.untyped_storage().data_ptr(), partial(_log_uniform, limits=module.A_init_range)


def _log_uniform(tensor: Tensor, limits: tuple[float, float]) -> Tensor:
    """Fill with the logarithm of numbers between the limits (the decay rates of Gated DeltaNet, as Megatron's)."""
    return tensor.uniform_(*limits).log_()


def _parameter_shards(chunk: MegatronModule) -> Iterator[ShardedTensor]:
    """Yield this rank's slices of the global parameters; their data are views of the parameters."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = chunk.sharded_state_dict(metadata=metadata)
    apply_factories(state)
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            yield value


def _draw(shard: ShardedTensor, init_method: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    """Return the slice of the whole parameter that the shard covers, in fp32."""
    stacked = shard.prepend_axis_num  # experts: one whole matrix for each index of the leading axes
    name = f"{seed}:{shard.key}:{shard.global_offset[:stacked]}"
    digest = hashlib.sha256(name.encode()).digest()
    whole = torch.empty(shard.global_shape[stacked:], dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        init_method(whole)
    slices = zip(shard.global_offset[stacked:], shard.local_shape, strict=True)
    return whole[tuple(slice(offset, offset + size) for offset, size in slices)]
