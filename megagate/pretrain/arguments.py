"""Megatron's arguments, completed: recipe, gate flags, blocks, sensible defaults, and early refusals.

Everything that can be refused is refused here, before a process group exists. Megatron parses and validates; what it
asserts about the user's input is passed on as one sentence.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from megatron.training import arguments as megatron_arguments
from megatron.training import global_vars
from megatron.training.global_vars import get_tokenizer, set_global_variables

from megagate.checkpoint import background
from megagate.checkpoint.fit import check_fits
from megagate.checkpoint.save import add_keep_arguments, check_keep
from megagate.checkpoint.warm_start import choose_start
from megagate.data.tokenizer import BYTE_LEVEL, build_as_megatron
from megagate.data.validate import check_indexed_dataset
from megagate.errors import UserError, reason
from megagate.evaluate.extension import check_yarn
from megagate.gate.config import (
    MEGATRON_GATE_PRESET,
    GateConfig,
    add_gate_arguments,
    gate_config_from_args,
    preset_name,
)
from megagate.model.backends import torch_backend
from megagate.model.builder import model_config
from megagate.model.pattern import (
    BOUNDARY,
    DELTA_NET,
    GPT,
    HYBRID,
    check_pattern,
    derive_pattern,
    expert_blocks,
    is_gpt,
    layer_pattern,
    linear_attention_blocks,
    restate_in_layers,
    stage_sizes,
)
from megagate.parser import HelpFormatter, Parser
from megagate.platform import cpu, on_cpu
from megagate.pretrain import data_record, fim
from megagate.pretrain.backend import add_fp8_arguments, choose_backend, set_fusions
from megagate.pretrain.datasets import dataset_prefixes
from megagate.pretrain.dispatcher import choose_dispatcher
from megagate.pretrain.gate_checks import add_gate_training_arguments, check_gate
from megagate.pretrain.layout import check_layout
from megagate.pretrain.refusals import check_backend
from megagate.pretrain.spikes import add_spike_arguments, check_spikes
from megagate.pretrain.validation import check_validation_sets
from megagate.recipe import merge_recipe
from megagate.telemetry.loop import add_telemetry_arguments, check_telemetry

DEFAULTS: dict[str, Any] = {
    # Expert-tensor parallelism would follow the tensor-parallel size and cut small experts smaller.
    "expert_tensor_parallel_size": 1,
    # Megatron's default gathers every token on every rank; see megagate/pretrain/dispatcher.py.
    "moe_token_dispatcher_type": None,
    # Router logits in bf16 make the choice of experts a matter of rounding.
    "moe_router_dtype": "fp32",
    # A checkpoint that can be loaded on other parallel sizes, optimizer included.
    "dist_ckpt_optim_fully_reshardable": True,
    # Attention masks itself causally; see complete() for --reset-attention-mask.
    "create_attention_mask_in_dataloader": False,
    # Without a value Megatron fails where it counts evaluations, also with --eval-iters 0.
    "eval_interval": 1000,
    # Chosen by what the machine has; see megagate/pretrain/backend.py.
    "transformer_impl": None,
    # Where Transformer Engine is installed and has them.
    "moe_permute_fusion": True,
    "moe_router_fusion": True,
}
"""megagate's defaults where Megatron's own are traps; a flag on the command line wins."""

NOT_AVAILABLE: dict[str, str] = {
    "fp4": "--fp4-format is not there: use --fp8-format",
    "multi_latent_attention": "--multi-latent-attention has no gate here: leave it out",
    "fp32_residual_connection": "--fp32-residual-connection is not available in the torch backend: leave it out",
    "qk_l2_norm": "--qk-l2-norm is not available in the torch backend: use --qk-layernorm",
    "spec": "--spec is not needed: the layers follow from the gate flags; leave it out",
    "mtp_num_layers": "--mtp-num-layers (multi-token prediction) is not there yet: leave it out",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path is not supported: leave it out",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking needs packed attention, which the torch "
    "backend does not have: use --reset-attention-mask",
    "sft": "--sft (supervised fine-tuning) is not there: leave it out",
    "per_dataset_sequences_path": "--per-dataset-sequences-path is not there: leave it out, lengths are read anyway",
    "use_checkpoint_args": "--use-checkpoint-args is not there yet: give the recipe that wrote the checkpoint",
    "yaml_cfg": "--yaml-cfg is Megatron's experimental format: write a --recipe instead",
}
"""Flags that would be ignored or fail deep inside, with the sentence that refuses them."""

LINEAR_ATTENTION = "gated_delta_net"
"""Megatron's name for the layer `G` of a pattern."""

