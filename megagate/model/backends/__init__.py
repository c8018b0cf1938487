"""What the layers are made of. `torch_backend` needs nothing but torch and runs on the CPU and on GPUs."""

from megagate.model.backends.torch_backend import TorchBackend, TorchHybridStack

__all__ = ["TorchBackend", "TorchHybridStack"]
