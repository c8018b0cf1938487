"""Tiny runs to evaluate: datasets of random tokens, and what ranks of `tests.distributed` do with them."""

import argparse
import os
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from megagate.errors import UserError
from tests.training import EXPERTS, MODEL, train

VOCABULARY = 64
SEQ_LENGTH = 32
WINDOWS = 8
RUN = (
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 6 --lr 2e-2 --lr-decay-style constant --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCABULARY} --num-workers 0 --eval-iters 2 --eval-interval 1000 --save-interval 1000 "
    "--use-distributed-optimizer --make-vocab-size-divisible-by 64 --init-method-std 0.2"
).split()


def write_dataset(prefix: Path, documents: list[np.ndarray]) -> str:
    """Write documents of tokens as a .bin/.idx pair and return its prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def random_documents(lengths: list[int], seed: int) -> list[np.ndarray]:
    """Return documents in which small tokens are frequent, so that there is something to learn."""
    generator = np.random.default_rng(seed)
    return [np.minimum(generator.geometric(0.2, length) - 1, VOCABULARY - 1) for length in lengths]


def pretrain(folder: Path, data: dict[str, str], flags: list[str]) -> None:
    """Train on this rank and save to `folder`."""
    paths = ["--train-data-path", data["train"], "--valid-data-path", data["one_document"]]
    saved = ["--save", str(folder), "--tensorboard-dir", str(folder / "tensorboard")]
    cache = ["--data-cache-path", str(folder / "cache")]
    train([*MODEL, *EXPERTS, *RUN, *paths, *saved, *cache, *flags])


TEXT_LENGTH = 128


def sentences(count: int, seed: int) -> list[str]:
    """Return sentences of a few words."""
    words = (
        "the a cat dog sun river old small blue quick sees finds crosses likes moon house near under 12 7 345".split()
    )
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(words, generator.integers(4, 12))).capitalize() + "." for _ in range(count)]


def pretrain_on_text(folder: Path, tokenizer: Path) -> None:
    """Make a checkpoint of a random model with a SentencePiece tokenizer, on this rank."""
    flags = (
        f"--seq-length {TEXT_LENGTH} --max-position-embeddings {TEXT_LENGTH} --micro-batch-size 1 --train-iters 1 "
        "--lr 1e-3 --mock-data --num-workers 0 --eval-iters 0 --save-interval 1 --init-method-std 0.2 "
        "--gate-preset sdpa-headwise --global-batch-size 1 --tokenizer-type SentencePieceTokenizer"
    )
    train([*MODEL, *EXPERTS, *flags.split(), "--tokenizer-model", str(tokenizer), "--save", str(folder)])


def options_of(words: list[str]) -> argparse.Namespace:
    """Parse the flags of `tools/evaluate.py perplexity`."""
    from megagate.evaluate import perplexity

    parser = argparse.ArgumentParser()
    perplexity.add_arguments(parser)
    return parser.parse_args(words)


def report(folder: Path, data_paths: list[str], **settings: int) -> dict:
    """Evaluate the checkpoint in `folder` on this rank and return the JSON."""
    from megagate.evaluate.load import load_model
    from megagate.evaluate.perplexity import evaluate

    with load_model(folder) as loaded:
        return evaluate(loaded, data_paths, **settings).as_json()


def run_tool(words: list[str]) -> int:
    """Run `tools/evaluate.py perplexity` on this rank."""
    from megagate.evaluate import perplexity

    return perplexity.run(options_of(words))


def run_tool_as_started(words: list[str], machines: int) -> int:
    """Run it on this rank without a process group, as torchrun starts it on so many machines; return conversions."""
    from megagate.checkpoint import convert

    torch.distributed.destroy_process_group()
    if machines > 1:
        os.environ["LOCAL_RANK"] = "0"
    with mock.patch.object(convert, "import_checkpoint", wraps=convert.import_checkpoint) as conversion:
        assert run_tool(words) == 0
    return conversion.call_count


def refused(directories: list[Path], data: str, machines: int) -> str:
    """Return what this rank, without a process group, is refused with for its directory, once all have been."""
    try:
        run_tool_as_started(["--load", str(directories[int(os.environ["RANK"])]), "--data-path", data], machines)
    except UserError as error:
        torch.distributed.init_process_group("gloo")
        return str(error)
    raise AssertionError("not refused")


def strided(folder: Path, stream: np.ndarray, stride: int) -> float:
    """Return the summed loss of all tokens but the first, each from its window's full forward pass."""
    from megagate.evaluate.load import load_model

    total = 0.0
    with load_model(folder) as loaded:
        for label in range(1, len(stream)):
            # The first window whose labels reach this one.
            begin = -(-max(0, label - SEQ_LENGTH) // stride) * stride
            inputs = torch.tensor([stream[begin:label].astype(np.int64)])
            logits = loaded.model(inputs, torch.arange(inputs.shape[1])[None], None)[0, -1, :VOCABULARY].double()
            total -= float(torch.log_softmax(logits, dim=-1)[stream[label]])
    return total


def recompute(folder: Path, documents: list[np.ndarray]) -> dict:
    """Compute the summed loss and the gate scores anew, token by token and from linear_qkv's output.

    Returns:
        "loss": the sum over all tokens but the first, "scores": the mean per layer, "parameters": all shapes by name.
    """
    from megagate.evaluate.load import load_model
    from megagate.model.attention import GatedSelfAttention

    stream = [int(token) for document in documents for token in document]
    projected: dict[int, list[torch.Tensor]] = {}
    total = 0.0
    with load_model(folder) as loaded:
        gated = [module for module in loaded.model.modules() if isinstance(module, GatedSelfAttention)]
        for attention in gated:
            outputs = projected.setdefault(attention.layer_number, [])
            attention.linear_qkv.register_forward_hook(lambda _, __, output, kept=outputs: kept.append(output[0]))
        for start in range(0, len(stream) - 1, SEQ_LENGTH):
            inputs = stream[start : start + SEQ_LENGTH][: len(stream) - 1 - start]
            positions = torch.arange(len(inputs))[None]
            logits = loaded.model(torch.tensor([inputs]), positions, None)[0, :, :VOCABULARY].double()
            for position in range(len(inputs)):
                label = stream[start + position + 1]
                total -= float(torch.log_softmax(logits[position], dim=-1)[label])
        scores = []
        for attention in gated:
            logits = [attention.layout.split(mixed).gate for mixed in projected[attention.layer_number]]
            scores.append(float(torch.cat([1 / (1 + (-part.double()).exp()) for part in logits]).mean()))
        parameters = {name: tuple(value.shape) for name, value in loaded.model.named_parameters()}
        untouched = all("gated" not in vars(attention) for attention in gated)
    return {"loss": total, "scores": scores, "parameters": parameters, "untouched": untouched}
