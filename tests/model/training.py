"""Training steps of tiny models as the trainer takes them, on any parallel layout, from the same weights and data.

A `Case` is a command line of `megagate.pretrain`. Everything from there on is the real thing: the arguments, Megatron's
set-up of model and optimizer, its training step, our forward step. Only weights and data are made here. Every weight is
random, norms and biases too, since ones and zeros hide errors; it is drawn by its global name, so each layout holds
slices of the same model. What a rank returns are its pieces of the global parameters, and `assemble` joins them.
"""

import contextlib
import hashlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagate.model.attention import GatedSelfAttention
from tests.distributed import MEGATRON_RESETS

VOCABULARY = 64
SEQUENCE = 16
GLOBAL_BATCH = 8

BASE = (
    "--hidden-size 32 --num-attention-heads 8 --group-query-attention --kv-channels 8 --swiglu --qk-layernorm "
    "--normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --make-vocab-size-divisible-by {VOCABULARY} "
    f"--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --global-batch-size {GLOBAL_BATCH} "
    # So large a limit never clips, but has the grad norm computed; so large an epsilon makes Adam's step smooth.
    "--clip-grad 1e9 --lr 1e-2 --min-lr 1e-2 --adam-eps 1e-2 --weight-decay 0.1 --train-iters 10 "
    "--rerun-mode disabled --logging-level 40"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tiny model on a layout: flags of the trainer, and how many steps to take."""

    flags: str
    steps: int = 1
    mask_loss: bool = False
    """Whether about a third of the tokens do not count."""
    save: str | None = None
    """A directory to save the weights to before the first step."""
    load: str | None = None
    """A directory to load the weights from, instead of drawing them."""
    initial: bool = False
    """Whether to keep the trainer's own initial weights, instead of drawing them."""
    stack_spec: Callable[[TransformerConfig], ModuleSpec] | None = None
    """What makes the spec of the layers, instead of ours."""

    @property
    def sharded_gradients(self) -> bool:
        """Whether a data-parallel rank has summed only its part of the gradients, in no order of whole parameters."""
        return "--use-distributed-optimizer" in self.flags

    @property
    def argv(self) -> list[str]:
        """The command line."""
        return f"{BASE} {self.flags}".split()


@dataclass(frozen=True)
class Piece:
    """A part of a global parameter that one rank holds: its place there, and its value."""

    key: str
    global_shape: tuple[int, ...]
    place: tuple[int | slice, ...]
    value: Tensor


@dataclass(frozen=True)
class RankResult:
    """What one rank knows after the last step."""

    losses: dict[str, float]
    """Of the last step: "lm loss" (only on the last pipeline stage) and the experts' losses."""
    grad_norm: float
    gradients: list[Piece]
    """Of the last step, summed over micro batches and ranks as the optimizer sees them; none where they are sharded."""
    updates: list[Piece]
    """What all steps together have added to the parameters."""


@dataclass
class Result:
    """What all ranks know, put together; the fields are those of `RankResult`."""

    losses: dict[str, float] = field(default_factory=dict)
    grad_norm: float = math.nan
    gradients: dict[str, Tensor] = field(default_factory=dict)
    updates: dict[str, Tensor] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------------------
# In the ranks


def train_all(cases: list[Case]) -> list[RankResult]:
    """Take the steps of several cases of one layout, each with a fresh model."""
    return [train(case) for case in cases]


def train(case: Case) -> RankResult:
    """Build model and optimizer as the trainer does, take the steps, and return this rank's part of the outcome."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training.training import train_step

    from megagate.pretrain.batch import forward_step

    model, optimizer, scheduler = build(case)
    config = model[0].config
    config.grad_scale_func = optimizer.scale_loss  # these two are set at the start of Megatron's loop
    config.finalize_model_grads_func = finalize_model_grads
    before = copies(model)
    for step in range(case.steps):
        iterators = [micro_batches(step, case.mask_loss, get_num_microbatches()) for _ in model]
        outcome = train_step(
            forward_step,
            iterators if len(model) > 1 else iterators[0],
            model,
            optimizer,
            scheduler,
            config,
            get_forward_backward_func(),
        )
        losses = {name: float(value) for name, value in outcome[0].items()} | expert_losses(config)
    updates = copies(model)
    for old, new in zip(before, updates, strict=True):
        new.value.sub_(old.value)
    gradients: list[Piece] = []
    if not case.sharded_gradients:
        with gradients_for_parameters(model):
            gradients = copies(model)
    return RankResult(losses, float(outcome[5]), gradients, updates)


def build(case: Case) -> tuple[list, object, object]:
    """Return the wrapped model chunks, the optimizer and the scheduler that the trainer would train with."""
    from megatron.core.enums import ModelType
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import setup_model_and_optimizer

    from megagate.checkpoint import torch_adam
    from megagate.model.builder import model_config
    from megagate.platform import cpu
    from megagate.pretrain import gate_optimizer
    from megagate.pretrain.arguments import parse
    from megagate.pretrain.train import use_prebuilt_index_builder

    for module_name, attribute in MEGATRON_RESETS:  # of the case before; the groups stay, since the layout does
        if module_name in sys.modules and not module_name.endswith("parallel_state"):
            getattr(sys.modules[module_name], attribute)()
    RotaryEmbedding.forward.cache_clear()  # it keeps models alive, and with them process groups and their threads
    cpu.activate_training()
    torch_adam.apply()
    gate_optimizer.apply()
    use_prebuilt_index_builder()
    args = parse(case.argv)
    initialize_megatron(allow_no_cuda=True)
    config = model_config(args)
    if case.stack_spec:
        config.hybrid_stack_spec = case.stack_spec(config.transformer)
    config.pre_wrap_hooks.append(lambda model: set_weights(model, case))
    return setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        cfg_container=pretrain_cfg_container_from_args(args, config),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def set_weights(model: list[MegatronModule], case: Case) -> list[MegatronModule]:
    """Draw the weights by name, or load them, and save them where that is asked for."""
    from megatron.core import dist_checkpointing

    if case.load:
        for index, chunk in enumerate(model):
            state = {f"model{index}": sharded_state(chunk)}
            chunk.load_state_dict(dist_checkpointing.load(state, case.load)[f"model{index}"])
    elif not case.initial:
        fill(model)
    if case.save:
        state = {f"model{index}": sharded_state(chunk) for index, chunk in enumerate(model)}
        dist_checkpointing.save(state, case.save)
    return model


@torch.no_grad()
def fill(model: list[MegatronModule]) -> None:
    """Draw every parameter from a generator seeded by its global name; padding rows of a gate stay zero."""
    for chunk in model:
        drawn = 0
        for piece in pieces(chunk):
            seed = int.from_bytes(hashlib.sha256(piece.key.encode()).digest()[:7], "big")
            whole = torch.randn(piece.global_shape, generator=torch.Generator().manual_seed(seed))
            whole *= 0.2
            plain = "out_norm" in piece.key or not chunk.config.layernorm_zero_centered_gamma
            if "norm" in piece.key and piece.key.endswith("weight") and plain:
                whole += 1
            piece.value.copy_(whole[piece.place])
            drawn += piece.value.numel()
        assert drawn == sum(parameter.numel() for parameter in chunk.parameters())
        for module in chunk.modules():
            if isinstance(module, GatedSelfAttention):
                module.reset_padding()


def pieces(chunk: MegatronModule, buffers: bool = False) -> Iterator[Piece]:
    """Yield this rank's pieces of the global parameters, and buffers, whose values are views of the parameters."""
    held = [*chunk.parameters(), *(chunk.buffers() if buffers else ())]
    storages = {tensor.untyped_storage().data_ptr() for tensor in held}
    state = sharded_state(chunk)
    apply_factories(state)
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor) and shard.data.untyped_storage().data_ptr() in storages:
            stacked = shard.prepend_axis_num  # experts: an axis that only the global parameter has
            ranges = zip(shard.global_offset[stacked:], shard.local_shape, strict=True)
            place = (*shard.global_offset[:stacked], *(slice(start, start + size) for start, size in ranges))
            yield Piece(shard.key, tuple(shard.global_shape), place, shard.data)


