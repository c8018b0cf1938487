"""Teach Megatron to run without CUDA: the one module that knows about machines that have none.

Megatron addresses "the" device in a few dozen places (`torch.cuda.current_device()`, `device="cuda"`, streams, RNG
states, tensor type names). Each :class:`Patch` below answers one kind of such place with the CPU and carries its
reason; `tests/platform/test_cpu.py` shows for each that Megatron still fails without it. gloo does the communication.

`activate` is called by `megagate.platform` where no CUDA device exists, before Megatron is imported;
`activate_training` completes it for Megatron's training loop, which the training entry point imports. The command-line
flags that a CPU run needs are `ARGUMENTS`.
"""

import contextlib
import functools
import importlib
import os
import resource
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed
import torch.utils._device
from torch.nn import functional

CPU = torch.device("cpu")

ARGUMENTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    # Initialisation that is the same for every parallel layout; see megagate.model.initialization.
    "use_cpu_initialization": True,
    # Megatron asks for a GPU's compute capability; a recipe for GPUs may want it.
    "moe_grouped_gemm": False,
}
"""Values that the trainer gives to Megatron's arguments on this platform (destination name -> value)."""

ENVIRONMENT = {
    # torch.compile would look for a C++ compiler and take minutes; Megatron's jit_fuser is torch.compile.
    "TORCHDYNAMO_DISABLE": "1",
    # Megatron asserts this for GPUs before Blackwell; it has no effect here.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}

GPU_ONLY_PACKAGES = ("transformer_engine", "transformer_engine_torch", "fla")
"""Packages hidden from import: without a GPU the first two fail on missing driver libraries, not with ImportError, and
the third takes many seconds to import for kernels that cannot run."""


@dataclass
class Patch:
    """One kind of place in Megatron that assumes CUDA, and what answers it here."""

    name: str
    reason: str
    replacements: Callable[[], dict[tuple[Any, str], Any]]
    """Returns (owner, attribute) -> replacement; called when the patch is applied."""
    originals: dict[tuple[Any, str], Any] = field(default_factory=dict)

    def apply(self) -> None:
        """Put the replacements in place; does nothing when they already are."""
        if self.originals:
            return
        for (owner, attribute), replacement in self.replacements().items():
            self.originals[owner, attribute] = vars(owner).get(attribute, getattr(owner, attribute))
            setattr(owner, attribute, replacement)

    def remove(self) -> None:
        """Put the originals back."""
        for (owner, attribute), original in self.originals.items():
            setattr(owner, attribute, original)
        self.originals.clear()


class NullStream:
    """Stands for a CUDA stream: work on the CPU is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0
        self.device = CPU

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: there is one queue."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: the event has already happened."""

    def synchronize(self) -> None:
        """Do nothing: work is complete when the call that started it returns."""

    def record_event(self, event: Any = None) -> "NullEvent":
        """Return an event that has already happened."""
        return event or NullEvent()


class NullEvent:
    """Stands for a CUDA event that has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Do nothing."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _with_cpu_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory so that a CUDA `device` keyword means the CPU, and memory is not pinned for a copy."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return wrapper


def _tensor_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args and _is_cuda(args[0]):
        args = (CPU, *args[1:])
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = CPU
    return _original_tensor_to(self, *args, **kwargs)


_original_tensor_to = torch.Tensor.to


def _device_literals() -> dict[tuple[Any, str], Any]:
    # torch keeps a cached set of these functions for `with torch.device(...)`: fill it with the originals first.
    torch.utils._device._device_constructors()
    factories = [
        "arange",
        "empty",
        "empty_like",
        "empty_strided",
        "full",
        "full_like",
        "ones",
        "ones_like",
        "rand",
        "rand_like",
        "randint",
        "randn",
        "randn_like",
        "randperm",
        "tensor",
        "as_tensor",
        "zeros",
        "zeros_like",
    ]
    replaced: dict[tuple[Any, str], Any] = {(torch, name): _with_cpu_device(getattr(torch, name)) for name in factories}
    replaced[torch.Tensor, "to"] = _tensor_to
    return replaced


def _current_device() -> dict[tuple[Any, str], Any]:
    return {(torch.cuda, "current_device"): lambda: CPU, (torch.cuda, "set_device"): lambda device: None}


def _device_count() -> dict[tuple[Any, str], Any]:
    return {(torch.cuda, "device_count"): lambda: 1}


def _streams() -> dict[tuple[Any, str], Any]:
    return {
        (torch.cuda, "Stream"): NullStream,
        (torch.cuda, "Event"): NullEvent,
        (torch.cuda, "current_stream"): lambda device=None: NullStream(),
        (torch.cuda, "default_stream"): lambda device=None: NullStream(),
        (torch.cuda, "set_stream"): lambda stream: None,
        (torch.cuda, "stream"): lambda stream: contextlib.nullcontext(),
        (torch.cuda, "synchronize"): lambda device=None: None,
        (torch.Tensor, "record_stream"): lambda tensor, stream: None,
    }


def _moves() -> dict[tuple[Any, str], Any]:
    return {
        (torch.Tensor, "cuda"): lambda self, *args, **kwargs: self,
        (torch.Tensor, "pin_memory"): lambda self, *args, **kwargs: self,
        (torch.nn.Module, "cuda"): lambda self, device=None: self,
    }


_original_tensor_type = torch.Tensor.type


def _tensor_type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    if dtype is None:
        name = _original_tensor_type(self).replace("torch.meta.", "torch.")  # a dry run's model
        return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)
    return _original_tensor_type(self, dtype, non_blocking, **kwargs)


def _tensor_type_names() -> dict[tuple[Any, str], Any]:
    return {(torch.Tensor, "type"): _tensor_type}


def _random_state() -> dict[tuple[Any, str], Any]:
    def get_state(device: Any = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = "cuda") -> None:
        torch.set_rng_state(state)

    return {
        (torch.cuda, "get_rng_state"): get_state,
        (torch.cuda, "set_rng_state"): set_state,
        (torch.cuda.random, "get_rng_state"): get_state,
        (torch.cuda.random, "set_rng_state"): set_state,
        (torch.cuda, "manual_seed"): torch.default_generator.manual_seed,
        (torch.cuda, "default_generators"): {CPU: torch.default_generator},
        (torch.cuda, "_lazy_call"): lambda callback, **kwargs: callback(),
        (torch.cuda, "_lazy_init"): lambda: None,
    }


_original_all_to_all_single = torch.distributed.all_to_all_single


def _all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    def integers(sizes: Any) -> list[int] | None:
        return None if sizes is None else [int(size) for size in sizes]

    return _original_all_to_all_single(
        output, input, integers(output_split_sizes), integers(input_split_sizes), group=group, async_op=async_op
    )


def _all_to_all_splits() -> dict[tuple[Any, str], Any]:
    return {(torch.distributed, "all_to_all_single"): _all_to_all_single}


_original_all_gather = torch.distributed.all_gather
_original_reduce_scatter = torch.distributed.reduce_scatter


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return `tensor` with zero rows up to `rows`."""
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


def _all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    rows = max(output.shape[0] if output.dim() else 0 for output in tensor_list)
    if async_op or all(output.shape == tensor_list[0].shape for output in tensor_list):
        return _original_all_gather(tensor_list, tensor, group=group, async_op=async_op)
    received = [output.new_empty(rows, *output.shape[1:]) for output in tensor_list]
    _original_all_gather(received, _padded(tensor, rows), group=group)
    for output, whole in zip(tensor_list, received, strict=True):
        output.copy_(whole[: output.shape[0]])
    return None


def _reduce_scatter(
    output: torch.Tensor, input_list: list[torch.Tensor], op: Any = None, group: Any = None, async_op: bool = False
) -> Any:
    op = torch.distributed.ReduceOp.SUM if op is None else op
    if async_op or all(part.shape == input_list[0].shape for part in input_list):
        return _original_reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
    rows = max(part.shape[0] for part in input_list)
    received = output.new_empty(rows, *output.shape[1:])
    _original_reduce_scatter(received, [_padded(part, rows) for part in input_list], op=op, group=group)
    output.copy_(received[: output.shape[0]])
    return None


def _uneven_gather() -> dict[tuple[Any, str], Any]:
    return {
        (torch.distributed, "all_gather"): _all_gather,
        (torch.distributed, "reduce_scatter"): _reduce_scatter,
    }


def _resident_bytes(device: Any = None) -> int:
    return psutil.Process().memory_info().rss


def _peak_resident_bytes(device: Any = None) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _device_properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name="cpu",
        major=0,
        minor=0,
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=os.cpu_count() or 1,
    )


