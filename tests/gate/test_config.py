"""The axes, the presets and the flags of the gate, and the combinations that are refused."""

import argparse
import dataclasses
import itertools

import pytest

from megagate.errors import UserError
from megagate.gate import (
    PRESETS,
    SWITCH_HEAD_PRESETS,
    GateConfig,
    GateGranularity,
    GatePosition,
    add_gate_arguments,
    describe,
    gate_config_from_args,
    preset,
    preset_name,
)
from tests.gate.paper import ADDED

PRESET_NAMES = [
    "baseline",
    "sdpa-elementwise",
    "sdpa-headwise",
    "value-elementwise",
    "value-headwise",
    "key-elementwise",
    "query-elementwise",
    "output-elementwise",
    "sdpa-elementwise-shared",
    "value-elementwise-shared",
    "sdpa-elementwise-additive-silu",
    "sdpa-elementwise-silu",
    "sdpa-elementwise-additive-identity",
    "sdpa-elementwise-ns-sigmoid",
    "sdpa-constant",
    "sdpa-rmsnorm",
    "sdpa-silu",
]

FLAGS = {
    "--gate-preset": None,
    "--gate-position": ["none", "sdpa", "value", "key", "query", "output", "key-value"],
    "--gate-granularity": ["elementwise", "headwise"],
    "--gate-sharing": ["head-specific", "head-shared"],
    "--gate-combine": ["multiply", "add"],
    "--gate-activation": ["sigmoid", "silu", "ns-sigmoid", "identity"],
    "--gate-input": ["hidden", "constant"],
    "--sdpa-output-norm": None,
    "--sdpa-output-activation": ["none", "silu"],
    "--gate-row-alignment": None,
    "--switch-head-experts": None,
    "--switch-head-top-k": None,
}

# Per preset: position, granularity, sharing, combine, activation, input, norm, output activation. Written out here so
# that an edit of PRESETS or of a default that changes a preset's meaning is seen.
DEFAULT_AXES = ("none", "elementwise", "head-specific", "multiply", "sigmoid", "hidden", False, "none")
PRESET_AXES = {
    "baseline": DEFAULT_AXES,
    "sdpa-elementwise": ("sdpa", *DEFAULT_AXES[1:]),
    "sdpa-headwise": ("sdpa", "headwise", *DEFAULT_AXES[2:]),
    "value-elementwise": ("value", *DEFAULT_AXES[1:]),
    "value-headwise": ("value", "headwise", *DEFAULT_AXES[2:]),
    "key-elementwise": ("key", *DEFAULT_AXES[1:]),
    "query-elementwise": ("query", *DEFAULT_AXES[1:]),
    "output-elementwise": ("output", *DEFAULT_AXES[1:]),
    "sdpa-elementwise-shared": ("sdpa", "elementwise", "head-shared", *DEFAULT_AXES[3:]),
    "value-elementwise-shared": ("value", "elementwise", "head-shared", *DEFAULT_AXES[3:]),
    "sdpa-elementwise-additive-silu": ("sdpa", "elementwise", "head-specific", "add", "silu", *DEFAULT_AXES[5:]),
    "sdpa-elementwise-silu": ("sdpa", "elementwise", "head-specific", "multiply", "silu", *DEFAULT_AXES[5:]),
    "sdpa-elementwise-additive-identity": ("sdpa", *DEFAULT_AXES[1:3], "add", "identity", *DEFAULT_AXES[5:]),
    "sdpa-elementwise-ns-sigmoid": ("sdpa", *DEFAULT_AXES[1:4], "ns-sigmoid", *DEFAULT_AXES[5:]),
    "sdpa-constant": ("sdpa", *DEFAULT_AXES[1:5], "constant", *DEFAULT_AXES[6:]),
    "sdpa-rmsnorm": (*DEFAULT_AXES[:6], True, "none"),
    "sdpa-silu": (*DEFAULT_AXES[:6], False, "silu"),
}


def parse(*flags: str, **megatron_arguments) -> GateConfig:
    parser = argparse.ArgumentParser()
    add_gate_arguments(parser)
    args = parser.parse_args(flags)
    for name, value in megatron_arguments.items():
        setattr(args, name, value)
    return gate_config_from_args(args)


