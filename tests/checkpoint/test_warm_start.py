"""A gated model starts from an ungated one's checkpoint: the gate is new, everything else is the checkpoint's.

All starts are the real trainer's, up to the model that it would train: what each rank holds is compared, bit for bit,
with what the checkpoint and a fresh model of the same seed have at that place.
"""

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megagate.checkpoint import warm_start
from megagate.checkpoint.load import TRACKER
from megagate.checkpoint.warm_start import GATE_PARAMETER, LINEAR_QKV
from megagate.errors import UserError
from megagate.gate import PRESETS
from megagate.gate.layout import QKVLayout
from tests.checkpoint.training import contents, differences, parse_in_rank, train_in_rank
from tests.distributed import run_distributed
from tests.model.training import BASE, Case, Piece, RankResult, build, copies, join, train_all

HEADS, CHANNELS = 8, 8
MODEL = (
    "--num-layers 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --ffn-hidden-size 48 "
    "--moe-layer-freq [0,1] --disable-bias-linear --add-qkv-bias --untie-embeddings-and-output-weights "
    "--moe-router-load-balancing-type aux_loss --micro-batch-size 2"
)
SAVED = "--eval-iters 0 --eval-interval 1000 --num-workers 0 --use-distributed-optimizer"
LAYOUTS: dict[str, tuple[int, str]] = {
    "one": (1, ""),
    "data2": (2, ""),
    "tensor2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tensor4": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "pipeline2": (2, "--pipeline-model-parallel-size 2"),
    "virtual": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"),
    "tensor2-pipeline2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    "tensor2-data2": (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "expert2": (2, "--expert-model-parallel-size 2"),
}
"""Name -> (ranks, flags)."""

GATED = [name for name in PRESETS if name != "baseline"]
EACH_KIND = [
    "sdpa-elementwise",
    "sdpa-headwise",
    "value-headwise",
    "output-elementwise",
    "sdpa-constant",
    "sdpa-rmsnorm",
    "sdpa-silu",
]
"""A preset for each place that a gate's parameters can have, and each number of rows of linear_qkv."""


def command(flags: str) -> list[str]:
    return f"{BASE} {MODEL} {SAVED} {flags}".split()


@pytest.fixture(scope="session")
def ungated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that trains an ungated model 2 steps and returns the directory with its checkpoint."""
    made: dict[Any, Path] = {}

    def train(layout: str = "tensor2", groups: int = 2, flags: str = "") -> Path:
        key = (layout, groups, flags)
        if key not in made:
            world_size, layout_flags = LAYOUTS[layout]
            made[key] = tmp_path_factory.mktemp("ungated")
            argv = f"--num-query-groups {groups} --seed 7 --train-iters 2 --save {made[key]} --save-interval 2 {flags}"
            run_distributed(train_in_rank, world_size, command(f"{argv} {layout_flags}"), timeout=100)
        return made[key]

    return train


def weights(cases: list[Case]) -> list[list[Piece]]:
    """Return this rank's pieces of each case's model, before the first step."""
    return [copies(build(case)[0]) for case in cases]


def check(
    base: Path, presets: list[str], layout: str, groups: int = 2, extra: str = "", row_alignment: int = 16
) -> None:
    """Check what every rank holds after a warm start of each preset."""
    extra += f" --gate-row-alignment {row_alignment}"
    world_size, layout_flags = LAYOUTS[layout]
    flags = [f"{MODEL} --num-query-groups {groups} {layout_flags} {extra} --gate-preset {preset}" for preset in presets]
    start = f"--pretrained-checkpoint {base} --gate-warm-start"
    cases = [Case(flags=each, initial=True) for each in flags]
    cases += [Case(flags=f"{each} {start}", initial=True) for each in flags]
    ranks = run_distributed(weights, world_size, cases, timeout=200)
    (saved,) = run_distributed(contents, 1, base / "iter_0000002")
    ungated = QKVLayout(HEADS, groups, CHANNELS)
    for index, preset in enumerate(presets):
        fresh = join([piece for rank in ranks for piece in rank[index]])
        warm = [piece for rank in ranks for piece in rank[index + len(presets)]]
        gate_here = dataclasses.replace(PRESETS[preset], row_alignment=row_alignment)
        layout_here = QKVLayout(HEADS, groups, CHANNELS, gate_here)
        expected = dict(fresh)
        for key in fresh:
            if LINEAR_QKV.search(key):
                query, _, keys, value = ungated.split_weight(saved[key])
                gate = layout_here.split_weight(fresh[key]).gate
                expected[key] = layout_here.merge_weight(query, gate, keys, value)
            elif GATE_PARAMETER.search(key) is None:
                expected[key] = saved[key]
                assert not torch.equal(saved[key], fresh[key]), f"{key} is the same in both, so this shows nothing"
        assert join(warm).keys() == expected.keys()
        for piece in warm:
            assert torch.equal(piece.value, expected[piece.key][piece.place].to(piece.value.dtype)), (preset, piece.key)


@pytest.mark.parametrize("layout", ["one", "tensor4", "pipeline2"])
def test_the_gate_is_new_and_the_rest_is_the_checkpoint(ungated: Any, layout: str) -> None:
    """With 2 groups on 4 tensor-parallel ranks, a rank holds a part of a group's block."""
    check(ungated("tensor2"), EACH_KIND, layout)