GATE_MODULE = "gate"
"""What to write after --recompute-modules to have gated tensors rebuilt in the backward pass."""

POSITIVE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "num_experts",
    "moe_router_topk",
    "moe_layer_freq",
    "linear_attention_freq",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "keep_last",
    "keep_every",
    "spike_rollback",
    "spike_patience",
    "spike_warmup",
    "telemetry_rows",
)
"""Arguments that count something there must be one of, where they are given."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse, complete, check and validate the command line, and make the result Megatron's global arguments.

    Args:
        argv: the command line without the program's name.

    Raises:
        UserError: something in the command line, the recipe, the data or the checkpoint is wrong.
    """
    return finish(read(argv))


def finish(args: argparse.Namespace) -> argparse.Namespace:
    """Check the data and the checkpoint that `args` from `read` name, and have Megatron validate all of it.

    Raises:
        UserError: something in the data, the checkpoint or the arguments is wrong.
    """
    check_data(args)
    checkpoint = choose_start(args)
    validate(args)
    # What the checkpoints say about the data; as in check_data, the first rank of a machine looks.
    args.data_record = data_record.record(args) if _is_first_of_machine() else None
    args.data_record_is_common = False
    if checkpoint is not None:
        check_fits(args, checkpoint)
    return args


def read(argv: Sequence[str], elsewhere: bool = False) -> argparse.Namespace:
    """Return the arguments of the command line and its recipe, completed and checked against the layout.

    Needs no data, no checkpoint and no process group; WORLD_SIZE in the environment says for how many processes.
    `elsewhere` says that they are of a run on other machines, so that this one need not have what they need.

    Raises:
        UserError: something in the command line or the recipe is wrong.
    """
    parser, gate_flags = build_parser()
    tokens = merge_recipe(argv, parser, gate_flags)
    # For its errors: Megatron's parse_args makes a parser of its own, and acts on what is refused here.
    refuse_unavailable(parser.parse_args(tokens))
    typed, sys.argv = sys.argv, ["megagate.pretrain", *tokens]
    try:
        args = megatron_arguments.parse_args(_add_arguments)
    finally:
        sys.argv = typed
    complete(args, elsewhere)
    check_layout(args)
    check_backend(args, gate_config_from_args(args))
    if on_cpu():  # after what is refused, which a run on GPUs that is planned here need not share
        vars(args).update(cpu.ARGUMENTS)
    return args


