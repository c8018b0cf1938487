"""Arguments are completed as users expect, and what cannot work is refused in one sentence."""

import re
from pathlib import Path

import pytest

from megagate.errors import UserError
from megagate.pretrain import arguments, backend, layout
from megagate.pretrain.arguments import NOT_AVAILABLE, POSITIVE, build_parser, check_data, read
from tests.training import MODEL, RUN, TINY

DENSE = [*MODEL, *RUN]

OWN_FLAGS = """
--allow-data-change --allow-fresh-start --dry-run --fp8-dot-product-attention --fp8-multi-head-attention
--gate-activation --gate-combine --gate-granularity --gate-init-bias --gate-init-std --gate-input --gate-lr-mult
--gate-position --gate-precision --gate-preset --gate-row-alignment --gate-sharing --gate-warm-start --gate-wd-mult
--keep-every --keep-last --model-impl --no-async-save --no-dist-ckpt-optim-fully-reshardable --no-gate-fusion
--no-moe-permute-fusion --no-moe-router-fusion --omit --rank --recipe --sdpa-output-activation --sdpa-output-norm
--spike-deviations --spike-patience --spike-policy --spike-rollback --spike-warmup --switch-head-experts
--switch-head-top-k --telemetry-interval --telemetry-rows --verbose --world-size
""".split()


def test_the_flags_are_frozen() -> None:
    """A new or renamed flag is a decision: change this list, the README and the CHANGELOG with it."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    theirs = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._option_string_actions
    ours, _ = build_parser()
    assert sorted(set(ours._option_string_actions) - set(theirs)) == OWN_FLAGS


def test_defaults_that_differ_from_megatrons() -> None:
    args = read(TINY)
    assert args.expert_tensor_parallel_size == 1
    assert args.moe_token_dispatcher_type == "alltoall"
    assert args.moe_router_dtype == "fp32"
    assert args.dist_ckpt_optim_fully_reshardable
    assert not args.create_attention_mask_in_dataloader
    given = read([*TINY, "--moe-token-dispatcher-type", "allgather", "--moe-router-dtype", "fp64"])
    assert (given.moe_token_dispatcher_type, given.moe_router_dtype) == ("allgather", "fp64")
    assert not read([*TINY, "--no-dist-ckpt-optim-fully-reshardable"]).dist_ckpt_optim_fully_reshardable
    assert read([*TINY, "--reset-attention-mask"]).create_attention_mask_in_dataloader


@pytest.mark.parametrize(
    ("flags", "world_size", "pattern"),
    [
        ([], 1, "*E*E*E*E"),
        (["--moe-layer-freq", "2"], 1, "*E*-*E*-"),
        (["--moe-layer-freq", "[0]*1+[1]*3"], 1, "*-*E*E*E"),
        (["--pipeline-model-parallel-size", "2"], 2, "*E*E|*E*E"),
        (["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"], 2, "*E|*E|*E|*E"),
        (["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"], 2, "*E|*E|*E|*E"),
        (["--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1"], 2, "*E|*E*E*E"),
        (["--pipeline-model-parallel-size", "2", "--decoder-last-pipeline-num-layers", "1"], 2, "*E*E*E|*E"),
        (["--hybrid-layer-pattern", "**E"], 1, "**E"),
    ],
)
def test_pattern_from_blocks(flags: list[str], world_size: int, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    args = read([*TINY, "--num-layers", "4", *flags])
    assert args.hybrid_layer_pattern == pattern
    assert read([*DENSE]).hybrid_layer_pattern == "*-*-"


def test_per_block_settings_are_restated_for_hybrid_layers() -> None:
    args = read([*DENSE, "--num-layers", "4", "--window-size", "8,0", "--window-attn-skip-freq", "2"])
    assert args.num_layers == 8
    # every second block has full attention: its attention layer (even index) is what Megatron looks up
    assert args.window_attn_skip_freq[::2] == [1, 0, 1, 0]
    args = read([*DENSE, "--num-layers", "4", "--no-rope-freq", "4"])
    assert args.no_rope_freq[::2] == [0, 0, 0, 1]
    args = read([*DENSE, "--num-layers", "2", "--no-rope-freq", "[1,0]"])
    assert args.no_rope_freq == [1, 1, 0, 0]
    args = read([*DENSE, "--num-layers-at-start-in-bf16", "2"])
    assert (args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16) == (4, 2)


DELTA_NET = ["--experimental-attention-variant", "gated_delta_net"]


@pytest.mark.parametrize(
    ("flags", "pattern", "is_linear"),
    [
        ([*DELTA_NET, "--linear-attention-freq", "4"], "GEGEGE*E", [1, 0, 1, 0, 1, 0, 0, 0]),
        ([*DELTA_NET, "--linear-attention-freq", "[0]+[1]*3"], "*EGEGEGE", [0, 0, 1, 0, 1, 0, 1, 0]),
        ([*DELTA_NET, "--linear-attention-freq", "2", "--moe-layer-freq", "2"], "GE*-GE*-", [1, 0, 0, 0, 1, 0, 0, 0]),
        ([*DELTA_NET, "--linear-attention-freq", "1"], "*E*E*E*E", None),
        ([*DELTA_NET, "--hybrid-layer-pattern", "GE*E"], "GE*E", [1, 0, 0, 0]),
        (["--hybrid-layer-pattern", "GE*E"], "GE*E", [1, 0, 0, 0]),
    ],
)
def test_linear_attention(flags: list[str], pattern: str, is_linear: list[int] | None) -> None:
    """From blocks or from a pattern, with Megatron's sizes; its settings are then those of hybrid layers."""
    args = read([*TINY, "--num-layers", "4", *flags])
    assert args.hybrid_layer_pattern == pattern
    assert args.linear_attention_freq == is_linear
    assert args.experimental_attention_variant == ("gated_delta_net" if is_linear else None)
    assert (args.linear_num_key_heads, args.linear_num_value_heads) == (16, 32)
    assert (args.linear_key_head_dim, args.linear_value_head_dim, args.linear_conv_kernel_dim) == (128, 128, 4)


