"""megagate: pretraining of mixture-of-experts language models with gated attention on Megatron."""

__version__ = "0.1.0"
