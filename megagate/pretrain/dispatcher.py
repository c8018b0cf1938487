"""How tokens reach their experts on other ranks: by an all-to-all, or by DeepEP where it is installed.

DeepEP (https://github.com/deepseek-ai/DeepEP) sends a token once to each GPU that has experts for it, where the
all-to-all sends it once for each of its experts. It is chosen by itself for experts within one machine. Between
machines it needs a network that does not route adaptively, as Megatron warns (`fused_a2a`), which cannot be seen from
here, so that there it is the user's to ask for: --moe-token-dispatcher-type flex.
"""

import argparse

import torch
from megatron.core.transformer.moe import fused_a2a

from megagate.errors import UserError

DEEPEP = "deepep"
ALL_TO_ALL, FLEX = "alltoall", "flex"


def choose_dispatcher(args: argparse.Namespace, elsewhere: bool = False) -> None:
    """Set `moe_token_dispatcher_type`, which is None where the user leaves it to us.

    Args:
        args: parsed, with the backend chosen.
        elsewhere: whether the run is for another machine (a dry run), of which nothing is known.

    Raises:
        UserError: DeepEP is asked for, and is not here or cannot be used.
    """
    ranks = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    is_by_deepep = args.moe_flex_dispatcher_backend == DEEPEP
    if args.moe_token_dispatcher_type is None:
        knows_all_else = not (
            args.moe_pad_expert_input_to_capacity or args.deterministic_mode or args.cuda_graph_impl != "none"
        )
        is_chosen = (
            (fused_a2a.HAVE_DEEP_EP and not elsewhere)
            and (args.num_experts is not None and ranks > 1 and torch.cuda.device_count() % ranks == 0)
            and (args.transformer_impl == "transformer_engine" and args.bf16 and is_by_deepep and knows_all_else)
        )
        args.moe_token_dispatcher_type = FLEX if is_chosen else ALL_TO_ALL
        if is_chosen and args.rank == 0:
            print(
                "megagate: DeepEP is installed and takes tokens to their experts; --moe-token-dispatcher-type "
                f"{ALL_TO_ALL} leaves it out",
                flush=True,
            )
    elif args.moe_token_dispatcher_type == FLEX and is_by_deepep:
        flag = f"--moe-token-dispatcher-type {FLEX}"
        if ranks == 1:
            raise UserError(f"{flag} is for experts on several ranks: leave it out")
        if not args.bf16:
            raise UserError(f"{flag} sends bf16 alone: add --bf16, or leave it out")
        if not elsewhere and not fused_a2a.HAVE_DEEP_EP:
            raise UserError(
                f"{flag} needs a GPU and DeepEP, which is not installed: see https://github.com/deepseek-ai/DeepEP, or "
                "leave it out"
            )
