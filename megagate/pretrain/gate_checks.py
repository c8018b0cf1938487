"""How the gate is trained: the flags for it, and the refusal of what Megatron would do to a gated model wrongly."""

import argparse
import math

from megatron.core.optimizer import HAVE_EMERGING_OPTIMIZERS

from megagate.errors import UserError
from megagate.gate.config import (
    GateCombine,
    GateConfig,
    GateGranularity,
    GateInput,
    GatePosition,
    GatePrecision,
    describe,
)
from megagate.gate.layout import query_groups
from megagate.model.pattern import ATTENTION, layer_pattern

EMERGING = ("muon", "dist_muon", "adaptive_muon", "lion", "soap")
"""The values of --optimizer that come from the package emerging-optimizers."""

IN_THE_WAY = (
    "fp8_param_gather",
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
    "optimizer_cuda_graph",
    "use_torch_fsdp2",
    "use_megatron_fsdp",
)
"""Flags under which the step on fp32 parameters is out of sight, or they lie in another order."""


def add_gate_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how gate parameters start and how they are optimized."""
    group = parser.add_argument_group("training of the gate", "none of these changes the model's shape")
    group.add_argument(
        "--gate-init-std",
        type=float,
        metavar="STD",
        help="draw the gate's weights from N(0, STD), in place of --init-method-std; 0 is allowed",
    )
    group.add_argument(
        "--gate-init-bias",
        type=float,
        metavar="B",
        help="start the gate's biases at B (needs --add-qkv-bias), or the logits of --gate-input constant; default 0",
    )
    group.add_argument(
        "--gate-precision",
        choices=[precision.value for precision in GatePrecision],
        help="compute the gate's activation and product in bf16, or in fp32 (fp8, fp32, or not given); with "
        "--fp8-format its projection is in FP8 (fp8, or not given) or a product of its own outside of FP8 (bf16, fp32)",
    )
    group.add_argument(
        "--gate-lr-mult",
        type=float,
        default=1.0,
        metavar="M",
        help="multiply the learning rate of all gate parameters by M; 0 freezes them",
    )
    group.add_argument(
        "--gate-wd-mult",
        type=float,
        default=1.0,
        metavar="W",
        help="multiply the weight decay of the gate's weights by W; biases and constants never decay",
    )


def check_gate(args: argparse.Namespace, gate: GateConfig) -> None:
    """Check the gate against the model, its initial values and the optimizer.

    Args:
        args: parsed and completed with the layer pattern, not yet validated by Megatron.
        gate: the gate that they describe.

    Raises:
        UserError: the first thing that does not fit.
    """
    _check_attention(args, gate)
    _check_initial_values(args, gate)
    _check_optimizer(args)
    _check_muon(args, gate)
    _check_multipliers(args, gate)


def _check_attention(args: argparse.Namespace, gate: GateConfig) -> None:
    if ATTENTION not in layer_pattern(args) and not gate.is_baseline:
        raise UserError(
            f"--hybrid-layer-pattern {layer_pattern(args)} has no attention layer (*) that could have "
            f"{describe(gate)}: leave out the flags of the gate"
        )
    if args.qk_clip and gate.is_fused:
        raise UserError(
            "--qk-clip scales rows of linear_qkv without knowing of the gate's rows among them: leave it out, or use "
            "--qk-layernorm, which bounds the attention logits too"
        )
    if args.qk_clip or args.log_max_attention_logit:
        flag = "--qk-clip" if args.qk_clip else "--log-max-attention-logit"
        if args.transformer_impl == "local":
            raise UserError(
                f"{flag} needs the largest attention logit, which the torch backend does not keep: leave it out"
            )
    if args.flash_decode and gate.acts_on_sdpa_output:
        raise UserError(
            f"--flash-decode would leave out {describe(gate)}, which acts on the attention output: leave the flag out"
        )
    if (
        args.qk_layernorm
        and gate.position in (GatePosition.KEY, GatePosition.QUERY)
        and gate.granularity == GateGranularity.HEADWISE
        and gate.combine == GateCombine.MULTIPLY
    ):
        raise UserError(
            f"--gate-position {gate.position} with one factor per head has no effect under --qk-layernorm, which "
            "normalises each head right after it (only the factor's sign would remain): use --gate-granularity "
            "elementwise, or leave out --qk-layernorm"
        )


def _check_initial_values(args: argparse.Namespace, gate: GateConfig) -> None:
    std, bias = args.gate_init_std, args.gate_init_bias
    if std is None and bias is None:
        return
    flag = "--gate-init-std" if std is not None else "--gate-init-bias"
    if not gate.has_gate:
        raise UserError(f"{flag} has no effect without a gate: choose a --gate-preset with one, or leave it out")
    if args.fp8_param_gather:
        raise UserError(f"{flag} cannot change weights that exist in FP8 only: leave out --fp8-param-gather")
    if std is not None:
        if gate.input == GateInput.CONSTANT:
            raise UserError(
                "--gate-init-std has no effect on --gate-input constant, which has no weights: leave it out"
            )
        if not 0 <= std < math.inf:
            raise UserError(f"--gate-init-std must be a number of at least 0, not {std}")
        if args.init_method_xavier_uniform or not args.init_method_std > 0:
            raise UserError(
                "--gate-init-std scales what is drawn with --init-method-std, so that must be above 0, without "
                "--init-method-xavier-uniform"
            )
    if bias is not None:
        if not math.isfinite(bias):
            raise UserError(f"--gate-init-bias must be a number, not {bias}")
        if gate.position == GatePosition.OUTPUT:
            raise UserError("--gate-init-bias has no effect on --gate-position output, which has no bias: leave it out")
        if gate.is_fused and not (args.add_bias_linear or args.add_qkv_bias):
            raise UserError(
                "--gate-init-bias needs --add-qkv-bias: without it the gate has no bias, and a fresh one starts at the "
                "activation of 0"
            )


def _check_optimizer(args: argparse.Namespace) -> None:
    name, distributed = args.optimizer, args.use_distributed_optimizer
    if name == "sgd" and distributed:
        raise UserError("--optimizer sgd does not go with --use-distributed-optimizer: leave one of them out")
    if name not in EMERGING:
        return
    if not HAVE_EMERGING_OPTIMIZERS:
        raise UserError(f"--optimizer {name} needs the package emerging-optimizers: pip install emerging-optimizers")
    if args.fp16:
        raise UserError(f"--optimizer {name} does not go with --fp16: use --bf16")
    if (distributed or name == "dist_muon") and not args.bf16:
        raise UserError(
            f"--optimizer {name} can be distributed over data-parallel ranks with bf16 parameters only: add --bf16, or "
            "leave out --use-distributed-optimizer"
        )
    if name == "adaptive_muon":
        raise UserError("--optimizer adaptive_muon does not run with emerging-optimizers 0.3: use --optimizer muon")
    if name == "soap":
        raise UserError(
            "--optimizer soap has a state that Megatron cannot save, and moves padding rows of headwise gates: use "
            "--optimizer muon"
        )


def _check_muon(args: argparse.Namespace, gate: GateConfig) -> None:
    groups, tensor = query_groups(args), args.tensor_model_parallel_size
    if args.optimizer in ("muon", "dist_muon") and args.muon_split_qkv and groups % tensor:
        raise UserError(
            f"--optimizer {args.optimizer} cannot treat queries, keys and values as matrices of their own where "
            f"--num-query-groups {groups} is not a multiple of --tensor-model-parallel-size {tensor}: add "
            "--muon-no-split-qkv, or change one of the two"
        )


def _check_multipliers(args: argparse.Namespace, gate: GateConfig) -> None:
    multipliers = {"--gate-lr-mult": args.gate_lr_mult, "--gate-wd-mult": args.gate_wd_mult}
    for flag, value in multipliers.items():
        if not 0 <= value < math.inf:
            raise UserError(f"{flag} must be a number of at least 0, not {value}")
    changed = [flag for flag, value in multipliers.items() if value != 1]
    if not changed:
        return
    flag = changed[0]
    if not gate.has_gate:
        raise UserError(f"{flag} has no effect without a gate: choose a --gate-preset with one, or leave it out")
    if "--gate-wd-mult" in changed and gate.input == GateInput.CONSTANT:
        raise UserError("--gate-wd-mult has no effect on --gate-input constant, which never decays: leave it out")
    if args.optimizer != "adam" and (args.optimizer != "sgd" or "--gate-wd-mult" in changed):
        raise UserError(
            f"{'--gate-wd-mult' if args.optimizer == 'sgd' else flag} is exact for --optimizer adam, not for "
            f"{args.optimizer}: leave one of the two out"
        )
    for name in IN_THE_WAY:
        if getattr(args, name):
            raise UserError(f"{flag} does not go with --{name.replace('_', '-')}: leave one of the two out")