def _properties_and_memory() -> dict[tuple[Any, str], Any]:
    return {
        (torch.cuda, "get_device_properties"): _device_properties,
        (torch.cuda, "get_device_capability"): lambda device=None: (0, 0),
        (torch.cuda, "get_device_name"): lambda device=None: "cpu",
        (torch.cuda, "memory_allocated"): _resident_bytes,
        (torch.cuda, "memory_reserved"): _resident_bytes,
        (torch.cuda, "device_memory_used"): _resident_bytes,
        (torch.cuda, "max_memory_allocated"): _peak_resident_bytes,
        (torch.cuda, "max_memory_reserved"): _peak_resident_bytes,
        (torch.cuda, "memory_stats"): lambda device=None: {
            "allocated_bytes.all.current": _resident_bytes(),
            "allocated_bytes.all.peak": _peak_resident_bytes(),
            "reserved_bytes.all.current": _resident_bytes(),
            "reserved_bytes.all.peak": _peak_resident_bytes(),
            "allocation.all.allocated": 0,
        },
        (torch.cuda, "reset_peak_memory_stats"): lambda device=None: None,
    }


TORCH_PATCHES = [
    Patch(
        "current_device",
        "Megatron allocates buffers on torch.cuda.current_device(), which needs a driver.",
        _current_device,
    ),
    Patch(
        "device_count",
        "initialize_megatron makes the model-parallel groups and seeds the RNG tracker only if device_count() > 0.",
        _device_count,
    ),
    Patch(
        "device_literals",
        'Schedules, optimizer, checkpointing and the training loop create tensors with device="cuda". The factories '
        "are replaced, not a TorchFunctionMode entered, so that other operators cost nothing and threads are covered.",
        _device_literals,
    ),
    Patch("streams", "DDP, data loading and pipeline schedules use CUDA streams and events.", _streams),
    Patch("moves", "Models and batches are moved with .cuda().", _moves),
    Patch(
        "tensor_type_names",
        'The optimizer and gradient clipping compare Tensor.type() with "torch.cuda.FloatTensor" and its kind.',
        _tensor_type_names,
    ),
    Patch(
        "random_state",
        "The RNG tracker reads and writes CUDA generator states; dropout here draws from the CPU generator.",
        _random_state,
    ),
    Patch(
        "all_to_all_splits",
        "The token dispatcher passes split sizes as a tensor, which gloo's all_to_all_single does not take.",
        _all_to_all_splits,
    ),
    Patch(
        "uneven_gather",
        "Expert tensor parallelism gathers and scatters a different number of tokens per rank, which gloo's all_gather "
        "and reduce_scatter do not take; they are padded to the largest.",
        _uneven_gather,
    ),
    Patch(
        "properties_and_memory",
        "Argument validation and the training log ask for device properties and memory counters; here they tell of "
        "the process (resident bytes) and the machine.",
        _properties_and_memory,
    ),
]