def sharded_state(chunk: MegatronModule) -> dict:
    """Return Megatron's sharded state dict of a model chunk."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return chunk.sharded_state_dict(metadata={"dp_cp_group": group})


def copies(model: list) -> list[Piece]:
    """Return the pieces of all wrapped chunks, with values of their own."""
    return [
        Piece(piece.key, piece.global_shape, piece.place, piece.value.detach().clone())
        for chunk in model
        for piece in pieces(chunk.module)
    ]


@contextlib.contextmanager
def gradients_for_parameters(model: list) -> Iterator[None]:
    """Let every parameter hold its gradient, so that whatever names and shards parameters does so with gradients."""
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    values = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad
    try:
        yield
    finally:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value


def micro_batches(step: int, mask_loss: bool, count: int) -> Iterator[dict[str, Tensor]]:
    """Yield this rank's micro batches of a step; their contents do not depend on the data-parallel size."""
    from megatron.training import get_args

    generator = torch.Generator().manual_seed(3000 + step)
    tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    mask = (torch.rand(GLOBAL_BATCH, SEQUENCE, generator=generator) > 0.35).float()
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = list(torch.arange(GLOBAL_BATCH).split(get_args().micro_batch_size))[rank::size]
    assert len(mine) == count
    for rows in mine:
        yield {
            "tokens": tokens[rows, :-1].contiguous(),
            "labels": tokens[rows, 1:].contiguous(),
            "loss_mask": mask[rows] if mask_loss else torch.ones(len(rows), SEQUENCE),
            "position_ids": torch.arange(SEQUENCE).expand(len(rows), -1).contiguous(),
        }