def build_parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser that knows every flag, and which of them are gate flags."""
    parser = Parser(prog="megagate.pretrain", allow_abbrev=False, formatter_class=HelpFormatter)
    megatron_arguments.add_megatron_arguments(parser)
    before = set(parser._option_string_actions)
    add_gate_arguments(parser)
    gate_flags = [*sorted(set(parser._option_string_actions) - before), "--attention-output-gate"]
    _add_own_arguments(parser)
    return parser, gate_flags


def _add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_gate_arguments(parser)
    _add_own_arguments(parser)
    return parser


def _add_own_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("megagate")
    group.add_argument("--recipe", metavar="FILE", help="YAML file of flags; the command line overrides it")
    group.add_argument("--omit", nargs="+", metavar="KEY", help="keys of the recipe to leave out")
    group.add_argument(
        "--allow-fresh-start",
        action="store_true",
        help="train from scratch when --load names a directory without a checkpoint, instead of stopping",
    )
    group.add_argument(
        "--allow-data-change",
        action="store_true",
        help="resume although the data, their blend, split, seed, sequence length or number of epochs have changed, "
        "so that some samples may come again and others never",
    )
    group.add_argument(
        "--model-impl",
        choices=(HYBRID, GPT),
        default=HYBRID,
        help="which of Megatron's models holds the layers: HybridModel (default), or GPTModel, which alone has "
        "--overlap-moe-expert-parallel-comm; training computes the same",
    )
    group.add_argument(
        "--gate-warm-start",
        action="store_true",
        help="give an ungated model, whose checkpoint --pretrained-checkpoint or --load names, a new gate; once --load "
        "or --save holds a checkpoint of the gated model, the same command line goes on from that",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything and build one rank of --world-size without memory, on one CPU process; train nothing",
    )
    group.add_argument(
        "--world-size", type=int, dest="dry_run_world_size", metavar="N", help="how many ranks a --dry-run is about"
    )
    group.add_argument(
        "--rank", type=int, dest="dry_run_rank", metavar="K", help="which of them it builds; the first if not given"
    )
    group.add_argument(
        "--verbose", action="store_true", help="show everything Megatron prints, instead of sending it to the log file"
    )
    group.add_argument(
        "--no-dist-ckpt-optim-fully-reshardable",
        action="store_false",
        dest="dist_ckpt_optim_fully_reshardable",
        help="write optimizer states as they lie on the ranks: faster, but they load on the same TP, PP and EP only",
    )
    for what in ("permute", "router"):
        group.add_argument(
            f"--no-moe-{what}-fusion",
            action="store_false",
            dest=f"moe_{what}_fusion",
            help=f"leave out Transformer Engine's fused {what}, which is used where it is installed",
        )
    group.add_argument(
        "--no-gate-fusion",
        action="store_false",
        dest="gate_fusion",
        help="compute the gate with compiled torch operators on a GPU, instead of the Triton kernel",
    )
    add_gate_training_arguments(parser)
    add_fp8_arguments(parser)
    add_telemetry_arguments(parser)
    add_keep_arguments(parser)
    background.add_background_arguments(parser)
    add_spike_arguments(parser)
    types = parser._option_string_actions["--tokenizer-type"]
    types.choices = [*(types.choices or ()), BYTE_LEVEL]
    parser.set_defaults(**DEFAULTS)


def refuse_unavailable(args: argparse.Namespace) -> None:
    """Raise UserError for the first flag that is `NOT_AVAILABLE`."""
    for name, sentence in NOT_AVAILABLE.items():
        if getattr(args, name):
            raise UserError(sentence)


def complete(args: argparse.Namespace, elsewhere: bool = False) -> None:
    """Fill in what follows from other arguments: gate, layer pattern, backend.

    Raises:
        UserError: flags are missing, contradict each other or are not available.
    """
    choose_backend(args, elsewhere)
    choose_dispatcher(args, elsewhere)
    if args.dry_run_world_size is not None or args.dry_run_rank is not None:
        raise UserError(
            "--world-size and --rank are for --dry-run: add it, or leave them out: a run has them from its launcher"
        )
    gate = gate_config_from_args(args)
    args.attention_output_gate = preset_name(gate) == MEGATRON_GATE_PRESET
    for name in ("hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"):
        if getattr(args, name) is None:
            raise UserError(f"--{name.replace('_', '-')} is not given: give it on the command line or in the recipe")
    check_positive(args)
    if args.num_query_groups is not None and args.num_query_groups > 1 and not args.group_query_attention:
        raise UserError(
            f"--num-query-groups {args.num_query_groups} has no effect without --group-query-attention: add it"
        )
    if args.save is not None and args.save_interval is None:
        raise UserError("--save is given without --save-interval: say after how many iterations to save")
    if args.tokenizer_type is None:
        raise UserError("--tokenizer-type is not given: say which tokenizer the data were made with")
    check_schedule(args)
    check_telemetry(args)
    check_keep(args)
    background.choose(args)
    check_spikes(args)
    set_recompute(args, gate)
    set_pattern(args)
    check_gate(args, gate)
    if args.position_embedding_type == "yarn":
        check_yarn(args)
    if args.reset_position_ids and args.position_embedding_type in ("rope", "yarn"):
        raise UserError(
            f"--reset-position-ids has no effect with --position-embedding-type {args.position_embedding_type}, which "
            "depends on distances only: leave it out; --reset-attention-mask alone keeps documents apart"
        )
    if not args.data_sharding:
        raise UserError("--no-data-sharding has no effect: --dataloader-type cyclic never shards; leave it out")
    args.create_attention_mask_in_dataloader |= args.reset_attention_mask
    set_fusions(args)


def set_recompute(args: argparse.Namespace, gate: GateConfig) -> None:
    """Take `gate` out of the modules to recompute, since Megatron knows only its own, and set `recompute_gate`.

    Raises:
        UserError: it would have no effect, or another module cannot be recomputed.
    """
    modules = args.recompute_modules or ()
    for module in torch_backend.NOT_RECOMPUTED:
        if module in modules and args.transformer_impl == "local":
            engine = "--transformer-impl transformer_engine"
            raise UserError(f"--recompute-modules {module} needs Transformer Engine: leave it out, or add {engine}")
    args.recompute_gate = GATE_MODULE in modules
    if not args.recompute_gate:
        return
    if args.recompute_granularity == "full":
        raise UserError(
            f"--recompute-granularity full recomputes the gate too: leave out --recompute-modules {GATE_MODULE}"
        )
    if args.recompute_granularity is None:
        raise UserError(
            f"--recompute-modules {GATE_MODULE} has no effect without --recompute-granularity selective: add it"
        )
    if gate.is_baseline:
        raise UserError(f"--recompute-modules {GATE_MODULE} has no effect on a model without a gate: leave it out")
    args.recompute_modules = [module for module in args.recompute_modules if module != GATE_MODULE]


def check_positive(args: argparse.Namespace) -> None:
    """Raise UserError for a number that must be at least 1 and is not."""
    for name in POSITIVE:
        value = getattr(args, name)
        if isinstance(value, int) and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def check_schedule(args: argparse.Namespace) -> None:
    """Raise UserError where the learning rate's warm-up is not shorter than the whole schedule."""
    fraction = args.lr_warmup_fraction
    if fraction is not None and not 0 <= fraction < 1:
        raise UserError(f"--lr-warmup-fraction {fraction} is not a part of the schedule: give 0 <= fraction < 1")
    for unit in ("iters", "samples"):
        total = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
        warmup = getattr(args, f"lr_warmup_{unit}")
        if total and warmup >= total:
            raise UserError(
                f"--lr-warmup-{unit} {warmup} is not less than the {total} {unit} of the schedule (--lr-decay-{unit}, "
                f"else --train-{unit}): shorten the warm-up"
            )