def _training_initialization() -> dict[tuple[Any, str], Any]:
    initialize = importlib.import_module("megatron.training.initialize")
    training = importlib.import_module("megatron.training.training")
    without_cuda = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    return {(initialize, "initialize_megatron"): without_cuda, (training, "initialize_megatron"): without_cuda}


def _l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return x / sqrt(sum(x^2) + eps) over the last dimension, in fp32, with the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, **without_state: Any
) -> tuple[torch.Tensor, None]:
    """Return silu(conv(x)) of x [b, s, c] with weight [c, w], in which a position sees itself and the w-1 before it."""
    if activation not in ("silu", "swish"):
        raise ValueError(f"the causal convolution has no activation {activation!r}")
    channels, width = weight.shape
    convolved = functional.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=width - 1, groups=channels)
    return functional.silu(convolved[..., : x.shape[1]]).transpose(1, 2), None


def _delta_net() -> dict[tuple[Any, str], Any]:
    common = importlib.import_module("megatron.core.ssm.gated_delta_net.common")
    layer = importlib.import_module("megatron.core.ssm.gated_delta_net.gdn")
    return {
        (common, "HAVE_FLA"): True,
        (common, "l2norm"): _l2norm,
        (layer, "causal_conv1d"): _causal_conv1d,
        (layer, "chunk_gated_delta_rule"): common.torch_chunk_gated_delta_rule,
    }


