"""What --fp8-dot-product-attention, --fp8-multi-head-attention and --gate-precision come to, as JSON.

python -m tests.te.flags FILE RECIPE [hopper]
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.te import describe, machine


def main(file: str, recipe: str, gpu: str = "blackwell") -> None:
    """Build a model for each flag."""
    machine.pretend(machine.HOPPER if gpu == "hopper" else machine.BLACKWELL)
    flags = describe.flags_for("transformer_engine", "value-elementwise", recipe, 1)
    found: dict[str, Any] = {"dot product": describe.build([*flags, "--fp8-dot-product-attention"])["attention"]}
    if recipe == "delayed":
        found["multi head"] = describe.build([*flags, "--fp8-multi-head-attention"])["attention"]
    padded = describe.build([*flags, "--moe-router-padding-for-quantization"])
    found["padded by the router"] = padded["tokens"]
    model = describe.build([*flags, "--gate-precision", "fp32"])
    attention = "decoder.layers.2.self_attention"
    found["gate precision"] = [
        model["modules"][f"{attention}.linear_qkv"],
        model["modules"]["decoder.layers.2.input_layernorm"],
        model["fuses gradients"],
    ]
    Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