def set_pattern(args: argparse.Namespace) -> None:
    """Derive the hybrid layer pattern from blocks, unless the user wrote one, and set what follows from it.

    Afterwards the settings for linear attention are those of the pattern, by hybrid layer. HybridModel does not need
    them; Megatron's checks of Gated DeltaNet's sizes and its own kind of recomputation do.
    """
    variant = args.experimental_attention_variant
    if variant not in (None, LINEAR_ATTENTION):
        raise UserError(f"--experimental-attention-variant {variant} is not there: {LINEAR_ATTENTION} is the only one")
    if args.linear_attention_freq is not None and variant is None:
        raise UserError(
            f"--linear-attention-freq has no effect without --experimental-attention-variant {LINEAR_ATTENTION}: add it"
        )
    if is_gpt(args):
        _check_gpt(args)
    elif args.overlap_moe_expert_parallel_comm:
        raise UserError(f"--overlap-moe-expert-parallel-comm is there for GPTModel only: add --model-impl {GPT}")
    if args.hybrid_layer_pattern is None:
        if variant is not None and args.linear_attention_freq is None:
            raise UserError(
                f"--experimental-attention-variant {variant} is given without --linear-attention-freq: say which "
                "blocks have linear attention, for example 4 for all but every fourth"
            )
        _derive_pattern(args)
    else:
        check_pattern(args.hybrid_layer_pattern, args.num_experts)
        if variant is not None and DELTA_NET not in args.hybrid_layer_pattern:
            raise UserError(
                f"--experimental-attention-variant is {variant}, but --hybrid-layer-pattern "
                f"{args.hybrid_layer_pattern!r} has no such layer ({DELTA_NET})"
            )
    is_linear = [int(layer == DELTA_NET) for layer in layer_pattern(args).replace(BOUNDARY, "")]
    args.experimental_attention_variant = LINEAR_ATTENTION if any(is_linear) else None
    args.linear_attention_freq = is_linear if any(is_linear) else None


