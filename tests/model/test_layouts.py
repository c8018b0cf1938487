"""The same model, data and loss on every parallel layout: losses, the gradient of every parameter and the grad norm.

Each layout takes a real training step and is compared with one process that holds the whole model. A wrong slice, a
gradient that is summed twice or not at all, or a loss that is averaged over the wrong ranks shows up here, by the name
of the parameter.

The losses that balance experts are not linear in a micro batch, so micro batches hold the same sequences as those of
the process that a layout is compared with; only `test_micro_batch_split` splits them otherwise, with the losses that
allow it.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megagate.gate import PRESETS, QKVLayout
from tests.conftest import PAIRS
from tests.distributed import run_distributed
from tests.model.training import GLOBAL_BATCH, Case, Result, assemble, train_all, worst_error

GATES = list(PRESETS)
MAIN_GATES = GATES[:3]
# One for each way a gate is computed: its place, a mean over all heads, a parameter of its own.
KINDS = [
    "sdpa-elementwise-shared",
    "value-headwise",
    "key-elementwise",
    "query-elementwise",
    "output-elementwise",
    "sdpa-constant",
    "sdpa-rmsnorm",
    "sdpa-silu",
]
TOLERANCE = 1e-5
# A parameter is of order 1 and its update of order 0.01, so that rounding the parameter costs 1e-5 of the update.
UPDATE_TOLERANCE = 1e-4
TIMEOUT = 120

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 "
    "--disable-bias-linear"
)
MODELS = {
    # Every second block has experts: with as many pipeline stages as blocks, some stages have none.
    "mixed": f"{EXPERTS} --ffn-hidden-size 48 --num-query-groups 2 "
    "--add-qkv-bias --untie-embeddings-and-output-weights --moe-router-load-balancing-type aux_loss",
    "experts": f"{EXPERTS} --ffn-hidden-size 24 --num-query-groups 4 --apply-layernorm-1p "
    "--moe-router-load-balancing-type seq_aux_loss --moe-shared-expert-intermediate-size 16",
    "dense": "--ffn-hidden-size 48 --num-query-groups 4",
    "dense-untied": "--ffn-hidden-size 48 --num-query-groups 2 --untie-embeddings-and-output-weights "
    "--normalization LayerNorm --rotary-percent 0.5",
}
WITH_EXPERTS = ("mixed", "experts")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel dimensions; the rest of `ranks` is data parallel."""

    ranks: int
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def flags(self) -> str:
        """The trainer's flags for it."""
        stages = self.pp * self.vpp
        flags = [
            f"--tensor-model-parallel-size {self.tp}",
            f"--pipeline-model-parallel-size {self.pp}",
            f"--context-parallel-size {self.cp}",
            f"--num-layers-per-virtual-pipeline-stage {4 // stages}" if self.vpp > 1 else "",
            f"--expert-model-parallel-size {self.ep} --expert-tensor-parallel-size {self.etp}",
            "--sequence-parallel" if self.sp else "",
        ]
        return " ".join(flags)

    @property
    def dp(self) -> int:
        """The data-parallel size."""
        return self.ranks // (self.tp * self.pp * self.cp)

    def takes(self, model: str) -> bool:
        """Whether the model can be trained on it: expert layouts need experts, and these refuse TP without SP."""
        if model in WITH_EXPERTS:
            return self.sp or self.tp == 1
        return self.ep == self.etp == 1

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "VPP": self.vpp, "CP": self.cp, "EP": self.ep, "ETP": self.etp}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        if self.sp:
            parts.insert(1, "SP")
        return "+".join([*parts, *([f"DP{self.dp}"] if self.dp > 1 else [])])


