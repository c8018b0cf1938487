"""Packaging of megagate: what it needs at run time, and the optional sets of packages around it."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read_version() -> str:
    """Return ``__version__`` as written in the package, without importing it and so without needing torch."""
    source = (HERE / "megagate" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, flags=re.MULTILINE)
    if match is None:
        raise RuntimeError('megagate/__init__.py has no line of the form __version__ = "..."')
    return match.group(1)


def read_description() -> str:
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


EVAL = ["accelerate", "lm-eval", "transformers"]
GDN = ["flash-linear-attention"]
MUON = ["emerging-optimizers"]
PARQUET = ["pyarrow"]
PLOT = ["matplotlib"]
TIKTOKEN = ["tiktoken"]
ZSTD = ["backports.zstd"]

setup(
    name="megagate",
    version=read_version(),
    description="Pretraining of mixture-of-experts language models with gated attention on Megatron",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megagate", "megagate.*"]),
    package_data={"megagate": ["py.typed", "checkpoint/exported/*.py"]},
    install_requires=[
        "megatron-core>=0.19.2,<0.20",
        "torch>=2.11",
        "absl-py",
        "numpy",
        "protobuf",
        "psutil",
        "pyyaml",
        "safetensors",
        "sentencepiece>=0.2.3",
        "tensorboard",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]"],
        "eval": EVAL,
        "gdn": GDN,
        "muon": MUON,
        "parquet": PARQUET,
        "plot": PLOT,
        "tiktoken": TIKTOKEN,
        "zstd": ZSTD,
        "dev": [
            *EVAL,
            *GDN,
            *MUON,
            *PARQUET,
            *PLOT,
            *TIKTOKEN,
            *ZSTD,
            "hypothesis",
            "mypy",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "types-PyYAML",
        ],
    },
)
