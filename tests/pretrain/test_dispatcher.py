"""DeepEP takes tokens to their experts where it is installed and safe, and what it cannot do is refused."""

import argparse

import pytest
import torch
from megatron.core.transformer.moe import fused_a2a

from megagate.errors import UserError
from megagate.pretrain.dispatcher import choose_dispatcher

RUN = {
    "moe_token_dispatcher_type": None,
    "moe_flex_dispatcher_backend": "deepep",
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
    "num_experts": 128,
    "transformer_impl": "transformer_engine",
    "bf16": True,
    "moe_pad_expert_input_to_capacity": False,
    "deterministic_mode": False,
    "cuda_graph_impl": "none",
    "rank": 0,
}
"""Arguments of a run for which it is chosen, on a machine with 8 GPUs and DeepEP."""


def chosen(elsewhere: bool = False, **changed: object) -> str:
    args = argparse.Namespace(**(RUN | changed))
    choose_dispatcher(args, elsewhere)
    return args.moe_token_dispatcher_type


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_a2a, "HAVE_DEEP_EP", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


def test_chosen_for_experts_within_a_machine(machine: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen() == chosen(expert_model_parallel_size=2) == "flex"
    said = capsys.readouterr().out
    assert said.startswith(
        "megagate: DeepEP is installed and takes tokens to their experts; --moe-token-dispatcher-type"
    )
    assert chosen(rank=1) == "flex"
    for changed in (
        {"expert_model_parallel_size": 16},  # over a network that may route adaptively
        {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 2},
        {"expert_model_parallel_size": 6},  # every second group would be on two machines
        {"expert_model_parallel_size": 1},
        {"num_experts": None},
        {"transformer_impl": "local"},
        {"bf16": False},
        {"moe_flex_dispatcher_backend": "hybridep"},
        {"moe_pad_expert_input_to_capacity": True},
        {"deterministic_mode": True},
        {"cuda_graph_impl": "transformer_engine"},
        {"elsewhere": True},
        {"moe_token_dispatcher_type": "alltoall"},
    ):
        assert chosen(**changed) == "alltoall", changed
    assert chosen(moe_token_dispatcher_type="allgather") == "allgather"
    assert chosen(moe_token_dispatcher_type="flex", expert_model_parallel_size=16) == "flex"
    assert not capsys.readouterr().out


def test_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen() == "alltoall"
    with pytest.raises(UserError, match="-dispatcher-type flex needs a GPU and DeepEP, which is not installed"):
        chosen(moe_token_dispatcher_type="flex")
    assert chosen(moe_token_dispatcher_type="flex", elsewhere=True) == "flex"
    with pytest.raises(UserError, match="is for experts on several ranks"):
        chosen(moe_token_dispatcher_type="flex", expert_model_parallel_size=1, elsewhere=True)
    with pytest.raises(UserError, match="sends bf16 alone: add --bf16"):
        chosen(moe_token_dispatcher_type="flex", bf16=False, elsewhere=True)