LAYOUTS = [
    Layout(ranks=2, tp=2),
    Layout(ranks=2, tp=2, sp=True),
    Layout(ranks=4, tp=4),  # two models have two query groups, so two ranks share one
    Layout(ranks=4, tp=4, sp=True),
    Layout(ranks=2, pp=2),
    Layout(ranks=4, pp=4),
    Layout(ranks=2, pp=2, vpp=2),
    Layout(ranks=2, cp=2),
    Layout(ranks=4, cp=4),
    Layout(ranks=2),
    Layout(ranks=4),
    Layout(ranks=2, ep=2),
    Layout(ranks=4, ep=4),
    Layout(ranks=4, ep=2),
    Layout(ranks=2, etp=2),
    Layout(ranks=2, tp=2, sp=True, ep=2),
    Layout(ranks=2, tp=2, sp=True, etp=2),
    Layout(ranks=4, tp=4, sp=True, etp=2),
    Layout(ranks=4, tp=4, sp=True, ep=2),
    Layout(ranks=4, tp=2, sp=True, ep=2, etp=2),
    Layout(ranks=2, cp=2, ep=2),
    Layout(ranks=4, tp=2, sp=True),
    Layout(ranks=4, tp=2, sp=True, cp=2),
    Layout(ranks=4, tp=2, sp=True, pp=2),
    Layout(ranks=4, tp=2, sp=True, pp=2, ep=2),
    Layout(ranks=4, tp=2, sp=True, pp=2, vpp=2),
    Layout(ranks=4, pp=2, cp=2),
    Layout(ranks=4, pp=2, ep=2),
]


def size(model: str, layout: Layout | None) -> str:
    """Return flags for a block in each pipeline stage, two at least, and two micro batches, or more for a pipeline."""
    blocks = max(2, layout.pp * layout.vpp) if layout else 2
    pattern = f"--moe-layer-freq {str([1, 0] * (blocks // 2)).replace(' ', '')}" if model == "mixed" else ""
    micro_batch = 4 if layout is None or layout.pp == layout.dp == 1 else 2
    return f"--num-layers {blocks} {pattern} --micro-batch-size {micro_batch}"


def case(model: str, preset: str, layout: Layout | None = None, extra: str = "", **settings) -> Case:
    """Return a case on a layout, with what `extra` adds or says otherwise."""
    flags = f"{MODELS[model]} {size(model, layout)} --gate-preset {preset} {layout.flags if layout else ''} {extra}"
    return Case(flags=flags, **settings)


def run(cases: list[Case], layout: Layout | None = None, timeout: int = TIMEOUT) -> list[Result]:
    """Train the cases on the ranks of the layout, or on one."""
    ranks = run_distributed(train_all, layout.ranks if layout else 1, cases, timeout=timeout)
    return [assemble([rank[index] for rank in ranks]) for index in range(len(cases))]


def one_process(model: str, preset: str, layout: Layout | None = None, extra: str = "", **settings) -> Result:
    """Return what one process computes with as many blocks and micro batches as on the layout."""
    return _one_process(case(model, preset, extra=f"{size(model, layout)} {extra}", **settings))


@functools.cache
def _one_process(alone: Case) -> Result:
    return run([alone])[0]


def assert_same(actual: Result, expected: Result) -> None:
    """Losses, grad norm and every gradient agree."""
    assert actual.losses.keys() == expected.losses.keys()
    for name, loss in expected.losses.items():
        assert math.isfinite(loss)
        assert loss > 0
        assert actual.losses[name] == pytest.approx(loss, rel=TOLERANCE), name
    error, name = worst_error(actual.gradients, expected.gradients)
    assert error <= TOLERANCE, f"the gradient of {name} differs by {error:.1e}"
    assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=TOLERANCE)


def compare(
    layout: Layout, choices: list[tuple[str, str]], extra: str = "", timeout: int = TIMEOUT, **settings
) -> list[str]:
    """Compare the models and presets of `choices` on the layout with one process; return the pairs compared."""
    cases = [case(model, preset, layout, extra, **settings) for model, preset in choices]
    actual = run(cases, layout, timeout)
    for result, (model, preset) in zip(actual, choices, strict=True):
        try:
            assert_same(result, one_process(model, preset, layout, extra, **settings))
        except AssertionError as error:
            error.add_note(f"{model}, {preset}, on {layout}")
            raise
    return [f"{preset} on {layout}" for _, preset in choices]


def models_for(layout: Layout) -> list[str]:
    return [model for model in MODELS if layout.takes(model)]


