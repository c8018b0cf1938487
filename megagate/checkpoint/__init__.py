"""Megatron's checkpoints: finding the one to load, and resuming from it exactly."""

import megagate.platform  # noqa: F401  # before anything here imports Megatron
