"""Megatron's own models, and the checkpoints that its training writes of them, in ranks of `tests.distributed`.

Nothing here is megagate's but the platform that lets Megatron run without CUDA. Transformer Engine's layers need a GPU;
what they write differs from what the local layers write in the names of the norms, which a stock hybrid stack of
Transformer Engine has fused with the linear layer that follows, and in extra states that are not empty.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from tests.distributed import MEGATRON_RESETS
from tests.model.test_stock import stock_spec
from tests.model.training import BASE, SEQUENCE, VOCABULARY, Case, build, fill, micro_batches

LOCAL = (
    "--transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion "
    "--moe-token-dispatcher-type alltoall --eval-iters 0 --save-interval 2"
)


@dataclass(frozen=True)
class Stock:
    """A stock model to write a checkpoint of."""

    flags: str
    """Megatron's flags; with a layer pattern the model is a HybridModel, else a GPTModel."""
    save: str
    steps: int = 0
    """How many to take before the checkpoint, and again after it."""
    transformer_engine: bool = False
    """Whether to use Transformer Engine's names and extra states."""


def write(stock: Stock) -> tuple[Tensor | None, list[float]]:
    """Build the model with random weights, train, save as Megatron does, and return what `outcome` does."""
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.training import arguments
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        hybrid_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.checkpointing import save_checkpoint
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import setup_model_and_optimizer

    from megagate.checkpoint import torch_adam
    from megagate.platform import cpu
    from megagate.pretrain.train import use_prebuilt_index_builder

    for module_name, attribute in MEGATRON_RESETS:
        if module_name in sys.modules and not module_name.endswith("parallel_state"):
            getattr(sys.modules[module_name], attribute)()
    cpu.activate_training()
    torch_adam.apply()
    use_prebuilt_index_builder()
    with mock.patch.object(sys, "argv", ["stock", *f"{BASE} {LOCAL} {stock.flags} --save {stock.save}".split()]):
        args = arguments.parse_args()
    for name, value in cpu.ARGUMENTS.items():
        setattr(args, name, value)
    arguments.validate_args(args)
    set_global_variables(args)
    initialize_megatron(allow_no_cuda=True)
    if args.hybrid_layer_pattern:
        config = hybrid_config_from_args(args)
        config.hybrid_stack_spec = stock_spec(config.transformer)
        if stock.transformer_engine:
            layers = config.hybrid_stack_spec.submodules
            names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
            layers.attention_layer.submodules.sharded_state_dict_keys_map = names
            names = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
            layers.mlp_layer.submodules.sharded_state_dict_keys_map = names
            if layers.gdn_layer is not IdentityOp:
                names = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
                layers.gdn_layer.submodules.sharded_state_dict_keys_map = names
    else:
        config = gpt_config_from_args(args)

    def random_weights(model: list) -> list:
        fill(model)
        return model

    config.pre_wrap_hooks.append(random_weights)
    model, optimizer, scheduler = setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        cfg_container=pretrain_cfg_container_from_args(args, config),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    take_steps(model, optimizer, scheduler, stock.steps)
    with extra_states() if stock.transformer_engine else contextlib.nullcontext():
        save_checkpoint(2, model, optimizer, scheduler, 0)
    return outcome(model, optimizer, scheduler, stock.steps)


@contextlib.contextmanager
def extra_states() -> Iterator[None]:
    """Let linear layers have an extra state, as Transformer Engine's have."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    with contextlib.ExitStack() as stack:
        for linear in (ColumnParallelLinear, RowParallelLinear):
            stack.enter_context(mock.patch.object(linear, "get_extra_state", lambda self: io.BytesIO(b"fp8 scales")))
        yield


def take_steps(model: list, optimizer: object, scheduler: object, count: int) -> list[float]:
    """Take training steps on the batches of tests.model.training, and return the losses that this rank knows."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training.training import train_step

    from megagate.pretrain.batch import forward_step

    config = model[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    losses = []
    for step in range(count):
        batches = micro_batches(step, False, get_num_microbatches())
        result = train_step(forward_step, batches, model, optimizer, scheduler, config, get_forward_backward_func())
        losses += [float(result[0]["lm loss"])] if result[0] else []
    return losses


def outcome(model: list, optimizer: object, scheduler: object, steps: int) -> tuple[Tensor | None, list[float]]:
    """Return the model's logits, None where it is one stage of several, and then the losses of some steps."""
    from megatron.core import parallel_state

    whole = parallel_state.get_pipeline_model_parallel_world_size() == 1
    return logits(model) if whole else None, take_steps(model, optimizer, scheduler, steps)


@torch.no_grad()
def logits(model: list) -> Tensor:
    """Return the logits [batch, sequence, vocabulary] of fixed tokens, without the padding of the vocabulary."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    tokens = torch.randint(VOCABULARY, (4, SEQUENCE), generator=torch.Generator().manual_seed(11))
    positions = torch.arange(SEQUENCE).expand(4, -1).contiguous()
    model[0].eval()
    result = gather_from_tensor_model_parallel_region(model[0](tokens, positions, None))
    model[0].train()
    return result[..., :VOCABULARY]


def load(flags: str, steps: int = 0) -> tuple[Tensor | None, list[float]]:
    """Build megagate's model as the trainer does, with a checkpoint, and return what `outcome` does."""
    return outcome(*build(Case(flags=flags, initial=True)), steps)
