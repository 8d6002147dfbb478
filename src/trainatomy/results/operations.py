"""Every operation of one training step, in the order of issue: what the clock and the operations' anatomy read.

A run without a GPU writes it from executed operations, as autograd's dispatcher hands them to the GPU's kernels: below
autograd, composites in their parts.  Plain values; no torch.

What a reader should know:

- An operation with an output that is not ``on_host`` runs on the GPU; one whose tensors all are, on the CPU.
  ``aten::_to_copy`` and ``aten::copy_`` between the two are copies of a batch or a result.
- ``aten::_local_scalar_dense`` of a tensor that is not on the host is a read by the host, which waits for the GPU.
  ``aten::equal``, ``aten::nonzero``, ``aten::masked_select``, ``aten::index`` with a bool index and copies to the host
  wait for it too.
- In-place lists (``aten::_foreach_add_``, ``aten::_fused_adamw_``) have no outputs: ``Call.written`` says what is
  written.
- Operations that follow one another with ``repeats`` above 1 are one micro-batch, run that often as a whole.
- The engine's accumulation of gradients is ``aten::add_``, as on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple


class Array(NamedTuple):
    """A tensor as a kernel sees it. ``dtype`` as PyTorch names it without ``torch.``; ``strides`` in elements;
    ``storage``: equal within one call for arguments that share memory; ``on_host``: lies in host memory; ``part``:
    equal within one call for arguments that begin at the same place in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    storage: int
    on_host: bool = False
    part: int = 0

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """How much memory they take."""
        return self.elements * self.itemsize


class Call(NamedTuple):
    """A distinct call of an operator: equal calls of a step are one ``Call``.

    ``name``: ``aten::addmm``; ``inputs`` and ``outputs``: its tensors in the order of its schema, lists flattened
    (``lengths``: how many tensors each list argument holds); ``numbers``: its other arguments as text, by name, those
    that were left at their defaults not among them (a list of optional tensors: ``indices``, ``None, *``);
    ``flop``: by torch's registry of formulas (``torch.utils.flop_counter``), ``None`` where it has none; ``written``:
    positions in ``inputs`` that the operator writes to; ``is_view``: its results share memory with its arguments and
    no kernel runs; ``pointwise``: PyTorch tags the operator as one that works element by element.
    """

    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    lengths: tuple[int, ...] = ()
    numbers: tuple[tuple[str, str], ...] = ()
    flop: int | None = None
    written: tuple[int, ...] = ()
    is_view: bool = False
    pointwise: bool = False


class Operation(NamedTuple):
    """One operation of the step. ``event``: how many of the tape's events happened before it; ``call``: index in
    ``Operations.calls``; ``phase``: as in ``Origin`` (forward, recompute, backward, optimizer, zero_grad, other);
    ``module``: path of the module it belongs to; ``micro_step``: from 0 in the step; ``repeats``: how often the real
    step runs it (more than once for a micro-batch that stands for others that were not executed); ``outputs``:
    the trace's numbers of the allocations that its results live in; ``stream``: the CUDA stream it is launched on.
    """

    event: int
    call: int
    phase: str
    module: str
    micro_step: int
    repeats: int
    outputs: tuple[int, ...] = ()
    stream: int = 0


@dataclass(slots=True)
class Operations:
    """One steady step: its distinct calls, its operations in order, and how often modules were called in it (by phase,
    for the cost of Python between operations).

    ``dependencies``: for an operation (by index) those of other streams that must finish before it starts, as
    ``Stream.wait_event`` demands; an index that comes later in ``operations`` means its run in the previous step.
    """

    calls: list[Call] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    module_calls: dict[str, int] = field(default_factory=dict)
    step: int = -1
    dependencies: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def unrolled(self) -> list[int]:
        """Indices in ``operations`` in the order in which a real step runs them: a micro-batch that stands for others
        as often as it runs."""
        blocks = groupby(range(len(self.operations)), key=lambda index: self.operations[index].repeats)
        return [index for repeats, block in blocks for index in list(block) * repeats]
