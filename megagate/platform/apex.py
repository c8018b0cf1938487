"""NVIDIA's Apex, an optional package with fused kernels: found by what it can do, and not by its name.

PyPI has an unrelated project of the name `apex`, a web toolkit, and a folder called apex, such as a clone of NVIDIA's
repository, is importable too. Megatron asks in several places whether `import apex` succeeds, and acts on it. So what
is not NVIDIA's is hidden from import before Megatron is imported, and whoever installed it is told (`notice`).

What is used, where there is a GPU: matrix products that add to the gradients of weights in place, Megatron's own use of
the module `fused_weight_gradient_mlp_cuda`; RMSNorm in one kernel, in the torch backend. Megatron also takes its Adam
from Apex where Transformer Engine is missing. Nothing requires any of it. How to install it: docs/installation.md.
"""

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PARTS = ("multi_tensor_apply", "normalization", "optimizers")
"""Subpackages of NVIDIA's Apex, which its other namesakes lack."""

_unrelated: Path | None = None


def is_nvidias(directories: list[str]) -> bool:
    """Whether the package in these directories is NVIDIA's; it is not imported."""
    return any(Path(directory, part).is_dir() for directory in directories for part in PARTS)


def hide_unrelated() -> None:
    """Make `import apex` fail where another package has the name; to be called before Megatron is imported."""
    global _unrelated
    if "apex" in sys.modules:
        return
    spec = importlib.machinery.PathFinder.find_spec("apex")
    if spec is None:
        return
    directories = list(spec.submodule_search_locations or ())
    if not is_nvidias(directories):
        _unrelated = Path(directories[0] if directories else spec.origin or "apex")
        sys.modules["apex"] = None  # type: ignore[assignment]  # makes the import raise ImportError


def notice() -> str | None:
    """Return a sentence about a package of the same name, or None where there is none."""
    if _unrelated is None:
        return None
    return f"{_unrelated} is not NVIDIA's Apex and is not used; docs/installation.md says where that is, if you want it"


def has_fused_weight_gradients() -> bool:
    """Whether Megatron's linear layers can add to the gradients of their weights in place: on a GPU, with Apex."""
    return torch.cuda.is_available() and _has(
        "fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"
    )


@functools.cache
def fused_rms_norm() -> Callable[..., Any] | None:
    """Return Apex's function of input, weight, shape and epsilon for CUDA tensors of one dtype, or None without it.

    The package alone is not enough: it can be installed without its compiled part.
    """
    if not _has("fused_layer_norm_cuda", "rms_forward_affine", "rms_backward_affine"):
        return None
    if not _has("apex.normalization.fused_layer_norm", "fused_rms_norm_affine"):
        return None
    return importlib.import_module("apex.normalization.fused_layer_norm").fused_rms_norm_affine


def _has(module: str, *names: str) -> bool:
    """Whether a module imports and has these names; a compiled one may be there and not fit the installed torch."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    return all(hasattr(found, name) for name in names)