def slice_of_matrix(index: int) -> list[tuple[str, str]]:
    """Return two (model, preset) for a layout; models and presets take turns over the layouts."""
    models = models_for(LAYOUTS[index])
    return [(models[(index + turn) % len(models)], GATES[(2 * index + 1 + turn) % len(GATES)]) for turn in range(2)]


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=[str(layout) for layout in LAYOUTS])
def test_layout(index: int, record_property: Callable[[str, object], None]) -> None:
    record_property(PAIRS, compare(LAYOUTS[index], slice_of_matrix(index)))


def test_every_gate_with_ranks_that_share_a_group(record_property: Callable[[str, object], None]) -> None:
    """The hardest place for a gate: heads of one group on two ranks. With tokens cut over ranks, all gates are compared
    by `test_one_saved_checkpoint`."""
    choices = [("dense-untied", preset) for preset in GATES]
    record_property(PAIRS, compare(Layout(ranks=4, tp=4), choices, timeout=300))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=[str(layout) for layout in LAYOUTS])
def test_every_gate(index: int, record_property: Callable[[str, object], None]) -> None:
    """The whole matrix of gates and layouts; models take turns."""
    models = models_for(LAYOUTS[index])
    choices = [(models[(index + turn) % len(models)], preset) for turn, preset in enumerate(GATES)]
    record_property(PAIRS, compare(LAYOUTS[index], choices, timeout=600))


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_every_model(layout: Layout, model: str) -> None:
    if not layout.takes(model):
        pytest.skip("not a model for this layout")
    compare(layout, [(model, preset) for preset in MAIN_GATES])


def test_the_slice_covers_each_kind_of_parallelism_with_many_gates() -> None:
    chosen = [(layout, *choice) for index, layout in enumerate(LAYOUTS) for choice in slice_of_matrix(index)]
    for model in MODELS:
        assert len({preset for _, other, preset in chosen if other == model}) >= 4, model
    for dimension in ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "dp"):
        wide = [preset for layout, _, preset in chosen if int(getattr(layout, dimension)) > (dimension != "sp")]
        assert len(set(wide)) >= 4, dimension
    for preset in GATES:
        assert sum(other == preset for _, _, other in chosen) >= 3, preset


@pytest.mark.parametrize("preset", GATES)
def test_no_gradient_is_zero(preset: str) -> None:
    """Only what a model cannot learn from has none; a comparison of zeros would show nothing."""
    model = list(MODELS)[GATES.index(preset) % len(MODELS)]
    gate = QKVLayout(8, 2 if "--num-query-groups 2" in MODELS[model] else 4, 8, PRESETS[preset])
    for name, gradient in one_process(model, preset).gradients.items():
        rows = gradient.flatten(1).abs().amax(dim=1) if gradient.dim() > 1 else gradient.abs()
        if "linear_qkv" in name:
            assert torch.equal(rows == 0, gate.padding_row_mask()), name
        elif name == "embedding.word_embeddings.weight":
            assert (rows > 0).sum() > 40  # the other tokens do not occur
        else:
            assert rows.min() > 0, name


@pytest.mark.parametrize("preset", MAIN_GATES)
def test_micro_batch_split(preset: str) -> None:
    """With seq_aux_loss, which is a mean over sequences; the other two are functions of a whole micro batch."""
    sizes = (1, 2, GLOBAL_BATCH)
    results = run([case("experts", preset, extra=f"--micro-batch-size {size}") for size in sizes])
    for result in results:
        assert_same(result, one_process("experts", preset))


PER_TOKEN = [
    Layout(ranks=2),
    Layout(ranks=2, cp=2),
    Layout(ranks=2, ep=2),
    Layout(ranks=2, pp=2),
    Layout(ranks=4, tp=2, sp=True, cp=2),
]


@pytest.mark.parametrize("index", range(len(PER_TOKEN)), ids=[str(layout) for layout in PER_TOKEN])
def test_masked_tokens(index: int) -> None:
    """With --calculate-per-token-loss every token that counts has the same weight, wherever it is."""
    layout, model = PER_TOKEN[index], WITH_EXPERTS[index % 2]
    compare(layout, [(model, KINDS[index])], "--calculate-per-token-loss", mask_loss=True)


