"""The axes along which an attention gate can vary, and a name for each variant that the paper measured.

One frozen dataclass, :class:`GateConfig`, says which gate a model has. The command line, recipes, checkpoints and the
attention layer all read it, and the command-line flags are generated from it, so that an axis is described once.
Combinations that cannot be computed, or in which an axis would silently have no effect, are refused here and nowhere
else. Source of the axes and of the presets: Qiu et al. 2025, "Gated Attention for Large Language Models",
arXiv 2505.06708, sections 2 and 3. Switch-Head, which its appendix compares with, is Csordas et al. 2023,
arXiv 2312.07987: several projections of the values, or of keys and values, each with a score of its own, so that a
headwise value gate is Switch-Head with a single expert.
"""

import argparse
import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from megagate.errors import UserError, nearest


class GatePosition(StrEnum):
    """Which tensor of the attention block is gated; G1 to G5 are the paper's names."""

    NONE = "none"
    SDPA = "sdpa"  # G1: each head's attention output, before the heads are concatenated
    VALUE = "value"  # G2: the value heads, after their projection
    KEY = "key"  # G3: the key heads, after their projection, before QK-norm and rotary embedding
    QUERY = "query"  # G4: the query heads, after their projection, before QK-norm and rotary embedding
    OUTPUT = "output"  # G5: the output projection's result, before the residual addition
    KEY_VALUE = "key-value"  # G3 and G2 by the same scores; Switch-Head only


class GateGranularity(StrEnum):
    """Whether a head has one score per channel or a single one."""

    ELEMENTWISE = "elementwise"
    HEADWISE = "headwise"


class GateSharing(StrEnum):
    """Whether each head has scores of its own or all heads use the mean of their scores."""

    HEAD_SPECIFIC = "head-specific"
    HEAD_SHARED = "head-shared"


class GateCombine(StrEnum):
    """How the score acts on the gated tensor: ``Y * score`` or ``Y + score``."""

    MULTIPLY = "multiply"
    ADD = "add"


class GateActivation(StrEnum):
    """The function from logit to score."""

    SIGMOID = "sigmoid"
    SILU = "silu"
    NS_SIGMOID = "ns-sigmoid"  # "non-sparse": 0.5 + 0.5 * sigmoid(x)
    IDENTITY = "identity"


class GateInput(StrEnum):
    """What the logits are computed from: the block's normalised input, or nothing (a learned constant)."""

    HIDDEN = "hidden"
    CONSTANT = "constant"


class SdpaOutputActivation(StrEnum):
    """The activation of the baseline that has no gate but a non-linearity on the attention output."""

    NONE = "none"
    SILU = "silu"


