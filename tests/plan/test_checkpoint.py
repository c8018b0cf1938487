"""A checkpoint has the bytes for each parameter that Megatron's have: counted in real ones of each kind."""

from argparse import Namespace

import pytest
import torch

from megagate.plan.summary import checkpoint_width


@pytest.mark.parametrize(
    ("dtype", "is_distributed", "found"),
    [(torch.bfloat16, True, 14), (torch.float32, True, 16), (torch.float32, False, 12)],
)
def test_bytes_for_each_parameter(dtype: torch.dtype, is_distributed: bool, found: int) -> None:
    args = Namespace(params_dtype=dtype, use_distributed_optimizer=is_distributed)
    assert checkpoint_width(args) == found