def test_masked_tokens_and_micro_batch_split() -> None:
    extra = "--calculate-per-token-loss --moe-aux-loss-coeff 0"
    expected = one_process("experts", "sdpa-headwise", extra=extra, mask_loss=True)
    sizes = (1, GLOBAL_BATCH)
    cases = [
        case("experts", "sdpa-headwise", extra=f"{extra} --micro-batch-size {size}", mask_loss=True) for size in sizes
    ]
    for result in run(cases):
        # The z-loss alone is a mean over the tokens of a micro batch, masked or not.
        assert_same(result, expected)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="Megatron's schedule takes the mean over a rank's tokens and then the mean over ranks and micro batches, so "
    "with masked tokens the weight of a token depends on the layout; --calculate-per-token-loss does not",
)
@pytest.mark.parametrize("layout", [Layout(ranks=2, cp=2)], ids=str)
def test_masked_tokens_without_per_token_loss(layout: Layout) -> None:
    compare(layout, [("dense", "sdpa-headwise")], mask_loss=True)


GLOBAL_AUX = "--moe-router-load-balancing-type global_aux_loss"


@pytest.mark.parametrize(
    "layout", [Layout(ranks=2, tp=2, sp=True), Layout(ranks=2, pp=2), Layout(ranks=2, cp=2, ep=2)], ids=str
)
def test_global_aux_loss(layout: Layout) -> None:
    """Balanced over all that a step has seen so far, so one data-parallel size."""
    compare(layout, [("mixed", "sdpa-elementwise")], GLOBAL_AUX)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_the_last_stage_logs_the_losses_of_experts_on_other_stages(kind: str) -> None:
    """With two virtual stages each, the first rank of the pipeline has both blocks with experts of this model."""
    layout = Layout(ranks=4, tp=2, sp=True, pp=2, vpp=2)
    compare(layout, [("mixed", "sdpa-elementwise")], f"--moe-router-load-balancing-type {kind}")


@pytest.mark.parametrize("per_token", ["", "--calculate-per-token-loss"])
@pytest.mark.parametrize("layout", [Layout(ranks=2), Layout(ranks=4, ep=4)], ids=str)
def test_global_aux_loss_data_parallel(layout: Layout, per_token: str) -> None:
    """One micro batch in a step, so that each data-parallel size balances over the same tokens."""
    extra = f"{GLOBAL_AUX} {per_token} --micro-batch-size"
    result = run([case("mixed", "sdpa-headwise", layout, f"{extra} {GLOBAL_BATCH // layout.dp}")], layout)[0]
    assert_same(result, one_process("mixed", "sdpa-headwise", extra=f"{extra} {GLOBAL_BATCH}"))


DISTRIBUTED_OPTIMIZER = [
    Layout(ranks=2),
    Layout(ranks=2, ep=2),
    Layout(ranks=4, tp=2, sp=True),
    Layout(ranks=4, pp=2, ep=2),
    Layout(ranks=4, tp=2, sp=True, cp=2),
]


@pytest.mark.parametrize(
    "index", range(len(DISTRIBUTED_OPTIMIZER)), ids=[str(layout) for layout in DISTRIBUTED_OPTIMIZER]
)
def test_distributed_optimizer(index: int) -> None:
    """Two steps of AdamW with weight decay; gradients are sharded, so the updated parameters are compared."""
    layout, model, preset = DISTRIBUTED_OPTIMIZER[index], WITH_EXPERTS[index % 2], KINDS[-1 - index]
    expected = one_process(model, preset, layout, steps=2)
    result = run([case(model, preset, layout, "--use-distributed-optimizer", steps=2)], layout)[0]
    assert result.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=TOLERANCE)
    error, name = worst_error(result.updates, expected.updates)
    assert error <= UPDATE_TOLERANCE, f"the update of {name} differs by {error:.1e}"


