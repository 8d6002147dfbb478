"""What a CUDA kernel allocates besides the tensors that it returns, as a plan that the recorder writes to the tape.

A rule looks at one call and answers with a plan: the order in which outputs and scratch buffers are taken and given
back.  Outputs that a plan does not mention are taken after it, in order; scratch that it does not free is freed
when the call ends, last first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Out(NamedTuple):
    """The tensor of that number in the call's flattened results is allocated here; ``bytes`` overrides its size where
    CUDA pads it."""

    number: int
    bytes: int | None = None


class Scratch(NamedTuple):
    """A buffer of ``bytes`` that the kernel takes for itself.

    ``choice``: a library that finds no memory for the buffer takes another algorithm, which needs none, and stays with
    it in all calls of an equal choice; None: the call fails then.
    """

    bytes: int
    name: str = "scratch"
    choice: Hashable | None = None


class Free(NamedTuple):
    """The scratch buffer of that name is given back before the call ends."""

    name: str


Plan = Sequence[Out | Scratch | Free]


@dataclass(frozen=True, slots=True)
class Processor:
    """What a kernel's choices depend on: ``capability`` (9, 0), number of ``multiprocessors``, ``torch_version``
    (2, 11) that is simulated."""

    capability: tuple[int, int]
    multiprocessors: int
    torch_version: tuple[int, int]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One aten operation as the dispatcher sees it (below autograd), with meta tensors; ``outputs`` are its
    flattened tensor results."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]
    processor: Processor


Rule = Callable[[KernelCall], Plan]