def expert_losses(config) -> dict[str, float]:
    """Return the experts' losses as Megatron logs them, summed over layers here so that none can hide another."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    if not config.num_moe_experts:
        return {}
    names = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
    names["global_aux_loss"] = "global_load_balancing_loss"
    kind = config.moe_router_load_balancing_type
    tracked = [names[kind]] if kind in names and config.moe_aux_loss_coeff else []
    tracked += ["z_loss"] if config.moe_z_loss_coeff is not None else []
    losses: dict[str, Tensor] = {}
    get_moe_metrics_tracker().report(
        loss_scale=1 / get_num_microbatches(),
        iteration=1,
        force_initialize=True,
        track_names=tracked,
        num_layers=config.num_layers,
        total_loss_dict=losses,
    )
    return {name: float(value) for name, value in losses.items()}


# ---------------------------------------------------------------------------------------------------------------------
# In the process that asks


def assemble(ranks: list[RankResult]) -> Result:
    """Put together what the ranks hold.

    Raises:
        AssertionError: ranks disagree about a loss, the grad norm or a replicated parameter, or a part is missing.
    """
    result = Result(grad_norm=ranks[0].grad_norm)
    for rank in ranks:
        assert rank.grad_norm == result.grad_norm
        for name, value in rank.losses.items():
            assert math.isclose(value, result.losses.setdefault(name, value), rel_tol=1e-6)
    result.gradients = join([piece for rank in ranks for piece in rank.gradients])
    result.updates = join([piece for rank in ranks for piece in rank.updates])
    return result


def join(parts: list[Piece]) -> dict[str, Tensor]:
    """Return the global parameters; replicas must agree, and every element must be held by someone."""
    joined: dict[str, Tensor] = {}
    for part in parts:
        whole = joined.setdefault(part.key, torch.full(part.global_shape, math.nan))
        known = whole[part.place]
        difference = (known - part.value).abs().nan_to_num().max()
        assert difference <= 1e-6 * part.value.abs().max(), f"replicas of {part.key} differ by {difference}"
        whole[part.place] = torch.where(known.isnan(), part.value, known)
    for key, whole in joined.items():
        assert not whole.isnan().any(), f"no rank holds a part of {key}, or it is not a number"
    return joined


def worst_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative error of a parameter, and its name: the difference over the largest expected value.

    Rows with small values must not hide behind others, as gate rows could behind query rows: a row that is less than a
    tenth of the largest is held to ten times its own size, but to no less than a tenth of the largest, since what is
    rounded away there is of the size of the terms that cancel. For the same reason vectors, whose gradients are sums
    over all tokens and heads, are held to twice their size: rounding alone has been seen to reach 8e-6 of it.
    """
    assert actual.keys() == expected.keys()
    worst = (0.0, "")
    for key, value in expected.items():
        assert actual[key].shape == value.shape
        largest = float(value.abs().max())
        if value.dim() > 1:
            scale = (10 * value.abs().amax(dim=-1, keepdim=True)).clamp(min=largest / 10, max=largest)
        else:
            scale = torch.tensor(2 * largest)
        worst = max(worst, (float(((actual[key] - value).abs() / scale).max()), key))
    return worst
