"""What the layers are made of: `torch_backend` needs nothing but torch, `te_backend` a GPU and Transformer Engine."""

from megagate.model.backends.te_backend import TransformerEngineBackend
from megagate.model.backends.torch_backend import TorchBackend, TorchHybridStack

BACKENDS: dict[str, type[TorchBackend] | type[TransformerEngineBackend]] = {
    "local": TorchBackend,
    "transformer_engine": TransformerEngineBackend,
}
"""Value of --transformer-impl -> the backend."""

__all__ = ["BACKENDS", "TorchBackend", "TorchHybridStack", "TransformerEngineBackend"]
