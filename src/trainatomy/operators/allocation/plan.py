"""Allocation plans: the memory that a CUDA kernel allocates and frees besides the tensors that it returns.

A rule looks at one call and returns a plan: the order in which outputs and scratch buffers are allocated and freed.
Outputs that a plan does not mention are allocated after it, in order; scratch that it does not free is freed when the
call ends, last first.

Arguments of a call by name, and properties of tensors that several rules need: sizes, types, copies, lists.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainatomy.errors import WorkloadError

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.heuristics import Heuristics


class Out(NamedTuple):
    """Allocation of one of the call's flattened results; ``bytes`` overrides its size where CUDA pads it."""

    number: int
    bytes: int | None = None


class Scratch(NamedTuple):
    """Allocation of a buffer of ``bytes`` for the kernel alone.

    ``choice``: if there is no memory for the buffer, the library switches to another algorithm, which needs none, and
    keeps it in all calls of an equal choice; None: the call fails.
    """

    bytes: int
    name: str = "scratch"
    choice: Hashable | None = None


class Free(NamedTuple):
    """Release of the scratch buffer of that name before the call ends."""

    name: str


class Trial(NamedTuple):
    """First call of an equal ``key``, for which a library tries several algorithms and keeps the fastest.

    The buffer of the trial is as large as the largest workspace that there is memory for. After it the buffer is
    released and the allocator's cache emptied (``cudnn.benchmark``). Without ``workspaces`` nothing is tried, nor is
    it later for the same key.

    ``workspaces``: bytes of each algorithm, the expected choice first; ``timed``: how many of them compete. ``choice``
    is that of the ``Scratch`` of these calls.
    """

    key: Hashable
    workspaces: tuple[int, ...] = ()
    timed: int = 0
    choice: Hashable | None = None


Plan = Sequence[Out | Scratch | Free | Trial]


@dataclass(frozen=True, slots=True)
class Processor:
    """The properties that a kernel's choices depend on.

    Attributes:
        capability: compute capability, (9, 0).
        multiprocessors: number of multiprocessors.
        torch_version: the version of PyTorch that is simulated, (2, 11).
        cudnn: cuDNN's own heuristics for the GPU; None: the rules in ``cudnn`` stand for them.
        l2_bytes: size of the L2 cache; None: not known.
        level_factors: times of a level of a convolution's partial sums, as multiples of an H200's, by name (see
            ``catalog.cudnn.level_factors``).
        architecture: instruction set of an AMD GPU, ``gfx942``; empty: an NVIDIA GPU.
    """

    capability: tuple[int, int]
    multiprocessors: int
    torch_version: tuple[int, int]
    cudnn: Heuristics | None = None
    l2_bytes: int | None = None
    level_factors: Mapping[str, float] = field(default_factory=dict)
    architecture: str = ""

    @property
    def is_amd(self) -> bool:
        """Whether PyTorch's kernels are those of its build for HIP."""
        return bool(self.architecture)

    @property
    def warp_size(self) -> int:
        """Threads that run in step: 64 on AMD's compute GPUs (gfx9), 32 on Radeons and NVIDIA's."""
        return 64 if self.architecture.startswith("gfx9") else 32

    def need_cuda(self, what: str) -> None:
        """Refuse what nobody read of PyTorch's build for AMD GPUs, or of a library's: ``what`` begins the message.

        Raises:
            WorkloadError: The GPU is an AMD GPU.
        """
        if self.is_amd:
            raise WorkloadError(f"{what} is not simulated on AMD GPUs: what it allocates there is not known", key="gpu")


@dataclass(frozen=True, slots=True)
class KernelCall:
    """An aten operation as the dispatcher sees it (below autograd), with meta tensors.

    ``outputs`` are its flattened tensor results; ``selected`` the number of true elements of each mask that it indexes
    with; ``is_captured`` says whether it becomes part of a CUDA graph.
    """

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]
    processor: Processor
    selected: tuple[int, ...] = ()
    is_captured: bool = False


Rule = Callable[[KernelCall], Plan]


FLOAT_BYTES = 4
HALF_TYPES = (torch.float16, torch.bfloat16)
_COMPUTE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def bound(call: KernelCall) -> dict[str, Any]:
    """Return every argument of ``call`` by its name in the schema, with the schema's defaults."""
    names, defaults = _parameters(call.func)
    return {**defaults, **dict(zip(names, call.args, strict=False)), **call.kwargs}


@cache
def _parameters(func: torch._ops.OpOverload) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of an operator's arguments and their defaults, both in the order of the schema."""
    arguments = func._schema.arguments
    return tuple(each.name for each in arguments), {each.name: each.default_value for each in arguments}


def ceil_div(dividend: int, divisor: int) -> int:
    """Return ``dividend / divisor``, rounded up."""
    return -(-dividend // divisor)


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type CUDA kernels compute in: fp32 for 16-bit floats, else the type (``at::opmath_type``)."""
    return _COMPUTE.get(dtype, dtype)


def dense_bytes(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a dense copy of ``tensor``, in ``dtype`` if one is given."""
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def is_half(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` holds 16-bit floating-point numbers."""
    return tensor.dtype in HALF_TYPES


def deterministic() -> bool:
    """Return whether ``torch.use_deterministic_algorithms`` forbids atomic additions and does not only warn."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def contiguous_copies(*tensors: torch.Tensor | None, name: str = "contiguous copy") -> list[Scratch]:
    """Return a buffer for each of ``tensors`` that a kernel must first make contiguous."""
    return [
        Scratch(dense_bytes(tensor), f"{name} {number}")
        for number, tensor in enumerate(tensors)
        if tensor is not None and not tensor.is_contiguous()
    ]


def layout_of(data: torch.Tensor) -> torch.memory_format:
    """Return ``Tensor.suggest_memory_format``: channels last only where the strides are unambiguous."""
    for dimensions, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if data.dim() == dimensions and data.is_contiguous(memory_format=layout) and not data.is_contiguous():
            return layout
    return torch.contiguous_format


def tensor_list(value: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of an argument that is one tensor or a list of them."""
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(item for item in value or () if isinstance(item, torch.Tensor))