def test_linear_attention_on_pipeline_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = [*DELTA_NET, "--linear-attention-freq", "4", "--pipeline-model-parallel-size", "2"]
    assert read([*TINY, "--num-layers", "4", *flags]).hybrid_layer_pattern == "GEGE|GE*E"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (DELTA_NET, "is given without --linear-attention-freq: say which blocks have linear attention"),
        (["--linear-attention-freq", "2"], "no effect without --experimental-attention-variant gated_delta_net: add"),
        (["--experimental-attention-variant", "dsa"], "--experimental-attention-variant dsa is not there: gated_delta"),
        ([*DELTA_NET, "--linear-attention-freq", "[1,0,1]"], "--linear-attention-freq describes 3 blocks, but"),
        ([*DELTA_NET, "--hybrid-layer-pattern", "*E"], "but --hybrid-layer-pattern '*E' has no such layer (G)"),
        (["--hybrid-layer-pattern", "GE", "--reset-attention-mask"], "--reset-attention-mask has no effect on Gated"),
        (
            [
                "--hybrid-layer-pattern",
                "GE",
                *"--recompute-granularity selective --recompute-modules gdn_norm_out".split(),
            ],
            "--recompute-modules gdn_norm_out needs Transformer Engine",
        ),
        (
            ["--hybrid-layer-pattern", "GE", "--linear-num-key-heads", "3"],
            "--linear-num-value-heads is 32, which --linear-num-key-heads 3 does not divide",
        ),
    ],
)
def test_linear_attention_refused(flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read([*TINY, *flags])


def test_gated_delta_net_needs_the_activation_silu() -> None:
    argv = [flag for flag in DENSE if flag != "--swiglu"]
    with pytest.raises(UserError, match=r"Gated DeltaNet \(G\) needs the activation SiLU: add --swiglu"):
        read([*argv, "--hybrid-layer-pattern", "G-"])


def test_gated_delta_net_on_a_gpu_needs_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here they are hidden, since they need Triton."""
    monkeypatch.setattr(layout, "on_cpu", lambda: False)
    with pytest.raises(UserError, match=re.escape("install it with `pip install 'megagate[gdn]'`")):
        read([*TINY, "--hybrid-layer-pattern", "GE"])
    read(TINY)


def test_megatrons_own_gate_flag_is_a_preset() -> None:
    args = read([*DENSE, "--attention-output-gate"])
    assert args.attention_output_gate
    assert not read([*DENSE, "--gate-preset", "sdpa-headwise"]).attention_output_gate
    assert read([*DENSE, "--gate-preset", "sdpa-elementwise"]).attention_output_gate


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            [*DENSE, "--gate-preset", "sdpa-elemntwise"],
            r"no gate preset 'sdpa-elemntwise'; did you mean sdpa-elementwise",
        ),
        ([*DENSE, "--gate-preset", "sdpa-headwise", "--gate-granularity", "elementwise"], r"contradicts --gate-preset"),
        ([*DENSE, "--gate-preset", "sdpa-headwise", "--attention-output-gate"], r"contradicts --attention-output-gate"),
        ([*DENSE, "--gate-granularity", "headwise"], r"has no effect without a gate"),
        ([*DENSE, "--hiden-size", "3"], r"--hiden-size is no flag; did you mean --hidden-size"),
        (
            [*DENSE, "--transformer-impl", "transformer_engine"],
            r"--transformer-impl transformer_engine needs a GPU, and there is none here: .*--dry-run checks it",
        ),
        ([*DENSE, "--hybrid-layer-pattern", "*M*-"], r"has 'M', for which there is no layer yet"),
        ([*DENSE, "--hybrid-layer-pattern", "*E"], r"has expert layers \(E\), but --num-experts is not given"),
        ([*TINY, "--hybrid-layer-pattern", "*-"], r"--num-experts is 4, but .* has no expert layer"),
        ([*TINY, "--moe-layer-freq", "[1]"], r"--moe-layer-freq describes 1 blocks, but --num-layers is 2"),
        (["--hidden-size", "8"], r"--num-attention-heads is not given"),
        (MODEL, r"--seq-length is not given"),
        ([flag for flag in DENSE if flag != "--group-query-attention"], r"--num-query-groups 4 has no effect without"),
        ([*DENSE, "--save", "x"], r"--save is given without --save-interval"),
        ([*DENSE, "--lr-warmup-fraction", "1.5"], r"--lr-warmup-fraction 1.5 is not a part of the schedule"),
        (
            [*DENSE, *"--num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 1".split()],
            r"virtual",
        ),
        ([*DENSE, "--hybrid-layer-pattern", "*-|*-"], r"has 2 stages .* do not fit --pipeline-model-parallel-size 1"),
        ([*DENSE, "--omit", "lr"], r"--omit lr needs a --recipe"),
        ([*DENSE, "--lr-warmup-iters", "2"], r"--lr-warmup-iters 2 is not less than the 2 iters of the schedule"),
        (
            [flag for flag in DENSE if flag not in ("--tokenizer-type", "NullTokenizer")],
            r"--tokenizer-type is not given",
        ),
        ([*DENSE, "--seq-length", "many"], r"argument --seq-length: invalid int value: 'many'"),
        ([*DENSE, "--recipe"], r"argument --recipe: expected one argument"),
        ([*[flag for flag in DENSE if flag != "--mock-data"]], r"no data are given: use --data-path PREFIX"),
    ],
)
def test_refused(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_data(read(argv))


@pytest.mark.parametrize("name", POSITIVE)
def test_zero_is_refused_by_name(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(UserError, match=f"^{flag} must be at least 1, not 0$"):
        read([*TINY, flag, "0"])


def test_fusions_of_other_packages_are_off_also_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (arguments, backend):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    args = read([*TINY, "--moe-permute-fusion"])
    assert not (args.apply_rope_fusion or args.gradient_accumulation_fusion or args.moe_permute_fusion)
    assert args.distributed_backend == "nccl"


UNAVAILABLE_FLAGS = {
    "fp4": ["--fp4-format", "e2m1"],
    "multi_latent_attention": ["--multi-latent-attention"],
    "fp32_residual_connection": ["--fp32-residual-connection"],
    "qk_l2_norm": ["--qk-l2-norm"],
    "spec": ["--spec", "a", "b"],
    "mtp_num_layers": ["--mtp-num-layers", "1"],
    "heterogeneous_layers_config_path": ["--heterogeneous-layers-config-path", "x"],
    "dataloader_inter_document_masking": ["--dataloader-inter-document-masking"],
    "sft": ["--sft"],
    "per_dataset_sequences_path": ["--per-dataset-sequences-path", "x.json"],
    "use_checkpoint_args": ["--use-checkpoint-args"],
    "yaml_cfg": ["--yaml-cfg", "x"],
}


@pytest.mark.parametrize("name", NOT_AVAILABLE)
def test_flags_without_an_implementation_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=re.escape(NOT_AVAILABLE[name])):
        read([*DENSE, *UNAVAILABLE_FLAGS[name]])


def test_missing_dataset_is_named(tmp_path: Path) -> None:
    argv = [flag for flag in DENSE if flag != "--mock-data"]
    with pytest.raises(UserError, match=r"there is no dataset .*absent"):
        check_data(read([*argv, "--data-path", str(tmp_path / "absent")]))
    with pytest.raises(UserError, match=r"there is no dataset .*absent"):
        check_data(read([*argv, "--train-data-path", "0.5", str(tmp_path / "absent"), "0.5", "x"]))
