"""The torch backend's stack: its final norm, and which random stream each layer drops out from."""

import hashlib

import pytest
import torch

from tests.distributed import run_distributed
from tests.model.training import Case, assemble, build, micro_batches, train_all

FLAGS = (
    "--num-layers 2 --num-query-groups 2 --ffn-hidden-size 48 --micro-batch-size 4 --gate-preset sdpa-headwise "
    "--tensor-model-parallel-size 2"
)


def random_states(flags: str) -> list[tuple[str, str]]:
    """Return (name, digest of the generator's state) for each layer as it is entered, in evaluation and in training."""
    from megatron.core.transformer.mlp import MLP

    from megagate.model.backends.attention import TorchCoreAttention

    model = build(Case(flags=flags))[0][0]
    states = []

    def record(module, *_) -> None:
        digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        states.append((type(module).__name__, digest))

    for module in model.modules():
        if isinstance(module, (MLP, TorchCoreAttention)):
            module.register_forward_pre_hook(record)
    batch = next(micro_batches(0, False, 2))
    for training in (False, True):
        model.train(training)
        model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return states


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_differs_between_ranks_where_tokens_do(sequence_parallel: bool) -> None:
    """Under sequence parallelism ranks hold other tokens; otherwise the same ones, whose dropout must be the same."""
    flags = f"{FLAGS} --sequence-parallel" if sequence_parallel else FLAGS
    first, second = run_distributed(random_states, 2, flags, timeout=60)
    assert [name for name, _ in first] == ["TorchCoreAttention", "MLP"] * 4
    half = len(first) // 2
    for one, other in zip(first[:half], second[:half], strict=True):
        assert one == other
    for one, other in zip(first[half:], second[half:], strict=True):
        assert (one != other) == sequence_parallel


def final_norms(flags: str) -> list[str]:
    return [name for chunk in build(Case(flags=flags))[0] for name, _ in chunk.named_modules() if "final" in name]


def test_the_last_stage_alone_has_a_final_norm() -> None:
    flags = FLAGS.replace("tensor", "pipeline")
    assert run_distributed(final_norms, 2, flags, timeout=60) == [[], ["module.decoder.final_norm"]]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputed_layers_drop_out_the_same(sequence_parallel: bool) -> None:
    """Recomputing activations in the backward pass changes no gradient, with dropout from either random stream."""
    flags = f"{FLAGS} --hidden-dropout 0.1 --attention-dropout 0.1 {'--sequence-parallel' if sequence_parallel else ''}"
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    cases = [Case(flags=flags), Case(flags=f"{flags} {recompute}"), Case(flags=f"{flags} --seed 4321")]
    ranks = run_distributed(train_all, 2, cases, timeout=60)
    kept, recomputed, otherwise = [assemble([rank[index] for rank in ranks]) for index in range(len(cases))]
    for name, gradient in kept.gradients.items():
        assert torch.equal(recomputed.gradients[name], gradient), name
    assert recomputed.losses == kept.losses != otherwise.losses
