"""A model of two layers learns one of RULER's tasks in a few hundred of the trainer's steps, and then scores high.

The task is a needle in a haystack, as the command makes it, with one of a few words for a value. Nothing but the answer
has a loss, and the samples that are scored come from another seed than those that are learned.
"""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from megagate.evaluate.ruler import command
from megagate.evaluate.ruler.needles import needle
from megagate.evaluate.ruler.sample import Sample, make_sample
from tests.distributed import run_distributed

VALUES = "apple river stone cloud tiger piano lemon chair horse bread glass ocean maple candle rocket violin".split()
LENGTH, SEQUENCE, BATCH, STEPS = 256, 136, 32, 500
SAMPLES = 50
NAME = "niah_words"
TASK = partial(needle, value=lambda rng: rng.choice(VALUES), kind="word")
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16 "
    "--ffn-hidden-size 128 --disable-bias-linear --untie-embeddings-and-output-weights --gate-preset sdpa-elementwise "
    f"--seq-length {SEQUENCE} --max-position-embeddings {LENGTH} --micro-batch-size {BATCH} "
    f"--global-batch-size {BATCH} --train-iters {STEPS} --lr 5e-3 --min-lr 5e-4 --lr-warmup-iters 50 --adam-eps 1e-8 "
    "--adam-beta2 0.98 --weight-decay 0 --clip-grad 1"
)


def samples(tokenizer, seed: int) -> Iterator[Sample]:
    for index in range(10**9):
        yield make_sample(TASK, NAME, LENGTH, seed, index, lambda text: len(tokenizer.tokenize(text)))


def batches(tokenizer) -> Iterator[dict]:
    import torch

    learned = samples(tokenizer, seed=1)
    while True:
        tokens, mask = torch.zeros(BATCH, SEQUENCE + 1, dtype=torch.int64), torch.zeros(BATCH, SEQUENCE)
        for row in range(BATCH):
            sample = next(learned)
            prompt = tokenizer.tokenize(sample.prompt)
            whole = [*tokenizer.tokenize(f"{sample.prompt} {sample.answers[0]}"), tokenizer.eod]
            assert whole[: len(prompt)] == prompt
            tokens[row, : len(whole)] = torch.tensor(whole)
            mask[row, len(prompt) - 1 : len(whole) - 1] = 1
        yield {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": mask,
            "position_ids": torch.arange(SEQUENCE).expand(BATCH, -1).contiguous(),
        }


def learn(tokenizer_model: Path) -> tuple[float, float]:
    """Return the score of a fresh model and of the same after `STEPS` steps; in a rank."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training import get_args
    from megatron.training.training import train_step

    from megagate.evaluate.load import LoadedModel, tokenizer_of
    from megagate.pretrain.batch import forward_step
    from tests.model.training import Case, build

    given = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {tokenizer_model}"
    model, optimizer, scheduler = build(Case(flags=f"{FLAGS} {given}", initial=True))
    args, config = get_args(), model[0].config
    tokenizer = tokenizer_of(args)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads

    def score() -> float:
        model[0].eval()
        loaded = LoadedModel(model[0].module, args, Path(), 0)
        results = command.measure(
            loaded, tokenizer, {NAME: TASK}, [LENGTH], samples=SAMPLES, seed=2, micro_batch_size=SAMPLES
        )
        model[0].train()
        return command.scores(results)["mean"][LENGTH]

    fresh = score()
    source = batches(tokenizer)
    for _ in range(STEPS):
        train_step(forward_step, source, model, optimizer, scheduler, config, get_forward_backward_func())
    return fresh, score()


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_model_that_has_learned_a_task_scores_high_and_a_fresh_one_low(tmp_path: Path) -> None:
    from megagate.data.train_tokenizer import main as train_tokenizer

    drafts = [TASK(random.Random(index), LENGTH) for index in range(300)]
    text = "\n".join(f"{draft.render(1)} {draft.answers[0]}" for draft in drafts)
    (tmp_path / "corpus.txt").write_text(text, encoding="utf-8")
    words = ["--input", str(tmp_path / "corpus.txt"), "--output-prefix", str(tmp_path / "tokenizer")]
    assert train_tokenizer([*words, "--vocab-size", "500"]) == 0
    ((fresh, learned),) = run_distributed(learn, 1, tmp_path / "tokenizer.model", timeout=1700)
    print(f"score before {fresh:.1f}, after {STEPS} steps {learned:.1f}")
    assert fresh <= 20
    assert learned >= 90
