"""Which backend a run has: Transformer Engine where there are a GPU and the package, else plain torch.

`--transformer-impl local` or `transformer_engine`, Megatron's own flag, forces one. What a backend cannot compute, or
would compute wrongly, is refused in `megagate.pretrain.refusals`.
"""

import argparse

from megagate.errors import UserError
from megagate.model.backends import te_backend, torch_backend
from megagate.platform import apex, on_cpu

INSTALL = "pip install --no-build-isolation 'transformer-engine[pytorch]'"

WITHOUT_FP8 = {
    "fp8": None,
    "fp8_param_gather": False,
    "fp8_output_proj": False,
    "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False,
    "first_last_layers_bf16": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "moe_router_padding_for_fp8": False,
    "moe_router_padding_for_quantization": False,
}
"""Arguments with which a model is built that has the parameters of an FP8 model, and no FP8."""


def add_fp8_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for settings of Megatron's FP8 that it has no flags for."""
    group = parser.add_argument_group("attention in FP8", "with --fp8-format, for the recipes that have it")
    group.add_argument(
        "--fp8-dot-product-attention",
        action="store_true",
        help="compute attention in FP8 from bf16 to bf16 (--fp8-recipe delayed, tensorwise or mxfp8)",
    )
    group.add_argument(
        "--fp8-multi-head-attention",
        action="store_true",
        help="hand the attention output to linear_proj in FP8 too (--fp8-recipe delayed, and no gate there)",
    )


def choose_backend(args: argparse.Namespace, elsewhere: bool = False) -> None:
    """Set `transformer_impl`, which is None where the user leaves it to us.

    Args:
        args: parsed.
        elsewhere: whether the run is for another machine (a dry run), of which nothing is known.

    Raises:
        UserError: what the user asks for is not here.
    """
    given = args.transformer_impl
    if given == "inference_optimized":
        raise UserError("--transformer-impl inference_optimized is for serving: leave it out")
    if elsewhere:
        args.transformer_impl = given or ("transformer_engine" if args.fp8 else "local")
    elif on_cpu():
        flag = "--transformer-impl transformer_engine" if given == "transformer_engine" else "--fp8-format"
        if given == "transformer_engine" or args.fp8:
            raise UserError(f"{flag} needs a GPU, and there is none here: leave it out; --dry-run checks it here")
        args.transformer_impl = "local"
    elif te_backend.is_available():
        args.transformer_impl = given or "transformer_engine"
        reason = te_backend.reason_against(args.fp8_recipe) if args.fp8 else ""
        if reason:
            raise UserError(f"--fp8-recipe {args.fp8_recipe} does not run on this GPU: {reason}")
    elif given == "transformer_engine" or (given is None and args.fp8):
        flag = "--fp8-format" if given is None else "--transformer-impl transformer_engine"
        raise UserError(f"{flag} needs Transformer Engine, which is not installed: {INSTALL}")
    else:
        args.transformer_impl = "local"
        if given is None and args.rank == 0:
            print(
                "megagate: Transformer Engine is not installed, so layers are torch's and slower, without FP8; to have "
                f"it: {INSTALL}; --transformer-impl local leaves out this line",
                flush=True,
            )


def set_fusions(args: argparse.Namespace) -> None:
    """Leave on those of Megatron's fusions that the chosen backend has."""
    if args.transformer_impl == "transformer_engine":
        te_backend.set_fusions(args)
    else:
        vars(args).update(torch_backend.ARGUMENTS)
        # Megatron's default, of which NVIDIA's Apex has the kernel.
        args.gradient_accumulation_fusion &= apex.has_fused_weight_gradients()


def stand_in(args: argparse.Namespace) -> str | None:
    """Turn arguments for Transformer Engine, once checked, into those of a model with the same parameters without it.

    Returns:
        A sentence on what was left out; None where nothing was.
    """
    if args.transformer_impl != "transformer_engine":
        return None
    vars(args).update(WITHOUT_FP8 | torch_backend.ARGUMENTS, transformer_impl="local")
    if args.recompute_modules:
        args.recompute_modules = [name for name in args.recompute_modules if name not in torch_backend.NOT_RECOMPUTED]
    return (
        "the flags for Transformer Engine are checked; the model is built of torch's layers, with the same parameters"
    )