@pytest.mark.full
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("layout", ["one", "tensor2", "tensor4", "tensor2-pipeline2", "expert2"])
def test_every_gate_on_every_layout(ungated: Any, layout: str, groups: int) -> None:
    check(ungated("tensor2", groups), GATED, layout, groups)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("before", "after", "flags"),
    [
        pytest.param("pipeline2", "tensor2", "", id="pipeline2-to-tensor2"),
        pytest.param("tensor4", "one", "", id="tensor4-to-one", marks=FULL),
        pytest.param("tensor4", "tensor2-pipeline2", "", id="tensor4-to-tensor2-pipeline2", marks=FULL),
        pytest.param("expert2", "tensor2-data2", "", id="expert2-to-tensor2-data2", marks=FULL),
        pytest.param("tensor2", "tensor2-data2", "--ckpt-fully-parallel-load", id="parallel-load"),
        pytest.param("tensor2", "tensor2", "--bf16", id="bf16"),
        pytest.param("one", "data2", "--bf16 --use-distributed-optimizer", id="bf16-distributed", marks=FULL),
    ],
)
def test_from_other_layouts_and_with_other_flags(ungated: Any, before: str, after: str, flags: str) -> None:
    check(ungated(before), EACH_KIND, after, extra=flags)


@pytest.mark.full
def test_other_padding(ungated: Any) -> None:
    check(ungated("tensor2"), ["sdpa-headwise", "value-headwise"], "tensor2", row_alignment=3)


@pytest.mark.full
def test_virtual_pipeline(ungated: Any) -> None:
    check(
        ungated("tensor2", flags="--num-layers 4 --moe-layer-freq 1"), EACH_KIND, "virtual", extra="--moe-layer-freq 1"
    )


def steps(flags: list[str], layout: str = "one", count: int = 1) -> list[list[RankResult]]:
    """Return for each command line what the ranks know after some steps."""
    world_size, layout_flags = LAYOUTS[layout]
    model = f"{MODEL} --num-query-groups 2 {layout_flags}"
    cases = [Case(flags=f"{model} {each}", initial=True, steps=count) for each in flags]
    ranks = run_distributed(train_all, world_size, cases, timeout=100)
    return [[rank[index] for rank in ranks] for index in range(len(cases))]


