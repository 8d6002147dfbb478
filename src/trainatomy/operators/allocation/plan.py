"""Allocation plans: the memory that a CUDA kernel allocates and frees besides the tensors that it returns.

A rule looks at one call and returns a plan: the order in which outputs and scratch buffers are allocated and freed.
Outputs that a plan does not mention are allocated after it, in order; scratch that it does not free is freed when the
call ends, last first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

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
    """

    capability: tuple[int, int]
    multiprocessors: int
    torch_version: tuple[int, int]
    cudnn: Heuristics | None = None
    l2_bytes: int | None = None
    level_factors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KernelCall:
    """An aten operation as the dispatcher sees it (below autograd), with meta tensors.

    ``outputs`` are its flattened tensor results; ``selected`` the number of true elements of each mask that it indexes
    with.
    """

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]
    processor: Processor
    selected: tuple[int, ...] = ()


Rule = Callable[[KernelCall], Plan]
