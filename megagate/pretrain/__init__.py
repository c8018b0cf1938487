"""The training entry point: `torchrun ... -m megagate.pretrain [--recipe FILE] [any Megatron flag] [gate flags]`."""

import megagate.platform  # noqa: F401  # before anything here imports Megatron