def _check_gpt(args: argparse.Namespace) -> None:
    """Raise UserError for what a GPTModel of whole blocks does not have."""
    for name in ("hybrid_layer_pattern", "experimental_attention_variant", "linear_attention_freq"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} needs the hybrid model: leave out --model-impl {GPT}")


def _derive_pattern(args: argparse.Namespace) -> None:
    """Derive the hybrid layer pattern from blocks, and restate per-block settings.

    Afterwards `num_layers` of a hybrid model counts hybrid layers, as Megatron needs, and the flags that describe
    pipeline stages in blocks are unset, since the pattern's boundaries say it.
    """
    blocks, pipeline = args.num_layers, args.pipeline_model_parallel_size
    if blocks is None:
        raise UserError("--num-layers is not given: say how many transformer blocks the model has")
    virtual = args.num_virtual_stages_per_pipeline_rank or 1
    uneven = args.decoder_first_pipeline_num_layers is not None or args.decoder_last_pipeline_num_layers is not None
    if uneven and (virtual > 1 or args.num_layers_per_virtual_pipeline_stage):
        raise UserError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers cannot be combined with "
            "virtual stages: write the stages as --hybrid-layer-pattern, with | between them"
        )
    if args.num_layers_per_virtual_pipeline_stage:
        per_stage = args.num_layers_per_virtual_pipeline_stage
        if blocks % (pipeline * per_stage):
            raise UserError(
                f"--num-layers {blocks} is not a multiple of --pipeline-model-parallel-size {pipeline} x "
                f"--num-layers-per-virtual-pipeline-stage {per_stage}"
            )
        virtual = blocks // pipeline // per_stage
    sizes = stage_sizes(
        blocks, pipeline * virtual, args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    )
    has_experts = expert_blocks(blocks, args.moe_layer_freq, args.num_experts)
    is_linear = linear_attention_blocks(blocks, args.linear_attention_freq)
    pattern = derive_pattern(has_experts, is_linear, sizes)
    if is_gpt(args):
        args.gpt_layer_pattern = pattern
    else:
        restate_in_layers(args, pattern)


def check_data(args: argparse.Namespace) -> None:
    """Check that every dataset that is named is there and whole; only the first rank of a machine looks.

    Raises:
        UserError: no data are given, or a dataset is missing or truncated.
    """
    check_validation_sets(args)
    if args.mock_data:
        return
    prefixes = dataset_prefixes(args)
    if not prefixes:
        raise UserError("no data are given: use --data-path PREFIX, or --mock-data to try a model without data")
    if _is_first_of_machine():
        for prefix in prefixes:
            check_indexed_dataset(prefix)


def _is_first_of_machine() -> bool:
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def validate(args: argparse.Namespace) -> None:
    """Run Megatron's validation and make `args` its global arguments (tokenizer, writers and timers follow).

    Raises:
        UserError: Megatron's own refusal, or a tokenizer that cannot be built.
    """
    chosen_padding = getattr(args, "padded_vocab_size", None)
    global_vars.build_tokenizer = build_as_megatron
    try:
        megatron_arguments.validate_args(args)
        set_global_variables(args)
    except (AssertionError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"Megatron refuses the arguments: {reason(error)}") from error
    if args.fim_data:
        fim.check(args, get_tokenizer())
    # An embedding may have rows that no token of the tokenizer uses, as many published models have.
    args.tokenizer_own_vocab_size = get_tokenizer().vocab_size
    args.tokenizer_vocab_size = max(args.tokenizer_own_vocab_size, args.vocab_size or 0)
    # Megatron pads to a multiple of divisor x TP; the least common multiple gives all usual TP sizes one shape, so
    # that a checkpoint loads at another size.
    multiple = math.lcm(args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)
    args.padded_vocab_size = chosen_padding or math.ceil(args.tokenizer_vocab_size / multiple) * multiple
    try:
        model_config(args)  # for its errors, which would otherwise come on every rank once the processes are connected
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise UserError(f"Megatron refuses the model: {reason(error)}") from error