def flags_of(config: GateConfig) -> list[str]:
    """Return every flag that spells out `config`."""
    flags = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        prefix = "--" if field.name.startswith(("sdpa_", "switch_head_")) else "--gate-"
        flag = prefix + field.name.replace("_", "-")
        if value is not False:
            flags += [flag] if value is True else [flag, str(value)]
    return flags


def test_the_presets_are_frozen() -> None:
    assert list(PRESETS) == PRESET_NAMES
    for name, axes in PRESET_AXES.items():
        assert dataclasses.astuple(PRESETS[name]) == (*axes, 16, 1, 1)
    assert {name: dataclasses.astuple(gate) for name, gate in SWITCH_HEAD_PRESETS.items()} == {
        "switch-head-kv-8-top-8": ("key-value", "headwise", *DEFAULT_AXES[2:], 16, 8, 8),
        "switch-head-kv-4-top-4": ("key-value", "headwise", *DEFAULT_AXES[2:], 16, 4, 4),
        "switch-head-v-4-top-4": ("value", "headwise", *DEFAULT_AXES[2:], 16, 4, 4),
        "switch-head-v-8-top-2": ("value", "headwise", *DEFAULT_AXES[2:], 16, 8, 2),
    }


def test_every_preset_is_found_by_name_and_by_value() -> None:
    for name in PRESET_NAMES:
        assert preset(name) is PRESETS[name]
        assert preset_name(PRESETS[name]) == name
        assert preset_name(dataclasses.replace(PRESETS[name], row_alignment=8)) == name
    assert preset_name(GateConfig(position="key", granularity="headwise")) is None


def test_an_unknown_preset_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(UserError, match=r"no gate preset 'sdpa-elementwize'; did you mean sdpa-elementwise"):
        preset("sdpa-elementwize")
    with pytest.raises(UserError, match=r"no gate preset 'xyzzy'; known presets: baseline, sdpa-elementwise, "):
        preset("xyzzy")


def test_strings_become_enum_members() -> None:
    config = GateConfig(position="value", granularity="headwise")
    assert config.position is GatePosition.VALUE
    assert config.granularity is GateGranularity.HEADWISE
    assert config == GateConfig(position=GatePosition.VALUE, granularity=GateGranularity.HEADWISE)
    assert hash(config) == hash(GateConfig(position=GatePosition.VALUE, granularity=GateGranularity.HEADWISE))