TRAINING_PATCHES = [
    Patch(
        "training_initialization",
        "pretrain() calls initialize_megatron() without its allow_no_cuda argument.",
        _training_initialization,
    ),
    Patch(
        "delta_net",
        "Gated DeltaNet takes its kernels from flash-linear-attention, which are written in Triton. Megatron has the "
        "delta rule in torch for its deterministic mode, which still needs the norm of that package.",
        _delta_net,
    ),
]


def _data_loader_seed() -> dict[tuple[Any, str], Any]:
    training = importlib.import_module("megatron.training.training")
    original = training.build_pretraining_data_loader

    @functools.wraps(original)
    def with_generator_of_its_own(*args: Any, **kwargs: Any) -> Any:
        loader = original(*args, **kwargs)
        if loader is not None:
            loader.generator = torch.Generator()
        return loader

    return {(training, "build_pretraining_data_loader"): with_generator_of_its_own}


def _preloaded(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
    """Return what is to be written, with copies of the tensors that training goes on to change."""
    return [
        (path, name, (values, [(item, tensor.clone() if tensor.is_shared() else tensor) for item, tensor in tensors]))
        for path, name, (values, tensors) in write_buckets
    ]


def _preload() -> dict[tuple[Any, str], Any]:
    writer = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    return {(writer.FileSystemWriterAsync, "preload_tensors"): staticmethod(_preloaded)}


RESUME_PATCHES = [
    Patch(
        "data_loader_seed",
        "An iterator over a DataLoader draws a seed from the CPU generator, which dropout draws from here: a resumed "
        "run would make that draw after its random state was restored.",
        _data_loader_seed,
    ),
    Patch(
        "preload",
        "The process that saves in the background copies tensors from the GPU before training goes on; here they lie "
        "in memory that it shares with the rank.",
        _preload,
    ),
]
"""Training works without these, but a resumed run goes another way; tests/checkpoint/test_resume.py and
test_background.py show it."""

_active = False


def is_active() -> bool:
    """Whether `activate` has been called in this process."""
    return _active


def activate() -> None:
    """Apply the torch-level patches and the environment; idempotent.

    Raises:
        RuntimeError: Megatron was imported before, and may have bound what would be replaced.
    """
    global _active
    if _active:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("import megagate.platform before megatron: no CUDA device was found")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for package in GPU_ONLY_PACKAGES:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # makes `import package` raise ImportError
    for patch in TORCH_PATCHES:
        patch.apply()
    _active = True


def activate_training() -> None:
    """Apply the patches of Megatron's training loop, which importing them imports."""
    for patch in TRAINING_PATCHES + RESUME_PATCHES:
        patch.apply()


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """Remove the patch called `name`, if it is applied, inside the context; tests show with it what the patch does."""
    patch = next(patch for patch in TORCH_PATCHES + TRAINING_PATCHES + RESUME_PATCHES if patch.name == name)
    applied = bool(patch.originals)
    patch.remove()
    try:
        yield
    finally:
        if applied:
            patch.apply()


def announce() -> None:
    """Say on the first rank that this process runs on the CPU platform."""
    if _active and os.environ.get("RANK", "0") == "0":
        print("megagate: no CUDA device found; running on the CPU platform (gloo, torch backend)", flush=True)
