"""Continue prompts with a checkpoint, token by token, greedily or sampled.

    python tools/generate.py --load runs/quickstart/gated --prompt "Attention is" --max-new-tokens 50 --temperature 0.8

Prompts are the texts of --prompt, the lines of --prompt-file (each a JSON string, or an object with "prompt"), or what
standard input holds, as one. They are tokenized as the run's documents were; an empty one begins a document, after an
end-of-document token. A continuation ends before the end of the document, after --max-new-tokens, or where the model
has no more positions.

Prompts are computed --micro-batch-size at a time. The first of a batch is shown as it grows, the others once the batch
is done, all in their order. What is generated for one depends on the batch by rounding only.

Under torchrun --tensor-model-parallel-size and --expert-model-parallel-size divide the model.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from megagate.data.tokenizer import quiet
from megagate.errors import UserError, reason
from megagate.evaluate.directories import check_directory, opened
from megagate.evaluate.extension import Extension
from megagate.evaluate.generation import Speed, complete
from megagate.evaluate.options import (
    add_decoding_arguments,
    add_model_arguments,
    check_output,
    check_positive,
    decoding_layout,
    write_file,
)
from megagate.evaluate.sampling import Sampling


def read_prompts(options: argparse.Namespace, processes: int = 1) -> list[str]:
    """Return the prompts of the options.

    Raises:
        UserError: there are none, or a line of the file is no prompt.
    """
    if options.prompt and options.prompt_file:
        raise UserError("--prompt and --prompt-file are both given: leave one out")
    if options.prompt:
        return list(options.prompt)
    if not options.prompt_file:
        if processes > 1:
            raise UserError("standard input reaches one of several processes only: give --prompt or --prompt-file")
        if sys.stdin.isatty():
            print("the prompt, ended by Ctrl-D:", file=sys.stderr, flush=True)
        try:
            return [sys.stdin.read().removesuffix("\n")]
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is no text in UTF-8: {reason(error)}; convert it") from error
    try:
        content = Path(options.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --prompt-file {options.prompt_file}: {reason(error)}; name another") from error
    prompts = []
    for number, line in enumerate(content.split("\n"), 1):  # strings may hold what else separates lines, as U+2028
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(f"line {number} of {options.prompt_file} is not JSON: {error}; mend it there") from error
        prompt = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(prompt, str):
            raise UserError(
                f'line {number} of {options.prompt_file} is no JSON string and no object with a "prompt": write one'
            )
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"--prompt-file {options.prompt_file} holds no prompt: write one JSON string a line")
    return prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of tools/generate.py; those that Megatron has bear its names."""
    add = parser.add_argument
    add_model_arguments(parser)
    add("--prompt", nargs="+", metavar="TEXT", help="texts to continue (standard input, as one)")
    add("--prompt-file", metavar="FILE", help='one JSON string, or object with "prompt", a line')
    add("--max-new-tokens", type=int, default=128, metavar="N", help="tokens to generate at most for each (128)")
    add("--temperature", type=float, default=0.0, metavar="T", help="divides the logits before drawing (0: greedy)")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K most probable tokens (0: all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the most probable that reach P together (1)")
    add("--seed", type=int, default=1234, metavar="N", help="of what is drawn (1234)")
    add("--micro-batch-size", type=int, default=8, metavar="N", help="prompts computed at a time (8)")
    add("--output", metavar="FILE", help="write the results there too, one JSON object a line")
    add_decoding_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run tools/generate.py.

    Raises:
        UserError: something in the options is missing or does not fit the checkpoint.
    """
    layout = decoding_layout(options)
    check_positive(options, "max_new_tokens", "micro_batch_size")
    check_output(options.output)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    check_directory(options.load, options.ckpt_step)
    prompts = read_prompts(options, layout.world_size)
    speed = Speed()
    extension = Extension.of(options)
    with (
        quiet(),
        opened(options.load, options.ckpt_step, options.tokenizer_model, extension, layout) as (loaded, tokenizer),
    ):
        found = complete(
            loaded,
            tokenizer,
            prompts,
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            micro_batch_size=options.micro_batch_size,
            show=_show if layout.rank == 0 else lambda text: None,
            speed=speed,
        )
        completions = list(found)
    if layout.rank > 0:
        return 0
    print(speed, file=sys.stderr, flush=True)
    if options.output:
        lines = [json.dumps(asdict(completion), ensure_ascii=False) + "\n" for completion in completions]
        write_file(Path(options.output), "".join(lines))
    return 0


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
