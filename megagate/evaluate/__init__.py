"""What a trained model is worth and what it writes: measurements and generation from checkpoints, apart from training.

`load` rebuilds a model from its checkpoint alone, on one process or over the ranks of a `layout`, with a longer context
if an `extension` says so; `directories` opens Hugging Face models too. Each measurement is a module of its own:
`perplexity`, `sinks`, `harness`, `ruler`. tools/evaluate.py and tools/generate.py are the commands.
"""

import megagate.platform  # noqa: F401  # before anything here imports Megatron
