"""What would be wrong, or silently without effect, for a gated model is refused in one sentence."""

from collections.abc import Callable

import pytest

from megagate.errors import UserError
from megagate.gate.config import gate_config_from_args
from megagate.pretrain import gate_checks
from megagate.pretrain.arguments import build_parser, read
from tests.training import MODEL, RUN

DENSE = [*MODEL, *(flag for flag in RUN if flag != "--use-distributed-optimizer")]  # with --qk-layernorm
HEADWISE = "--gate-preset sdpa-headwise"
HEADWISE_KEY = "--gate-position key --gate-granularity headwise"


@pytest.fixture(scope="module")
def check() -> Callable[[list[str]], None]:
    """What checks a command line; a parser takes a second to build."""
    parser, _ = build_parser()

    def check_command_line(argv: list[str]) -> None:
        args = parser.parse_args(argv)
        args.hybrid_layer_pattern = args.hybrid_layer_pattern or "*-"
        args.transformer_impl = "local"
        gate_checks.check_gate(args, gate_config_from_args(args))

    return check_command_line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            f"{HEADWISE} --hybrid-layer-pattern G-G-",
            r"G-G- has no attention layer \(\*\) that could have sdpa-headwise",
        ),
        (f"{HEADWISE} --qk-clip", r"--qk-clip scales rows of linear_qkv without knowing of the gate's rows"),
        ("--gate-preset value-elementwise --qk-clip", r"--qk-clip scales rows"),
        ("--qk-clip", r"--qk-clip needs the largest attention logit, which the torch backend does not keep"),
        ("--log-max-attention-logit", r"--log-max-attention-logit needs the largest attention logit"),
        (f"{HEADWISE} --flash-decode", r"--flash-decode would leave out sdpa-headwise"),
        ("--gate-preset sdpa-constant --flash-decode", r"--flash-decode would leave out sdpa-constant"),
        ("--gate-preset sdpa-rmsnorm --flash-decode", r"--flash-decode would leave out sdpa-rmsnorm"),
        ("--gate-preset sdpa-silu --flash-decode", r"--flash-decode would leave out sdpa-silu"),
        (HEADWISE_KEY, r"--gate-position key with one factor per head has no effect under --qk-layernorm"),
        (HEADWISE_KEY.replace("key", "query"), r"--gate-position query with one factor per head has no effect"),
        ("--gate-init-std 0.01", r"--gate-init-std has no effect without a gate"),
        ("--gate-preset sdpa-rmsnorm --gate-init-bias 1", r"--gate-init-bias has no effect without a gate"),
        (f"{HEADWISE} --gate-init-std 0.01 --fp8-param-gather", r"cannot change weights that exist in FP8 only"),
        ("--gate-preset sdpa-constant --gate-init-std 0.1", r"--gate-init-std has no effect on --gate-input constant"),
        (f"{HEADWISE} --gate-init-std -1", r"--gate-init-std must be a number of at least 0, not -1.0"),
        (f"{HEADWISE} --gate-init-std 0.1 --init-method-std 0", r"--gate-init-std scales what is drawn"),
        (f"{HEADWISE} --gate-init-std 0.1 --init-method-xavier-uniform", r"without --init-method-xavier-uniform"),
        ("--gate-preset output-elementwise --gate-init-bias 1", r"has no effect on --gate-position output"),
        (f"{HEADWISE} --gate-init-bias inf --add-qkv-bias", r"--gate-init-bias must be a number, not inf"),
        (f"{HEADWISE} --gate-init-bias 1", r"--gate-init-bias needs --add-qkv-bias: .* starts at the activation of 0"),
        ("--optimizer sgd --use-distributed-optimizer", r"--optimizer sgd does not go with --use-distributed-opt"),
        ("--optimizer soap --fp16", r"--optimizer soap does not go with --fp16: use --bf16"),
        (
            "--optimizer muon --use-distributed-optimizer",
            r"--optimizer muon can be distributed .* with bf16 parameters only",
        ),
        ("--optimizer dist_muon", r"--optimizer dist_muon can be distributed .* with bf16 parameters only"),
        ("--optimizer soap --bf16", r"--optimizer soap has a state that Megatron cannot save"),
        ("--optimizer adaptive_muon", r"adaptive_muon does not run with emerging-optimizers 0.3"),
        ("--gate-lr-mult 2", r"--gate-lr-mult has no effect without a gate"),
        (f"{HEADWISE} --gate-lr-mult -1", r"--gate-lr-mult must be a number of at least 0, not -1.0"),
        (f"{HEADWISE} --gate-wd-mult nan", r"--gate-wd-mult must be a number of at least 0, not nan"),
        ("--gate-preset sdpa-constant --gate-wd-mult 0", r"--gate-wd-mult has no effect on --gate-input constant"),
        (
            f"{HEADWISE} --gate-lr-mult 2 --optimizer muon",
            r"--gate-lr-mult is exact for --optimizer adam, not for muon",
        ),
        (
            f"{HEADWISE} --gate-lr-mult 2 --gate-wd-mult 0 --optimizer sgd",
            r"--gate-wd-mult is exact for .* not for sgd",
        ),
        *(
            (f"{HEADWISE} --gate-wd-mult 0 --{name.replace('_', '-')}", rf"does not go with --{name.replace('_', '-')}")
            for name in gate_checks.IN_THE_WAY
        ),
    ],
)
def test_refused(flags: str, message: str, check: Callable[[list[str]], None]) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        check([*DENSE, *flags.split()])
    assert "\n" not in str(refusal.value)


