"""The table of families in docs/conversion.md says which families there are, and what the tests compare them on."""

from pathlib import Path

from megagate.checkpoint.families import FAMILIES
from tests.checkpoint.families.test_families import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "conversion.md"
MARK = "<!-- table of families -->"

WHAT = {
    "qwen3": "Qwen3, dense, no gate",
    "qwen3_moe": "Qwen3-MoE, no gate",
    "qwen3_next": "Qwen3-Next: elementwise gate, Gated DeltaNet, shared expert",
    "qwen3_5_moe": "Qwen3.5-MoE, its text model",
    "megagate": "our own: every gate, dense and experts, Gated DeltaNet",
    "official": "qiuzh20/gated_attention: headwise, elementwise and no gate",
    "step3p5": "Step-3.5 with layers that are alike: headwise `g_proj`",
    "afmoe": "AFMoE: refused, with the reason",
}


def table() -> list[str]:
    """Return the lines of the table."""
    lines = ["| `--family` | models | import and export | logits compared on |", "|---|---|---|---|"]
    for family in FAMILIES:
        tested = [model for model in MODELS.values() if model.family.name == family.name]
        layouts = [str(layout) for model in tested for layout in model.layouts]
        if family.name == "megagate":
            converts, compared = "yes", "one process"
        else:
            converts = "yes" if tested else "no"
            compared = ", ".join(["one process", *dict.fromkeys(layouts)]) if tested else "-"
        lines.append(f"| `{family.name}` | {WHAT[family.name]} | {converts} | {compared} |")
    return lines


def test_table_of_families() -> None:
    written = PAGE.read_text(encoding="utf-8").partition(f"{MARK}\n")[2].strip("\n").partition("\n\n")[0]
    expected = "\n".join(table())
    assert written == expected, f"put this into {PAGE.name}:\n{expected}"
