"""Megatron modules built on `megagate.gate`: the gated attention, its layers and the whole model."""

import megagate.platform  # noqa: F401  # before anything here imports Megatron