def test_training_starts_where_the_ungated_model_is(ungated: Any) -> None:
    """An additive gate whose rows are almost zero adds almost nothing, a sigmoid gate halves the attention output."""
    start = f"--pretrained-checkpoint {ungated()}"
    warm = f"{start} --gate-warm-start --init-method-std 1e-8 --gate-preset"
    before, additive, halved = steps([start, f"{warm} sdpa-elementwise-additive-identity", f"{warm} sdpa-elementwise"])
    expected = before[0].losses["lm loss"]
    assert additive[0].losses["lm loss"] == pytest.approx(expected, rel=1e-6)
    assert halved[0].losses["lm loss"] != pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"])
def test_the_optimizer_holds_the_weights_of_the_checkpoint(ungated: Any, optimizer: str) -> None:
    """Its fp32 copies must not be those of the initial weights: a tiny step would then undo the start."""
    flags = f"--pretrained-checkpoint {ungated()} --gate-warm-start --bf16 --lr 1e-7 --min-lr 1e-7 {optimizer}"
    (ranks,) = steps([f"{flags} --gate-preset sdpa-headwise"])
    for key, update in join(ranks[0].updates).items():
        assert update.abs().max() < 1e-3, key


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        (
            "sdpa-headwise",
            "64 parameters in 2 layers (4 rows of linear_qkv in each, drawn as in a new model, with standard deviation "
            "0.5)",
        ),
        ("sdpa-constant", "64 parameters in 2 layers (32 of its own in each, 0 at first)"),
        ("sdpa-rmsnorm", "64 parameters in 2 layers (32 of its own in each, one at first)"),
        ("sdpa-silu", "none"),
    ],
)
def test_what_is_said(preset: str, parameters: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2, "kv_channels": 8}
    others = {"hidden_size": 8, "hybrid_layer_pattern": "*-|*E", "init_method_std": 0.5}
    where = {"gate_preset": preset, "warm_start_from": "base/iter_0000002", "init_method_xavier_uniform": False}
    where |= {"gate_init_std": None, "gate_init_bias": None}
    warm_start.prepare(argparse.Namespace(**shape, **others, **where))
    found = " The paper found that a gate added late does not remove attention sinks (arXiv 2505.06708, A.7)"
    found = "" if preset in ("sdpa-rmsnorm", "sdpa-silu") else found  # no gates
    assert capsys.readouterr().out == (
        f"megagate: warm start from base/iter_0000002; new parameters of {preset}: {parameters}; all other weights "
        f"are the checkpoint's; optimizer, random state and iteration start anew.{found}\n"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Only the first start is a warm one

RUN = "--num-query-groups 2 --gate-preset sdpa-headwise --gate-warm-start --train-iters 4 --save-interval 2"


@pytest.mark.parametrize("form", ["--pretrained-checkpoint {base} --load {save}", "--load {base}"])
def test_the_same_command_line_goes_on_after_a_break(ungated: Any, tmp_path: Path, form: str) -> None:
    base = ungated()
    for name in ("straight", "broken"):
        save = tmp_path / name
        argv = command(f"{RUN} {form.format(base=base, save=save)} --save {save}")
        stops: list[list[str]] = [["--exit-interval", "2"], []] if name == "broken" else [[]]
        for stop in stops:
            run_distributed(train_in_rank, 1, [*argv, *stop], timeout=100)
    assert (tmp_path / "broken" / TRACKER).read_text() == "4"
    checkpoints = [tmp_path / name / "iter_0000004" for name in ("straight", "broken")]
    assert run_distributed(differences, 1, *checkpoints)[0] == []


def parse(flags: str) -> dict[str, Any]:
    return run_distributed(parse_in_rank, 1, command(f"--num-query-groups 2 {flags}"), timeout=60)[0]


@pytest.fixture(scope="session")
def gated(ungated: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a warm-started run's checkpoint at step 2."""
    directory = tmp_path_factory.mktemp("gated")
    argv = command(f"{RUN} --pretrained-checkpoint {ungated()} --save {directory} --exit-interval 2")
    run_distributed(train_in_rank, 1, argv, timeout=100)
    return directory


def test_which_checkpoint_is_taken(
    ungated: Any, gated: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base, run = ungated(), RUN.replace("--num-query-groups 2", "")
    warm = {"warm_start_from": str(base / "iter_0000002"), "finetune": True, "no_load_optim": True}
    assert parse(f"{run} --load {base}").items() >= warm.items()
    assert parse(f"{run} --load {base} --save {tmp_path}").items() >= warm.items()
    assert parse(f"{run} --pretrained-checkpoint {base} --load {tmp_path}").items() >= warm.items()
    assert parse(f"{run} --pretrained-checkpoint {base} --ckpt-step 2 --load {tmp_path}").items() >= warm.items()
    own = {"warm_start_from": None, "finetune": False, "no_load_optim": None, "load": str(gated), "ckpt_step": None}
    assert parse(f"{run} --load {gated}").items() >= own.items()
    assert parse(f"{run} --load {gated} --save {tmp_path}").items() >= own.items()
    assert parse(f"{run} --load {base} --save {gated} --ckpt-step 1").items() >= own.items()
    assert parse(f"{run} --pretrained-checkpoint {base} --load {gated} --save {gated}").items() >= own.items()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--gate-preset sdpa-headwise --load {base}",
            "the gate baseline, but this run has sdpa-headwise: use the same, or add --gate-warm-start to give the "
            "model a new gate",
        ),
        ("--gate-preset sdpa-silu --load {base}", "or add --gate-warm-start to give the model a new gate"),
        (
            "--gate-warm-start --gate-preset sdpa-headwise --load {base} --finetune",
            "--finetune would start the gated run anew at each restart",
        ),
        ("--gate-warm-start --load {base}", "--gate-warm-start has no effect without a gate: choose a --gate-preset"),
        (
            "--gate-warm-start --gate-preset value-headwise --load {gated}",
            "with the gate sdpa-headwise, but this run has value-headwise: use the same",
        ),
        (
            "--gate-warm-start --gate-preset value-headwise --load {base} --save {gated}",
            "with the gate sdpa-headwise, but this run has value-headwise: use the same",
        ),
        (
            "--gate-warm-start --gate-preset switch-head-v-4-top-4 --pretrained-checkpoint {base}",
            "--gate-warm-start cannot make several experts of an ungated model's one projection: train a Switch-Head",
        ),
        (
            "--gate-warm-start --gate-preset sdpa-headwise --load {base} --save {base}",
            "--save {base} holds checkpoints of an ungated model",
        ),
        (
            "--gate-warm-start --gate-preset sdpa-headwise --pretrained-checkpoint {base} --save {base}",
            "--save {base} holds checkpoints of an ungated model",
        ),
        (
            "--gate-warm-start --gate-preset sdpa-headwise",
            "--gate-warm-start needs a checkpoint of an ungated model: name it by --pretrained-checkpoint",
        ),
        (
            "--gate-warm-start --gate-preset sdpa-headwise --load {empty} --allow-fresh-start",
            "--gate-warm-start needs a checkpoint",
        ),
        (
            "--gate-warm-start --gate-preset sdpa-headwise --load {base} --num-query-groups 4",
            "--num-query-groups 2, but this run has 4",
        ),
    ],
)
def test_refused(ungated: Any, gated: Path, tmp_path: Path, flags: str, message: str) -> None:
    places = {"base": ungated(), "gated": gated, "empty": tmp_path}
    if "--save" in flags:
        flags += " --save-interval 2"
    with pytest.raises(UserError, match=re.escape(message.format(**places))) as failure:
        parse(flags.format(**places))
    assert "\n" not in str(failure.value)


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "iter_0000004" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / TRACKER).write_text("4")
    with pytest.raises(
        UserError, match=r"--gate-warm-start reads Megatron's torch_dist format, which .* does not have"
    ):
        parse(f"--gate-warm-start --gate-preset sdpa-headwise --load {tmp_path}")