class GatePrecision(StrEnum):
    """In what the gate is computed; not part of the model's shape. docs/transformer_engine.md has the table."""

    FP8 = "fp8"  # its projection with the other rows of linear_qkv in FP8, its activation and product in fp32
    BF16 = "bf16"  # its projection, activation and product
    FP32 = "fp32"  # its activation and product; its projection in the model's dtype, not in FP8


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """Which gate an attention layer has; the default is none.

    Enum fields also take their string value. Each field's ``help`` says what it is, and is also the help of its flag.

    Raises:
        UserError: a value is unknown, or the combination cannot be computed or would ignore one of its settings (but
            for the row alignment).
    """

    position: GatePosition = field(
        default=GatePosition.NONE,
        metadata={
            "help": "The tensor that is gated: each head's attention output (sdpa), the value, key or query heads "
            "right after their projection (before QK-norm and rotary embedding), or the output projection's "
            "result (output); keys and values by the same scores (key-value) under Switch-Head only."
        },
    )
    granularity: GateGranularity = field(
        default=GateGranularity.ELEMENTWISE,
        metadata={"help": "One score per channel (elementwise) or one per head (headwise)."},
    )
    sharing: GateSharing = field(
        default=GateSharing.HEAD_SPECIFIC,
        metadata={
            "help": "Scores per head (head-specific), or the mean of the scores over all heads, taken after the "
            "activation (head-shared); the projection has the same size in both."
        },
    )
    combine: GateCombine = field(
        default=GateCombine.MULTIPLY,
        metadata={"help": "Multiply the gated tensor by the score, or add the score to it."},
    )
    activation: GateActivation = field(
        default=GateActivation.SIGMOID,
        metadata={"help": "The function from logit to score; ns-sigmoid is 0.5 + 0.5 * sigmoid(x)."},
    )
    input: GateInput = field(
        default=GateInput.HIDDEN,
        metadata={
            "help": "Compute the logits from the normalised hidden state by a linear map without bias (hidden), or "
            "learn them as a zero-initialised parameter (constant, position sdpa only)."
        },
    )
    sdpa_output_norm: bool = field(
        default=False,
        metadata={
            "help": "Baseline without a gate: RMSNorm of each head's attention output on its own, with one weight per "
            "head and channel."
        },
    )
    sdpa_output_activation: SdpaOutputActivation = field(
        default=SdpaOutputActivation.NONE,
        metadata={"help": "Baseline without a gate: this activation on the attention output, without parameters."},
    )
    row_alignment: int = field(
        default=16,
        metadata={
            "help": "Headwise gates only (others ignore it, so that one recipe serves all): pad the gate rows of each "
            "KV group in linear_qkv with zero rows to a multiple of this, for FP8 kernels. It belongs to the "
            "checkpoint's shape; a run's parallel sizes do not change it.",
            "metavar": "ROWS",
        },
    )
    switch_head_experts: int = field(
        default=1,
        metadata={
            "help": "Switch-Head: project each value head (--gate-position value), or key and value head (key-value), "
            "by this many experts, and sum them up, each times its own headwise score.",
            "metavar": "E",
        },
    )
    switch_head_top_k: int = field(
        default=1,
        metadata={
            "help": "Switch-Head: take only the experts with the K largest scores of a head, token by token.",
            "metavar": "K",
        },
    )

    def __post_init__(self) -> None:
        for axis in dataclasses.fields(self):
            object.__setattr__(self, axis.name, _coerce(axis, getattr(self, axis.name)))
        self._refuse_impossible_combinations()

    def _refuse_impossible_combinations(self) -> None:
        if not self.has_gate:
            for name in ("granularity", "sharing", "combine", "activation", "input"):
                if getattr(self, name) != _FIELDS[name].default:
                    raise UserError(
                        f"{_flag(name)} {getattr(self, name)} has no effect without a gate: "
                        f"choose a --gate-position other than none, or leave it out"
                    )
        if self.has_gate and (self.sdpa_output_norm or self.sdpa_output_activation != SdpaOutputActivation.NONE):
            flag = "--sdpa-output-norm" if self.sdpa_output_norm else "--sdpa-output-activation"
            raise UserError(f"{flag} is a baseline without a gate: drop it, or drop --gate-position {self.position}")
        if self.sdpa_output_norm and self.sdpa_output_activation != SdpaOutputActivation.NONE:
            raise UserError("--sdpa-output-norm and --sdpa-output-activation are two separate baselines: drop one")
        if self.input == GateInput.CONSTANT and self.position != GatePosition.SDPA:
            raise UserError(
                f"--gate-input constant is defined for --gate-position sdpa only, not for {self.position}: "
                f"use --gate-input hidden or --gate-position sdpa"
            )
        if self.position == GatePosition.OUTPUT and self.granularity == GateGranularity.HEADWISE:
            raise UserError(
                "--gate-position output has no heads, so headwise scores cannot be computed: use elementwise"
            )
        if self.position == GatePosition.OUTPUT and self.sharing == GateSharing.HEAD_SHARED:
            raise UserError(
                "--gate-position output has no heads to share scores over: use --gate-sharing head-specific"
            )
        self._refuse_impossible_experts()
        if self.row_alignment < 1:
            raise UserError(f"--gate-row-alignment must be a positive number of rows, not {self.row_alignment}")

    def _refuse_impossible_experts(self) -> None:
        experts, top_k = self.switch_head_experts, self.switch_head_top_k
        if experts < 1:
            raise UserError(f"--switch-head-experts must be at least 1, not {experts}")
        if not 1 <= top_k <= experts:
            raise UserError(
                f"--switch-head-top-k {top_k} is no number of experts to take of --switch-head-experts {experts}: give "
                f"1 to {experts}"
            )
        if experts == 1:
            if self.position == GatePosition.KEY_VALUE:
                raise UserError(
                    "--gate-position key-value is for Switch-Head: add --switch-head-experts, or gate keys or values"
                )
            return
        if self.position not in (GatePosition.VALUE, GatePosition.KEY_VALUE):
            raise UserError(
                f"--switch-head-experts {experts} are projections of values, or of keys and values: use "
                f"--gate-position value or key-value, not {self.position}"
            )
        for name, only in _OF_SWITCH_HEAD.items():
            if getattr(self, name) != only:
                raise UserError(
                    f"--switch-head-experts {experts} have one sigmoid score each in every head, which multiplies: "
                    f"use {_flag(name)} {only}, not {getattr(self, name)}"
                )

    @property
    def has_gate(self) -> bool:
        """Whether any tensor is gated; the baselines with a norm or an activation have no gate."""
        return self.position != GatePosition.NONE

    @property
    def is_baseline(self) -> bool:
        """Whether nothing is added to attention as Megatron has it."""
        return not (self.has_gate or self.acts_on_sdpa_output)

    @property
    def acts_on_sdpa_output(self) -> bool:
        """Whether each head's attention output is changed, by a gate or by a baseline's norm or activation."""
        return (
            self.position == GatePosition.SDPA
            or self.sdpa_output_norm
            or self.sdpa_output_activation != SdpaOutputActivation.NONE
        )

    @property
    def is_on_query_heads(self) -> bool:
        """Whether the gated tensor has the query heads, rather than the key and value heads or none."""
        return self.position in (GatePosition.SDPA, GatePosition.QUERY)

    @property
    def is_fused(self) -> bool:
        """Whether the gate's logits are rows of linear_qkv, rather than a parameter of the gate's own."""
        return self.has_gate and self.position != GatePosition.OUTPUT and self.input == GateInput.HIDDEN

    @property
    def is_padded(self) -> bool:
        """Whether `row_alignment` matters: the gate has rows in linear_qkv, and few of them."""
        return self.is_fused and self.granularity == GateGranularity.HEADWISE

    @property
    def is_switch_head(self) -> bool:
        """Whether values, or keys and values, have several projections."""
        return self.switch_head_experts > 1

    @property
    def key_experts(self) -> int:
        """How many projections each key head has."""
        return self.switch_head_experts if self.position == GatePosition.KEY_VALUE else 1

    @property
    def value_experts(self) -> int:
        """How many projections each value head has."""
        return self.switch_head_experts

    def fused_rows_per_group(self, num_attention_heads: int, num_query_groups: int, kv_channels: int) -> int:
        """Return how many rows of linear_qkv, padding not counted, are gate rows in the block of one KV group."""
        if not self.is_fused:
            return 0
        heads = num_attention_heads // num_query_groups if self.is_on_query_heads else 1
        channels = kv_channels if self.granularity == GateGranularity.ELEMENTWISE else 1
        return heads * channels * self.switch_head_experts

    def added_parameters(
        self, hidden_size: int, num_attention_heads: int, num_query_groups: int, kv_channels: int
    ) -> int:
        """Return how many parameters the gate or baseline adds to one layer, as the paper counts (no padding)."""
        if self.is_fused:
            rows = self.fused_rows_per_group(num_attention_heads, num_query_groups, kv_channels)
            rows += (self.key_experts + self.value_experts - 2) * kv_channels
            return rows * num_query_groups * hidden_size
        if self.position == GatePosition.OUTPUT:
            return hidden_size * hidden_size
        if self.input == GateInput.CONSTANT and self.granularity == GateGranularity.HEADWISE:
            return num_attention_heads
        if self.input == GateInput.CONSTANT or self.sdpa_output_norm:
            return num_attention_heads * kv_channels
        return 0


