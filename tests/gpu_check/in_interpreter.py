"""The parts that check and time the fused gate, with Triton's interpreter in place of a GPU.

tests/gate/test_fused.py runs it. What is timed means nothing here; that it can be timed does.
"""

from functools import partial

import pytest
import torch
import torch._dynamo.config
import triton

from megagate.gate import fused
from megagate.gpu_check import kernel
from megagate.gpu_check.machine import Machine

assert triton.knobs.runtime.interpret
HERE = Machine(is_cuda=False, seconds=0.1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for the interpreter; without CUDA, device="cuda" is the CPU."""
    for name, size in {"HEADS": 4, "GROUPS": 2, "CHANNELS": 8, "COPIED": 2**16}.items():
        monkeypatch.setattr(kernel, name, size)
    monkeypatch.setattr(kernel, "ROUNDING", {torch.bfloat16: kernel.ROUNDING[torch.bfloat16]})
    monkeypatch.setattr(kernel, "TOKENS", {"results": 3, "times": 3})
    monkeypatch.setattr(kernel, "_require", lambda machine: None)


def test_results() -> None:
    rows = list(kernel.kernel_results(HERE))
    assert len(rows) == 2 * 3 * 2 * 4
    assert all(row.is_good for row in rows), [row for row in rows if not row.is_good]


def test_wrong_results_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = fused._launch_forward

    def wrong(y, logits, result, *options):
        forward(y, logits, result, *options)
        result.flatten()[-1] *= 1.5

    monkeypatch.setattr(fused, "_launch_forward", wrong)
    assert sum(not row.is_good for row in kernel.kernel_results(HERE)) > 20


def test_nan_in_a_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = fused._launch_backward

    def wrong(*args):
        grad_y, grad_logits = backward(*args)
        grad_logits.flatten()[-1] = float("nan")
        return grad_y, grad_logits

    monkeypatch.setattr(fused, "_launch_backward", wrong)
    monkeypatch.setattr(kernel, "ACTIVATIONS", ("sigmoid", "identity"))
    rows = list(kernel.kernel_results(HERE))
    # Where logits are added as they are there is no kernel.
    assert [row.what for row in rows if row.is_good] == ["elementwise, head-specific, add, identity, bfloat16"]


def test_times() -> None:
    rows = list(kernel.kernel_times(HERE))
    assert [row.unit for row in rows] == ["GB/s", *["us"] * (2 * 2 * len(kernel.TIMED))]
    assert all(row.value > 0 for row in rows)


def test_compiled_functions_can_be_timed_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compiled for its own shapes, and its backward pass runs more than once."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    monkeypatch.setattr(kernel, "HEADS", 8)
    monkeypatch.setattr(kernel, "CHANNELS", 16)
    for gate in kernel.TIMED.values():
        y, logits = (part.requires_grad_() for part in kernel.tensors(gate, 8, torch.bfloat16))
        calls = kernel._passes(gate, y, logits)["backward"]
        for _ in range(2):
            for actual, expected in zip(calls["compiled"](), calls["fused"](), strict=True):
                torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)
        assert "Compiled" in type(calls["compiled"].args[0].grad_fn).__name__
