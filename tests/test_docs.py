"""The table of presets in docs/gates.md says what the code does."""

import re
from pathlib import Path

from megagate.gate import PRESETS, SWITCH_HEAD_PRESETS, preset
from megagate.gate.config import add_gate_arguments
from megagate.parser import Parser

PAGE = (Path(__file__).parents[1] / "docs" / "gates.md").read_text(encoding="utf-8")
LAYERS = 24
SHAPE = {"H": 2048, "q": 32, "g": 4, "d": 128}
"""The paper's 15A2B model."""


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its head."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_presets_and_their_parameters() -> None:
    table = rows("Presets")
    assert [row[0].strip("`") for row in table] == list(PRESETS)
    for (name, _, formula, added, *_), gate in zip(table, PRESETS.values(), strict=True):
        expected = gate.added_parameters(SHAPE["H"], SHAPE["q"], SHAPE["g"], SHAPE["d"])
        factors = [SHAPE.get(letter, 0) for letter in formula.split()]
        product = 1
        for factor in factors:
            product *= factor
        assert product == expected, name
        assert int(added.replace(",", "")) == LAYERS * expected, name


def test_parameters_of_switch_head() -> None:
    table = {row[0].strip("`"): int(row[-1].replace(",", "")) for row in rows("Switch-Head")}
    assert list(table) == [*SWITCH_HEAD_PRESETS, "value-headwise"]
    for name, added in table.items():
        assert added == LAYERS * preset(name).added_parameters(SHAPE["H"], SHAPE["q"], SHAPE["g"], SHAPE["d"]), name


def test_a_row_of_two_of_the_papers_tables_has_the_same_numbers() -> None:
    (one,) = [row for row in rows("Presets") if row[0] == "`value-headwise`"]
    (other,) = [row for row in rows("Switch-Head") if row[0] == "`value-headwise`"]
    assert one[-3:] == other[2:5], "PPL, HellaSwag, MMLU"


def test_axes_are_the_flags_with_their_values() -> None:
    parser = Parser()
    choices = {action.option_strings[0]: action.choices for action in add_gate_arguments(parser)._group_actions}
    for flag, values, *_ in rows("Axes"):
        names = re.findall(r"`([^`]+)`", values)
        if names:
            assert names == list(choices.pop(flag.strip("`"))), flag
        else:
            for name in re.findall(r"--[a-z-]+", flag):
                choices.pop(name)
    assert list(choices) == ["--gate-preset"]
