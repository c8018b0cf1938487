"""The torch backend: which module stands for each part of a layer, without Transformer Engine.

Linear layers are Megatron's own local ones. Norms and core attention are ours, since Megatron's local norms refuse
sequence parallelism and its local attention refuses context parallelism and materialises the scores. Experts, rotary
embedding and cross entropy are ours for speed alone.
"""

from functools import partial
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megagate.model.backends import functions
from megagate.model.backends.attention import TorchCoreAttention
from megagate.model.backends.experts import TorchExperts
from megagate.model.backends.norm import build_norm, norm_class
from megagate.model.backends.stack import Stack

ARGUMENTS: dict[str, bool] = {
    # In Transformer Engine.
    "apply_rope_fusion": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "cross_entropy_loss_fusion": False,
    "tp_comm_overlap": False,
}
"""Values of Megatron's arguments for fusions that need other packages (destination name -> value).

Megatron has the first and the last on by default and then fails; the others a recipe for GPUs may ask for. None changes
a result."""


NOT_RECOMPUTED = ("layernorm", "gdn_norm_out", "moe_act")
"""Modules that Megatron recomputes with the help of Transformer Engine only, and fails without."""


class TorchBackend(LocalSpecProvider):
    """Megatron's provider of local modules, with norms, core attention and experts replaced."""

    def __init__(self) -> None:
        functions.replace()

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """Return the norm builder; the kind of norm is read from the config when it is built."""
        return build_norm

    def norm_class(self, config: TransformerConfig) -> type:
        """Return the norm that the config names."""
        return norm_class(config)

    def core_attention(self) -> type:
        """Return the core attention module."""
        return TorchCoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """Return the builder of a rank's experts."""
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return partial(TorchExperts, submodules=linears)

    def stack(self) -> type[Stack]:
        """Return the stack of layers."""
        return TorchHybridStack


class TorchHybridStack(Stack):
    """The stack of layers with a final norm that needs no Transformer Engine."""

    def __init__(self, *args: Any, post_layer_norm: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = build_norm(
                config=self.config, hidden_size=self.config.hidden_size, eps=self.config.layernorm_epsilon
            )
