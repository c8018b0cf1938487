"""The step of a micro batch is what Megatron's straggler detection times."""

from typing import Any
from unittest import mock

import pytest
from megatron.training import training

from megagate.pretrain import batch


def test_reading_and_the_forward_pass_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them Megatron divides the work of a step by no time at all."""
    assert batch.stragglers is training.stimer
    order: list[str] = []
    detector = mock.MagicMock()
    detector.side_effect = lambda bdata: order.append("data") or detector
    detector.__enter__.side_effect = lambda: order.append("start")
    detector.__exit__.side_effect = lambda *error: order.append("stop")

    def read(*arguments: Any) -> dict[str, None]:
        order.append("read")
        return dict.fromkeys(batch.BATCH_KEYS)

    monkeypatch.setattr(batch, "stragglers", detector)
    monkeypatch.setattr(batch, "get_timers", mock.MagicMock())
    monkeypatch.setattr(batch, "get_attr_wrapped_model", mock.MagicMock())
    monkeypatch.setattr(batch, "get_batch", read)
    batch.forward_step(None, lambda *positional, **named: order.append("forward"))  # type: ignore[arg-type]
    assert order == ["data", "start", "read", "stop", "start", "forward", "stop"]