RECOMPUTE = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "core attention": "--recompute-granularity selective --recompute-modules core_attn",
    "gate": "--recompute-granularity selective --recompute-modules gate",
    "gate and core attention": "--recompute-granularity selective --recompute-modules core_attn gate",
}


RECOMPUTED = Layout(ranks=2, tp=2, sp=True)
DROPOUT = "--attention-dropout 0.2 --hidden-dropout 0.1"


@functools.cache
def dropped_out() -> list[Result]:
    return run([case("mixed", preset, RECOMPUTED, DROPOUT) for preset in KINDS], RECOMPUTED)


@pytest.mark.parametrize("index", range(len(RECOMPUTE)), ids=list(RECOMPUTE))
def test_recompute(index: int) -> None:
    """Recomputing changes no result, with and without random numbers to draw again."""
    flags = list(RECOMPUTE.values())[index]
    cases = [case("mixed", preset, RECOMPUTED, f"{flags} {more}") for more in ("", DROPOUT) for preset in KINDS]
    results = run(cases, RECOMPUTED)
    for result, expected, preset in zip(results[len(KINDS) :], dropped_out(), KINDS, strict=True):
        assert_same(result, expected)
        with pytest.raises(AssertionError):
            assert_same(result, one_process("mixed", preset, RECOMPUTED))
    for result, preset in zip(results, KINDS, strict=False):
        assert_same(result, one_process("mixed", preset, RECOMPUTED))


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [(Layout(ranks=4, tp=4, sp=True), KINDS[::2]), (Layout(ranks=4, pp=2, cp=2), KINDS[1::2])],
    ids=lambda value: str(value) if isinstance(value, Layout) else "",
)
def test_bf16(layout: Layout, kinds: list[str]) -> None:
    """As good as 8 bits are; a gradient summed twice or not at all is off by half. Experts are chosen by rounding."""
    several = "--num-layers 4 --micro-batch-size 2"  # a mean over more, so that small gradients are not all rounding
    results = run([case("dense-untied", preset, layout, f"{several} --bf16") for preset in kinds], layout)
    for preset, result in zip(kinds, results, strict=True):
        expected = one_process("dense-untied", preset, extra=several)
        assert result.losses == pytest.approx(expected.losses, rel=1e-2), preset
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=3e-2), preset
        error, name = worst_error(result.gradients, expected.gradients)
        assert error <= 0.15, f"{preset}: the gradient of {name} differs by {error:.1e}"


def test_padding_rows_stay_zero() -> None:
    """Weight decay and Adam leave the padding rows of a headwise gate alone, on one rank or where two share a group."""
    layout, preset = Layout(ranks=4, tp=4, sp=True), "sdpa-headwise"
    padding = QKVLayout(8, 2, 8, PRESETS[preset]).padding_row_mask()
    for result in (one_process("mixed", preset, steps=2), run([case("mixed", preset, layout, steps=2)], layout)[0]):
        updates = {name: update for name, update in result.updates.items() if "linear_qkv" in name}
        assert len(updates) == 4
        for update in updates.values():
            assert torch.count_nonzero(update[padding]) == 0
            assert torch.count_nonzero(update[~padding]) > 0.9 * update[~padding].numel()


@pytest.mark.parametrize("layout", [Layout(ranks=4, tp=4, sp=True, ep=2), Layout(ranks=4, pp=2, vpp=2, ep=2)], ids=str)
def test_one_saved_checkpoint(layout: Layout, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """The weights that one process saved, loaded into another layout; with TP4 two ranks share a query group."""
    folders = {preset: str(tmp_path / preset) for preset in GATES}
    for folder in folders.values():
        Path(folder).mkdir()
    alone = [case("mixed", preset, extra=size("mixed", layout), save=folder) for preset, folder in folders.items()]
    cases = [case("mixed", preset, layout, load=folder) for preset, folder in folders.items()]
    for expected, result in zip(run(alone, timeout=300), run(cases, layout, timeout=300), strict=True):
        assert_same(result, expected)
    record_property(PAIRS, [f"{preset} on {layout}" for preset in GATES])