REFUSED = [
    (
        {"position": "sdap"},
        "--gate-position must be one of none, sdpa, value, key, query, output, key-value, not 'sdap'; did you mean "
        "sdpa?",
    ),
    (
        {"position": None},
        "--gate-position must be one of none, sdpa, value, key, query, output, key-value, not None; did you mean none?",
    ),
    ({"sdpa_output_norm": "true"}, "--sdpa-output-norm must be true or false, not 'true'"),
    ({"row_alignment": True}, "--gate-row-alignment must be a whole number, not True"),
    ({"row_alignment": 0}, "--gate-row-alignment must be a positive number of rows, not 0"),
    (
        {"granularity": "headwise"},
        "--gate-granularity headwise has no effect without a gate: choose a --gate-position other than none, or leave "
        "it out",
    ),
    (
        {"sharing": "head-shared"},
        "--gate-sharing head-shared has no effect without a gate: choose a --gate-position other than none, or leave "
        "it out",
    ),
    (
        {"combine": "add", "sdpa_output_norm": True},
        "--gate-combine add has no effect without a gate: choose a --gate-position other than none, or leave it out",
    ),
    (
        {"activation": "silu"},
        "--gate-activation silu has no effect without a gate: choose a --gate-position other than none, or leave it "
        "out",
    ),
    (
        {"input": "constant"},
        "--gate-input constant has no effect without a gate: choose a --gate-position other than none, or leave it out",
    ),
    (
        {"position": "sdpa", "sdpa_output_norm": True},
        "--sdpa-output-norm is a baseline without a gate: drop it, or drop --gate-position sdpa",
    ),
    (
        {"position": "key", "sdpa_output_activation": "silu"},
        "--sdpa-output-activation is a baseline without a gate: drop it, or drop --gate-position key",
    ),
    (
        {"sdpa_output_norm": True, "sdpa_output_activation": "silu"},
        "--sdpa-output-norm and --sdpa-output-activation are two separate baselines: drop one",
    ),
    (
        {"position": "value", "input": "constant"},
        "--gate-input constant is defined for --gate-position sdpa only, not for value: use --gate-input hidden or "
        "--gate-position sdpa",
    ),
    (
        {"position": "output", "granularity": "headwise"},
        "--gate-position output has no heads, so headwise scores cannot be computed: use elementwise",
    ),
    (
        {"position": "output", "sharing": "head-shared"},
        "--gate-position output has no heads to share scores over: use --gate-sharing head-specific",
    ),
    ({"switch_head_experts": 0}, "--switch-head-experts must be at least 1, not 0"),
    (
        {"position": "value", "granularity": "headwise", "switch_head_experts": 4, "switch_head_top_k": 5},
        "--switch-head-top-k 5 is no number of experts to take of --switch-head-experts 4: give 1 to 4",
    ),
    (
        {"switch_head_top_k": 2},
        "--switch-head-top-k 2 is no number of experts to take of --switch-head-experts 1: give 1 to 1",
    ),
    (
        {"position": "key-value", "granularity": "headwise"},
        "--gate-position key-value is for Switch-Head: add --switch-head-experts, or gate keys or values",
    ),
    (
        {"position": "sdpa", "switch_head_experts": 4},
        "--switch-head-experts 4 are projections of values, or of keys and values: use --gate-position value or "
        "key-value, not sdpa",
    ),
    (
        {"sdpa_output_norm": True, "switch_head_experts": 4},
        "--switch-head-experts 4 are projections of values, or of keys and values: use --gate-position value or "
        "key-value, not none",
    ),
    (
        {"position": "value", "switch_head_experts": 4},
        "--switch-head-experts 4 have one sigmoid score each in every head, which multiplies: use --gate-granularity "
        "headwise, not elementwise",
    ),
    (
        {"position": "key-value", "granularity": "headwise", "activation": "silu", "switch_head_experts": 4},
        "--switch-head-experts 4 have one sigmoid score each in every head, which multiplies: use --gate-activation "
        "sigmoid, not silu",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_setting_that_cannot_work_is_refused_in_one_sentence(settings: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        GateConfig(**settings)
    assert str(caught.value) == message


def test_every_other_combination_of_axes_is_allowed() -> None:
    axes = [field.type for field in dataclasses.fields(GateConfig)[:6]]
    names = [field.name for field in dataclasses.fields(GateConfig)[:6]]
    allowed = 0
    for values in itertools.product(*axes):
        try:
            GateConfig(**dict(zip(names, values, strict=True)))
        except UserError:
            continue
        allowed += 1
    # none: 1; sdpa: 2*2*2*4*2; value, key, query: 2*2*2*4 each; output: 2*4
    assert allowed == 1 + 64 + 3 * 32 + 8


def test_the_flags_are_frozen() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    group = add_gate_arguments(parser)
    actions = group._group_actions
    assert {action.option_strings[0]: action.choices for action in actions} == FLAGS
    assert [action.option_strings for action in actions] == [[flag] for flag in FLAGS]
    assert all(action.default is None for action in actions)


def test_help_explains_every_flag_and_lists_the_presets() -> None:
    parser = argparse.ArgumentParser(formatter_class=lambda prog: argparse.HelpFormatter(prog, width=10_000))
    add_gate_arguments(parser)
    text = parser.format_help()
    assert ", ".join([*PRESET_NAMES, *SWITCH_HEAD_PRESETS]) in text
    for field in dataclasses.fields(GateConfig):
        assert field.metadata["help"] in text
        assert f"{field.metadata['help']} Default: {str(field.default).lower()}." in text


@pytest.mark.parametrize("name", [*PRESET_NAMES, *SWITCH_HEAD_PRESETS])
def test_flags_round_trip(name: str) -> None:
    config = preset(name)
    assert parse("--gate-preset", name) == config
    assert parse(*flags_of(config)) == config
    assert parse("--gate-preset", name, *flags_of(config)) == config


def test_no_flag_means_no_gate() -> None:
    assert parse() == GateConfig()
    assert gate_config_from_args(argparse.Namespace()) == GateConfig()


def test_an_axis_that_contradicts_the_preset_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        parse("--gate-preset", "sdpa-elementwise", "--gate-granularity", "headwise")
    assert str(caught.value) == (
        "--gate-granularity headwise contradicts --gate-preset sdpa-elementwise, which has "
        "--gate-granularity elementwise: drop one of the two"
    )
    with pytest.raises(UserError, match="--sdpa-output-norm True contradicts --gate-preset baseline"):
        parse("--gate-preset", "baseline", "--sdpa-output-norm")
    with pytest.raises(UserError, match="--switch-head-experts 8 contradicts --gate-preset value-headwise, which has"):
        parse("--gate-preset", "value-headwise", "--switch-head-experts", "8")
    with pytest.raises(UserError, match="--gate-position none contradicts --gate-preset key-elementwise"):
        parse("--gate-preset", "key-elementwise", "--gate-position", "none")


def test_a_row_alignment_that_pads_nothing_is_not_told() -> None:
    assert describe(dataclasses.replace(PRESETS["sdpa-elementwise"], row_alignment=8)) == "sdpa-elementwise"
    assert describe(dataclasses.replace(PRESETS["sdpa-headwise"], row_alignment=8)).endswith("--gate-row-alignment 8")


def test_the_row_alignment_is_free_beside_a_preset() -> None:
    config = parse("--gate-preset", "sdpa-headwise", "--gate-row-alignment", "32")
    assert config == dataclasses.replace(PRESETS["sdpa-headwise"], row_alignment=32)


def test_megatrons_own_gate_flag_means_sdpa_elementwise() -> None:
    gate = PRESETS["sdpa-elementwise"]
    assert parse(attention_output_gate=True) == gate
    assert parse("--gate-preset", "sdpa-elementwise", attention_output_gate=True) == gate
    assert parse("--gate-granularity", "elementwise", attention_output_gate=True) == gate
    assert parse("--gate-row-alignment", "8", attention_output_gate=True).row_alignment == 8
    assert parse("--gate-preset", "sdpa-headwise", attention_output_gate=False) == PRESETS["sdpa-headwise"]
    with pytest.raises(UserError) as caught:
        parse("--gate-preset", "baseline", attention_output_gate=True)
    assert str(caught.value) == (
        "--gate-preset baseline contradicts --attention-output-gate, which is sdpa-elementwise: drop one"
    )
    with pytest.raises(UserError, match="--gate-position value contradicts --attention-output-gate, which has"):
        parse("--gate-position", "value", attention_output_gate=True)
    with pytest.raises(UserError, match="--switch-head-experts 4 contradicts --attention-output-gate, which has"):
        parse("--switch-head-experts", "4", attention_output_gate=True)


def test_added_parameters_are_the_papers() -> None:
    """The paper's 15A2B: 24 layers, hidden 2048, 32 query and 4 key/value heads of 128 channels."""
    for name, total in ADDED.items():
        assert 24 * PRESETS[name].added_parameters(2048, 32, 4, 128) == total, name


def test_added_parameters_beyond_the_paper() -> None:
    assert PRESETS["sdpa-rmsnorm"].added_parameters(2048, 32, 4, 128) == 32 * 128
    headwise_constant = GateConfig(position="sdpa", granularity="headwise", input="constant")
    assert headwise_constant.added_parameters(2048, 32, 4, 128) == 32
    assert headwise_constant.fused_rows_per_group(32, 4, 128) == 0


def test_only_a_projection_from_the_hidden_state_to_heads_is_fused() -> None:
    fused = {name for name, config in PRESETS.items() if config.is_fused}
    assert fused == set(PRESET_NAMES) - {"baseline", "output-elementwise", "sdpa-constant", "sdpa-rmsnorm", "sdpa-silu"}
    gated = {name for name, config in PRESETS.items() if config.has_gate}
    assert gated == fused | {"output-elementwise", "sdpa-constant"}
    assert PRESETS["sdpa-headwise"].fused_rows_per_group(32, 4, 128) == 8
    assert PRESETS["query-elementwise"].fused_rows_per_group(32, 4, 128) == 8 * 128
    assert PRESETS["value-headwise"].fused_rows_per_group(32, 4, 128) == 1
    assert PRESETS["key-elementwise"].fused_rows_per_group(32, 4, 128) == 128
