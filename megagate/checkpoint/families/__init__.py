"""Families of Hugging Face models that are converted from and to Megatron's checkpoints, one module each."""
