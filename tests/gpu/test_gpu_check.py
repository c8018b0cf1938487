"""On a machine with a GPU, every part of tools/gpu_check.py passes."""

import subprocess
import sys

import pytest
import torch

from megagate.gpu_check.command import PARTS
from tests.distributed import ROOT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


@pytest.mark.parametrize("part", PARTS)
def test_part(part: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--parts", part, "--seconds", "5"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout + finished.stderr