def test_the_trainer_refuses_too() -> None:
    with pytest.raises(UserError, match="--gate-lr-mult has no effect without a gate"):
        read([*DENSE, "--gate-lr-mult", "2"])


def test_muon_needs_whole_groups(check: Callable[[list[str]], None]) -> None:
    argv = [*DENSE, *"--gate-preset sdpa-headwise --optimizer muon --tensor-model-parallel-size 8".split()]
    with pytest.raises(
        UserError, match=r"where --num-query-groups 4 is not a multiple of .* 8: add --muon-no-split-qkv"
    ):
        check(argv)
    check([*argv, "--muon-no-split-qkv"])


@pytest.mark.parametrize("name", gate_checks.EMERGING)
def test_optimizers_without_their_package(
    name: str, check: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_checks, "HAVE_EMERGING_OPTIMIZERS", False)
    with pytest.raises(UserError, match=rf"--optimizer {name} needs the package emerging-optimizers: pip install"):
        check([*DENSE, "--optimizer", name])


@pytest.mark.parametrize(
    "flags",
    [
        "--flash-decode",
        "--gate-preset value-elementwise --flash-decode",
        "--gate-preset key-elementwise",
        f"{HEADWISE_KEY} --gate-combine add",
        f"{HEADWISE} --gate-init-std 0",
        f"{HEADWISE} --gate-init-bias 1 --add-qkv-bias",
        "--gate-preset sdpa-constant --gate-init-bias 1",
        f"{HEADWISE} --gate-lr-mult 2 --gate-wd-mult 0",
        f"{HEADWISE} --gate-lr-mult 2 --optimizer sgd",
        f"{HEADWISE} --gate-lr-mult 0 --use-distributed-optimizer",
        f"{HEADWISE} --optimizer muon",
        f"{HEADWISE} --optimizer muon --use-distributed-optimizer --bf16",
        "--gate-lr-mult 1 --gate-wd-mult 1",
    ],
)
def test_not_refused(flags: str, check: Callable[[list[str]], None]) -> None:
    check([*DENSE, *flags.split()])


def test_a_headwise_key_gate_without_qk_norm(check: Callable[[list[str]], None]) -> None:
    check([*(flag for flag in DENSE if flag != "--qk-layernorm"), *HEADWISE_KEY.split()])
