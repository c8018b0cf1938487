"""Bytes per second of a conversion both ways, beside `cp -r` of the same bytes, and peak memory.

    python benchmarks/convert.py [--gigabytes 4] [--directory DIR]

A synthetic Qwen3-MoE in bf16 is imported and exported, each in a process of its own, whose peak resident memory is
given above that of a process that only imports the same modules. What counts is the time in which tensors are read,
converted and written; the start of Python, torch and Megatron is given as well. Sources are in the page cache. Two
rates are given: until all is written, part of it to the page cache, and until all is on the disk.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from megagate.checkpoint.accounting import wanted
from megagate.checkpoint.families.qwen3 import Qwen3Moe
from megagate.checkpoint.huggingface import StoredTensor, WeightWriter

HIDDEN, EXPERTS, INTERMEDIATE, VOCABULARY = 1024, 32, 512, 32768
WARM_UP = 1
"""Rounds that are not printed: what is written first takes memory and disk blocks that the machine has yet to find."""

SETTLING_SECONDS = 10
LAYER_GIGABYTES = 2 * 3 * EXPERTS * HIDDEN * INTERMEDIATE / 1e9

MEASURED = """
import json, resource, sys, time
started = time.monotonic()
from pathlib import Path
import megagate.checkpoint.convert as convert
import megagate.pretrain.arguments
from megagate.data.tokenizer import quiet
summary = None
with quiet():
    if sys.argv[1:]:
        function = {"import": convert.import_checkpoint, "export": convert.export_checkpoint}[sys.argv[1]]
        summary = function(Path(sys.argv[2]), Path(sys.argv[3]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
result = {"peak": peak, "all": time.monotonic() - started}
if summary:
    result |= {"bytes": summary.nbytes, "seconds": summary.seconds}
print("\\n" + json.dumps(result))
"""


def synthetic_config(gigabytes: float) -> dict:
    """Return the config.json of a model of about that size."""
    embeddings = 2 * 2 * VOCABULARY * HIDDEN / 1e9
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": max(1, round((gigabytes - embeddings) / LAYER_GIGABYTES)),
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }


def write_model(directory: Path, gigabytes: float) -> None:
    """Write a Hugging Face directory of random weights."""
    from megagate.checkpoint.described_model import complete_arguments, recipe_flags

    config, family = synthetic_config(gigabytes), Qwen3Moe()
    flags = recipe_flags(family.arguments(config), torch.bfloat16, {"tokenizer-type": "NullTokenizer"})
    shapes = wanted(family.rules(complete_arguments(flags), config), "hf")
    tensors = {name: StoredTensor(shape, torch.bfloat16) for name, shape in shapes.items()}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    writer = WeightWriter(directory, tensors, 2 * 10**9)
    for name, tensor in tensors.items():
        writer.write(name, torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(0, 0.02))
    writer.close()


def measured(*words: str) -> dict:
    """Run a conversion, or only the imports, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, *words]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(finished.stdout.splitlines()[-1])


def copied(source: Path, target: Path) -> float:
    """Return the seconds that `cp -r` takes."""
    started = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    return time.monotonic() - started


def emptied(target: Path) -> Path:
    """Remove what the round before wrote there, and wait.

    A virtual machine gives free memory back to its host within seconds, and a file's first pages then cost several
    times as much. Without the wait `cp` alone would be spared that, since conversions start with seconds of imports.
    """
    shutil.rmtree(target, ignore_errors=True)
    synced()
    time.sleep(SETTLING_SECONDS)
    return target


def synced() -> float:
    """Return the seconds until all that has been written is on the disk."""
    started = time.monotonic()
    os.sync()
    return time.monotonic() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the model (4)")
    parser.add_argument("--directory", help="where to write; the system's temporary directory if not given")
    parser.add_argument("--rounds", type=int, default=3, help="of cp, import and export in turn (3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        write_model(folder / "hf", options.gigabytes)
        nothing = measured()
        for turn in range(options.rounds + WARM_UP):
            seconds = copied(folder / "hf", emptied(folder / "copy"))
            times = {"cp -r": (seconds, seconds + synced())}
            results = {}
            for label, source, target in (("import", "hf", "ckpt"), ("export", "ckpt", "back")):
                results[label] = measured(label, str(folder / source), str(emptied(folder / target)))
                seconds = results[label]["seconds"]
                times[label] = (seconds, seconds + synced())
            if turn < WARM_UP:
                continue
            size = results["import"]["bytes"]
            for label, (written, durable) in times.items():
                rates = f"{size / 1e6 / written:6.0f} MB/s, {size / 1e6 / durable:6.0f} to the disk"
                line = f"{label:8}{size / 1e9:.2f} GB  {rates}"
                if label in results:
                    result, copy = results[label], times["cp -r"]
                    line += (
                        f", {copy[0] / written:.2f} and {copy[1] / durable:.2f} of cp, {result['all']:.0f} s in all, "
                        f"peak {(result['peak'] - nothing['peak']) / 2**20:.0f} MiB above "
                        f"{nothing['peak'] / 2**20:.0f} MiB"
                    )
                print(line, flush=True)


if __name__ == "__main__":
    main()
