"""What a trained model is worth: measurements on checkpoints, apart from training.

`load` rebuilds a model from its checkpoint alone, `documents` cuts held-out token files into windows, `gates` observes
gate scores, and each measurement is a module of its own: `perplexity`. tools/evaluate.py is the command.
"""

import megagate.platform  # noqa: F401  # before anything here imports Megatron
