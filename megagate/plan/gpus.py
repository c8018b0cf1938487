"""What a plan knows of GPUs: peaks, memory and links, from their vendor's data sheets.

Peaks are those of dense matrices; links are per GPU and direction. The network is one 400 Gb/s port for each GPU (200
for A100), as in the vendor's reference systems; `tools/plan.py --network` gives another. Memory is not the data sheet's
but what CUDA gives to programs, as torch's messages print it.
"""

from dataclasses import dataclass

from megagate.errors import UserError, nearest

TERA, GIGA = 1e12, 1e9
GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU in its usual machine."""

    name: str
    bf16: float
    """Operations per second."""
    fp8: float | None
    """None where it has no such units."""
    memory: float
    """Bytes that programs can use."""
    memory_bandwidth: float
    """Bytes per second."""
    nvlink: float
    """Bytes per second to the other GPUs of the node."""
    network: float
    """Bytes per second to other nodes."""
    node: int
    """GPUs that NVLink connects."""
    watts: float
    """The most that one draws, without its share of the machine."""


KNOWN = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 312 * TERA, None, 79.2 * GIB, 2.04 * TERA, 300 * GIGA, 25 * GIGA, 8, 400),
        Gpu("h100", 989 * TERA, 1979 * TERA, 79.1 * GIB, 3.35 * TERA, 450 * GIGA, 50 * GIGA, 8, 700),
        Gpu("h200", 989 * TERA, 1979 * TERA, 139.8 * GIB, 4.8 * TERA, 450 * GIGA, 50 * GIGA, 8, 700),
        Gpu("b200", 2250 * TERA, 4500 * TERA, 178.3 * GIB, 8 * TERA, 900 * GIGA, 50 * GIGA, 8, 1000),
        Gpu("gb200", 2500 * TERA, 5000 * TERA, 184.3 * GIB, 8 * TERA, 900 * GIGA, 50 * GIGA, 72, 1200),
    )
}


def gpu(name: str) -> Gpu:
    """Return the GPU of that name.

    Raises:
        UserError: it is not known; the message names those that are.
    """
    if name.lower() not in KNOWN:
        raise UserError(f"--gpu {name} is not known{nearest(name.lower(), KNOWN)}; known are {', '.join(KNOWN)}")
    return KNOWN[name.lower()]