_FIELDS = {axis.name: axis for axis in dataclasses.fields(GateConfig)}

_OF_SWITCH_HEAD = {
    "granularity": GateGranularity.HEADWISE,
    "sharing": GateSharing.HEAD_SPECIFIC,
    "combine": GateCombine.MULTIPLY,
    "activation": GateActivation.SIGMOID,
}
"""The scores of Switch-Head."""


def _flag(name: str) -> str:
    """Return the command-line flag of the GateConfig field called `name`."""
    own = name.startswith(("sdpa_", "switch_head_"))
    return "--" + (name if own else f"gate_{name}").replace("_", "-")


def _destination(name: str) -> str:
    """Return the attribute of the parsed arguments that holds the GateConfig field called `name`."""
    return _flag(name).removeprefix("--").replace("-", "_")


def _coerce(axis: dataclasses.Field, value: Any) -> Any:
    """Return `value` as the field's type; an enum also takes its string."""
    flag, kind = _flag(axis.name), cast(type, axis.type)
    if issubclass(kind, StrEnum):
        known = [member.value for member in kind]
        if value in known:
            return kind(value)
        raise UserError(f"{flag} must be one of {', '.join(known)}, not {value!r}{nearest(str(value), known)}")
    if type(value) is not kind:  # bool is an int to isinstance
        expected = {bool: "true or false", int: "a whole number"}[kind]
        raise UserError(f"{flag} must be {expected}, not {value!r}")
    return value


