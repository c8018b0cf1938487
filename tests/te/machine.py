"""A machine with a GPU, as far as building a model without memory needs one; import it before anything of megagate.

Transformer Engine is imported first, since the CPU platform hides it. That platform then answers where Megatron asks
for a device, and here CUDA is said to be available, in a GPU of a chosen generation.
"""

import types

import torch
import transformer_engine.pytorch  # noqa: F401

import megagate.platform  # noqa: F401
from megagate.pretrain import arguments, backend

HOPPER, BLACKWELL = (9, 0), (10, 0)


def pretend(capability: tuple[int, int]) -> None:
    """Say that there is one GPU with this compute capability, of which Transformer Engine asks only once."""
    properties = types.SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132, total_memory=1 << 37, name="stand-in"
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.default_generators[torch.device("meta")] = torch.default_generator  # weights are drawn on that device
    arguments.on_cpu = backend.on_cpu = lambda: False
