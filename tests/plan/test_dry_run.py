"""The dry run builds any rank of a large run on one process, and refuses what the cluster would refuse."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megagate.errors import UserError
from megagate.plan.dry_run import arguments_for, forget, run
from tests.distributed import ROOT
from tests.plan.cluster import without_help
from tests.training import EXPERTS, MODEL, RUN

MOE = [*MODEL, *EXPERTS, *RUN]
NO_DATA = [flag for flag in RUN if flag not in ("--mock-data", "--tokenizer-type", "NullTokenizer")]
TRILLION = ["--recipe", "examples/moe_1t/recipe.yaml", "--dry-run"]


def dry_run(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "megagate.pretrain", *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_a_rank_of_the_trillion_parameter_run() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = dry_run(*TRILLION, *"--world-size 16384 --rank 16383 --global-batch-size 8192".split())
    assert result.returncode == 0, result.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60  # on a machine that is not shared
    assert after.ru_maxrss < 4 * 1024**2  # KiB; the largest of all children
    assert all(line.startswith("megagate: ") for line in result.stdout.splitlines()), result.stdout
    for expected in (
        "no data are given",
        "rank 16383 of 16384: tensor 3 of 4, pipeline 15 of 16, data 255 of 256, expert 15 of 16, expert data 63 of 64",
        "this rank holds 4,256,816,128 parameters",
    ):
        assert expected in result.stdout


def test_a_refusal_is_one_sentence() -> None:
    result = dry_run(*TRILLION, "--world-size", "2000")
    assert result.returncode == 2
    assert result.stderr.startswith("error: 2000 processes cannot hold tensor parallel 4 x pipeline parallel 16")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "world_size", "rank", "message"),
    [
        (MOE, 4, 4, r"--rank 4 is not one of 4 ranks"),
        (MOE, 0, 0, r"a run cannot have 0 ranks here: give 1 to 1,048,576"),
        (MOE, 1 << 21, 0, r"a run cannot have 2097152 ranks here"),
        (MOE, 8, 0, r"--global-batch-size 4 is not a multiple of --micro-batch-size 1 x data parallel 8"),
        ([*MOE, "--expert-model-parallel-size", "3"], 3, 0, r"--num-experts is 4, which .* 3 does not divide"),
        ([*MODEL, *NO_DATA, "--data-path", "nowhere"], 1, 0, r"nowhere"),
        ([*MODEL, *NO_DATA, "--vocab-size", "255", "--load", "nowhere"], 1, 0, r"nowhere"),
        (
            [*MOE, "--fp8-format", "e4m3", "--moe-ffn-hidden-size", "24"],
            1,
            0,
            r"linear_fc2 is 32 x 24 on each rank, and --fp8-recipe delayed needs multiples of 16",
        ),
        ([*MOE, "--world-size", "4"], 4, 0, r"--world-size and --rank are for --dry-run: add it, or leave them out"),
    ],
)
def test_what_the_cluster_would_refuse(
    argv: list[str], world_size: int, rank: int, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # put back afterwards
        monkeypatch.setenv(name, "0")
    with without_help(), pytest.raises(UserError, match=message):
        arguments_for(argv, world_size, rank)


def test_weights_in_fp8_alone_are_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which do not draw initial weights on the CPU, as this machine would, and as is refused where it is asked for."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    flags = [*MOE, "--bf16", "--use-distributed-optimizer", "--fp8-format", "e4m3", "--fp8-param-gather"]
    with without_help():
        assert arguments_for(flags, 1)[0].bf16
        forget()
        with pytest.raises(UserError, match="--fp8-param-gather with --use-cpu-initialization has no bf16 weight"):
            arguments_for([*flags, "--use-cpu-initialization"], 1)


def test_it_needs_a_world_size() -> None:
    with pytest.raises(UserError, match="--dry-run needs --world-size: say for how many ranks"):
        run([*MOE, "--dry-run"])