PRESETS: dict[str, GateConfig] = {
    "baseline": GateConfig(),
    "sdpa-elementwise": GateConfig(position=GatePosition.SDPA),
    "sdpa-headwise": GateConfig(position=GatePosition.SDPA, granularity=GateGranularity.HEADWISE),
    "value-elementwise": GateConfig(position=GatePosition.VALUE),
    "value-headwise": GateConfig(position=GatePosition.VALUE, granularity=GateGranularity.HEADWISE),
    "key-elementwise": GateConfig(position=GatePosition.KEY),
    "query-elementwise": GateConfig(position=GatePosition.QUERY),
    "output-elementwise": GateConfig(position=GatePosition.OUTPUT),
    "sdpa-elementwise-shared": GateConfig(position=GatePosition.SDPA, sharing=GateSharing.HEAD_SHARED),
    "value-elementwise-shared": GateConfig(position=GatePosition.VALUE, sharing=GateSharing.HEAD_SHARED),
    "sdpa-elementwise-additive-silu": GateConfig(
        position=GatePosition.SDPA, combine=GateCombine.ADD, activation=GateActivation.SILU
    ),
    "sdpa-elementwise-silu": GateConfig(position=GatePosition.SDPA, activation=GateActivation.SILU),
    "sdpa-elementwise-additive-identity": GateConfig(
        position=GatePosition.SDPA, combine=GateCombine.ADD, activation=GateActivation.IDENTITY
    ),
    "sdpa-elementwise-ns-sigmoid": GateConfig(position=GatePosition.SDPA, activation=GateActivation.NS_SIGMOID),
    "sdpa-constant": GateConfig(position=GatePosition.SDPA, input=GateInput.CONSTANT),
    "sdpa-rmsnorm": GateConfig(sdpa_output_norm=True),
    "sdpa-silu": GateConfig(sdpa_output_activation=SdpaOutputActivation.SILU),
}
"""Each row of the paper's tables 1, 3 and 4 that differs from the baseline in the gate alone, by name."""

SWITCH_HEAD_PRESETS: dict[str, GateConfig] = {
    f"switch-head-{short}-{experts}-top-{top_k}": GateConfig(
        position=position,
        granularity=GateGranularity.HEADWISE,
        switch_head_experts=experts,
        switch_head_top_k=top_k,
    )
    for short, position, experts, top_k in (
        ("kv", GatePosition.KEY_VALUE, 8, 8),
        ("kv", GatePosition.KEY_VALUE, 4, 4),
        ("v", GatePosition.VALUE, 4, 4),
        ("v", GatePosition.VALUE, 8, 2),
    )
}
"""The rows of the paper's table 6, by name; its "v 1 top 1" is value-headwise."""

