"""How the next token is chosen from its logits."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from megagate.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Greedy, or drawn from what temperature, top-k and top-p leave; the filters are Megatron's.

    Raises:
        UserError: a value is out of its range, or would have no effect.
    """

    temperature: float = 0.0
    """The logits are divided by it; 0 for the most probable token."""
    top_k: int = 0
    """Only the k most probable tokens; 0 for all."""
    top_p: float = 1.0
    """Only the most probable tokens that together reach this probability (arXiv 1904.09751), after top-k."""
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"--temperature {self.temperature} is negative: give 0 for greedy, or more")
        if not math.isfinite(self.temperature):
            raise UserError(f"--temperature {self.temperature} is no finite number: give 0 for greedy, or more")
        if self.top_k < 0:
            raise UserError(f"--top-k {self.top_k} is negative: give 0 for all tokens, or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p} is no share of the probability: give 0 < p <= 1")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed} is negative: give 0 or more")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise UserError("--top-k and --top-p have no effect on greedy generation: give --temperature too")

    def generator(self, prompt: int) -> np.random.Generator:
        """Return the random numbers of a prompt, by its number: what is drawn for it depends on no other prompt."""
        return np.random.default_rng([self.seed, prompt])

    def choose(self, logits: torch.Tensor, generators: list[np.random.Generator]) -> torch.Tensor:
        """Return a token for each row of fp32 logits [b, v]: int64 [b].

        Args:
            logits: of the tokens that may be chosen.
            generators: one for each row; each gives one number, unless the choice is greedy.
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        from megatron.core.inference.sampling.torch_sampling import TorchSampling

        # The largest is moved to 0, which no temperature makes infinite. Megatron takes one filter at a time.
        shifted = logits.double() - logits.amax(dim=-1, keepdim=True)
        kept = TorchSampling.filter_logits(shifted, self.temperature, min(self.top_k, logits.shape[-1]), 0.0)
        if self.top_p < 1:
            kept = TorchSampling.filter_logits(kept, 1.0, 0, self.top_p)
        probabilities = kept.softmax(dim=-1).cpu().numpy()
        chosen = [generator.choice(len(row), p=row) for generator, row in zip(generators, probabilities, strict=True)]
        return torch.tensor(chosen, device=logits.device)
