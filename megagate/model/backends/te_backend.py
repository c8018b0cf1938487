"""The Transformer Engine backend: Megatron's own choice of its layers, for GPUs, with FP8.

Norms are fused with the linear layer that follows, experts are grouped matrix products, attention is Transformer
Engine's. Parameters have the names, shapes and places in a checkpoint that they have in the torch backend, but for a
fused norm, which `megagate.model.specs` names as the torch backend does when a checkpoint is written or read.
"""

import argparse

from megatron.core.extensions import transformer_engine
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig

from megagate.errors import UserError
from megagate.model.backends import functions
from megagate.model.backends.stack import Stack


def is_available() -> bool:
    """Whether Transformer Engine is installed with its part for torch; the CPU platform hides it."""
    return transformer_engine.HAVE_TE


class TransformerEngineBackend(TESpecProvider):
    """Megatron's provider of Transformer Engine's modules."""

    def __init__(self) -> None:
        if not is_available():  # Megatron would build of stand-ins
            raise UserError("--transformer-impl transformer_engine needs Transformer Engine, which is not installed")
        functions.restore()

    def norm_class(self, config: TransformerConfig) -> type:
        """Return what builds the norm that the config names."""
        return self.layer_norm()

    def stack(self) -> type[Stack]:
        """Return the stack of layers; Megatron's own builds Transformer Engine's norm at its end."""
        return Stack


def reason_against(recipe: str) -> str:
    """Return why this machine's GPU cannot run an FP8 recipe; "" where it can."""
    from transformer_engine import pytorch

    checks = {"blockwise": pytorch.is_fp8_block_scaling_available, "mxfp8": pytorch.is_mxfp8_available}
    return checks.get(recipe, pytorch.is_fp8_available)(return_reason=True)[1]


def set_fusions(args: argparse.Namespace) -> None:
    """Leave on those of Megatron's fusions that the installed packages have, and give experts one grouped product."""
    args.moe_grouped_gemm = bool(args.num_experts)
    args.moe_permute_fusion &= transformer_engine.fused_permute_with_probs is not None
    args.moe_router_fusion &= transformer_engine.fused_topk_with_score_function is not None
    # The embedding's and the output's linear layers are Megatron's own, and take this from NVIDIA's Apex.
    args.gradient_accumulation_fusion &= layers._grad_accum_fusion_available