ALL_PRESETS = PRESETS | SWITCH_HEAD_PRESETS

MEGATRON_GATE_PRESET = "sdpa-elementwise"
"""The preset that is Megatron's own ``--attention-output-gate``: same math, same rows of linear_qkv."""


def preset(name: str) -> GateConfig:
    """Return the preset called `name`; raise UserError with the nearest names when there is none."""
    if name not in ALL_PRESETS:
        hint = nearest(name, ALL_PRESETS) or f"; known presets: {', '.join(ALL_PRESETS)}"
        raise UserError(f"there is no gate preset {name!r}{hint}")
    return ALL_PRESETS[name]


def preset_name(config: GateConfig) -> str | None:
    """Return the name of the preset with the same gate as `config`, whatever its row alignment, or None."""
    for name, candidate in ALL_PRESETS.items():
        if dataclasses.replace(candidate, row_alignment=config.row_alignment) == config:
            return name
    return None


def describe(config: GateConfig) -> str:
    """Return the preset's name, or else the flags of its axes, and the row alignment if it is not the default."""
    name = preset_name(config)
    values = {axis: getattr(config, axis) for axis in _FIELDS if name is None or axis == "row_alignment"}
    if not config.is_padded:
        del values["row_alignment"]
    flags = [f"{_flag(axis)} {value}" for axis, value in values.items() if value != _FIELDS[axis].default]
    return " ".join([name, *flags] if name else flags)


def add_gate_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add ``--gate-preset`` and one flag per field of GateConfig to `parser`, each None when not given."""
    group = parser.add_argument_group("gated attention", "which gate the attention has: a preset, or axis by axis")
    group.add_argument(
        "--gate-preset", metavar="NAME", default=None, help=f"A gate by name, one of: {', '.join(ALL_PRESETS)}."
    )
    for name, axis in _FIELDS.items():
        description = f"{axis.metadata['help']} Default: {str(axis.default).lower()}."
        kind: Any = axis.type
        if kind is bool:
            group.add_argument(_flag(name), action="store_true", default=None, help=description)
        elif kind is int:
            group.add_argument(_flag(name), type=int, metavar=axis.metadata["metavar"], default=None, help=description)
        else:
            choices = [member.value for member in kind]
            group.add_argument(_flag(name), choices=choices, default=None, help=description)
    return group


def gate_config_from_args(args: argparse.Namespace) -> GateConfig:
    """Return the gate that the parsed flags describe.

    A preset may be repeated axis by axis, but not contradicted; only the row alignment, which no preset is about, may
    differ. Megatron's ``args.attention_output_gate``, where true, counts as the preset sdpa-elementwise.

    Raises:
        UserError: flags contradict each other, a preset is unknown, or the combination is refused by GateConfig.
    """
    given: dict[str, Any] = {name: getattr(args, _destination(name), None) for name in _FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    chosen = getattr(args, "gate_preset", None)
    source = f"--gate-preset {chosen}"
    if getattr(args, "attention_output_gate", False):
        if chosen is not None and preset(chosen) != preset(MEGATRON_GATE_PRESET):
            raise UserError(f"{source} contradicts --attention-output-gate, which is {MEGATRON_GATE_PRESET}: drop one")
        chosen, source = MEGATRON_GATE_PRESET, "--attention-output-gate"
    if chosen is None:
        return GateConfig(**given)

    base = preset(chosen)
    for name, value in given.items():
        expected, flag = getattr(base, name), _flag(name)
        if name != "row_alignment" and _coerce(_FIELDS[name], value) != expected:
            raise UserError(f"{flag} {value} contradicts {source}, which has {flag} {expected}: drop one of the two")
    return dataclasses.replace(base, **given)
