"""Impossible layouts are refused before any process group exists, with the numbers in the message."""

import pytest

from megagate.errors import UserError
from megagate.pretrain.arguments import read
from tests.training import EXPERTS, MODEL, RUN

DENSE = [*MODEL, *RUN]
VIRTUAL = ["--num-virtual-stages-per-pipeline-rank", "2"]
DELTA_NET = "--hybrid-layer-pattern G-*- --linear-num-key-heads 2 --linear-num-value-heads 4".split()
MOE = [*MODEL, *EXPERTS, *RUN]


@pytest.mark.parametrize(
    ("world_size", "argv", "message"),
    [
        (3, [*DENSE, "--tensor-model-parallel-size", "2"], r"3 processes cannot hold tensor parallel 2 x pipeline"),
        (16, [*DENSE, "--tensor-model-parallel-size", "16"], r"size 16 is larger than --num-attention-heads 8"),
        (3, [*DENSE, "--tensor-model-parallel-size", "3"], r"--num-attention-heads is 8, which .* 3 does not divide"),
        (1, [*DENSE, "--num-query-groups", "3"], r"--num-attention-heads is 8, which --num-query-groups 3 does not"),
        (
            6,
            [*DENSE, "--num-attention-heads", "12", "--tensor-model-parallel-size", "6"],
            r"--num-query-groups 4 and --tensor-model-parallel-size 6 do not fit",
        ),
        (2, [*DENSE, "--ffn-hidden-size", "63", "--tensor-model-parallel-size", "2"], r"--ffn-hidden-size is 63"),
        (
            2,
            [*MOE, "--tensor-model-parallel-size", "2"],
            r"experts with .* 2 are trained only under --sequence-parallel",
        ),
        (
            8,
            [
                *DENSE,
                *"--gate-preset sdpa-headwise --gate-row-alignment 3 --tensor-model-parallel-size 8".split(),
            ],
            r"linear_qkv has 140 rows, .* 8 does not divide: change --gate-row-alignment to a multiple of 2",
        ),
        (
            4,
            [
                *DENSE,
                *"--num-query-groups 1 --num-attention-heads 4 --kv-channels 2 --gate-preset key-elementwise".split(),
                *"--tensor-model-parallel-size 4".split(),
            ],
            r"linear_qkv has 14 rows, .* 4 does not divide: change --kv-channels",
        ),
        (3, [*MOE, "--expert-model-parallel-size", "3"], r"--num-experts is 4, which .* 3 does not divide"),
        (1, [flag for flag in MOE if flag != "--disable-bias-linear"], r"add --disable-bias-linear"),
        (1, [*MOE, "--moe-router-topk", "5"], r"--moe-router-topk 5 is larger than --num-experts 4"),
        (2, [*MOE, "--expert-model-parallel-size", "4"], r"2 processes cannot hold expert parallel 4 x expert tensor"),
        (3, [*MOE, "--expert-tensor-parallel-size", "3"], r"--moe-ffn-hidden-size is 32, which .* 3 does not divide"),
        (2, [*DENSE, "--context-parallel-size", "2", "--seq-length", "30"], r"--seq-length is 30, which twice"),
        (
            4,
            [*DENSE, "--tensor-model-parallel-size", "4", "--sequence-parallel", "--seq-length", "30"],
            r"is 30, which",
        ),
        (
            4,
            [*DENSE, "--num-layers", "4", "--pipeline-model-parallel-size", "4", "--reset-attention-mask"],
            r"--reset-attention-mask reaches only the first and the last of 4",
        ),
        (
            1,
            [*DENSE, "--micro-batch-size", "3"],
            r"--global-batch-size 4 is not a multiple of .* 3 x data parallel 1 = 3",
        ),
        (
            4,
            [*DENSE, *DELTA_NET, *"--tensor-model-parallel-size 2 --context-parallel-size 2".split()],
            r"--linear-num-key-heads is 2, which --tensor-model-parallel-size x --context-parallel-size = 4 does not",
        ),
        (8, DENSE, r"--global-batch-size 4 is not a multiple of --micro-batch-size 1 x data parallel 8 = 8"),
        (
            2,
            [*DENSE, *VIRTUAL, "--num-layers", "4", "--pipeline-model-parallel-size", "2", "--global-batch-size", "3"],
            r"3 micro batches per step are not a multiple of --pipeline-model-parallel-size 2",
        ),
        (
            2,
            [*DENSE, "--num-layers", "3", "--pipeline-model-parallel-size", "2"],
            r"3 blocks .* evenly over 2 pipeline",
        ),
    ],
)
def test_impossible_layout(world_size: int, argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(UserError, match=message):
        read(argv)


@pytest.mark.parametrize(
    ("world_size", "argv"),
    [
        (8, [*DENSE, "--tensor-model-parallel-size", "8"]),  # two ranks for each of four groups
        (8, [*MOE, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "4"]),
        (2, [*MOE, "--tensor-model-parallel-size", "2", "--skip-train"]),
        (4, [*DENSE, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--context-parallel-size", "2"]),
    ],
)
def test_possible_layout(world_size: int, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    read(argv)
