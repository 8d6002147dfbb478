"""The value in which one row of the registry describes an operator.

Families of rows of the table: operators that share most of what is known about them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Group = Literal["contraction", "normalisation", "elementwise", "communication"]
GROUPS: tuple[Group, ...] = ("contraction", "normalisation", "elementwise")
"""The groups of Ivanov et al., "Data Movement Is All You Need" (arXiv 2007.00072), section 3.2."""
COMMUNICATION: Group = "communication"
"""The group of what moves data between GPUs, which the paper has none of."""

LaunchKind = Literal[
    "view",
    "pointwise",
    "copy",
    "reduction",
    "matmul",
    "convolution",
    "attention",
    "normalisation",
    "batch_norm",
    "group_norm",
    "recurrent",
    "dropout",
    "index",
    "advanced_index",
    "list",
    "library",
    "fused",
    "quantised",
    "collective",
    "host",
]
Reads = Literal["all", "none", "rows", "sources"]
Sync = Literal["", "value", "shape", "always"]


@dataclass(frozen=True, slots=True)
class Operator:
    """Everything that the package knows about one operator.

    Functions are named by text: those of ``operators.cost`` look up rows themselves, and those of
    ``operators.allocation`` import torch, which the timing model, a reader of the rows, does without.

    Attributes:
        name: the operator without ``aten::``; other namespaces are written out
            (``bitsandbytes::optimizer_update_32bit``). In-place forms (``mul_``) are served by the plain row.
        group: its group in the operation breakdown; ``None``: decided by the form of each call.
        flop: floating-point operations per element of the largest tensor of the call (of its first list, for lists of
            tensors); ``None``: PyTorch's formula (``torch.utils.flop_counter``) where it has one, else unknown.
        why: what ``flop`` counts, or why there is no formula.
        reads: the inputs that its kernel has to read. ``all`` of them; ``none``, outputs are only written; ``rows``, as
            much as is written, and the indices; ``sources``, all but what it overwrites.
        activation: an activation function (``forward``) or the derivative of one (``backward``).
        kernel: False where no kernel runs (views, memory that is only reserved, questions about a tensor).
        launch: the class of CPU time that launching it takes (``timing.launch``).
        cost: the function that computes its work on the GPU, as ``module:function`` in ``operators.cost``; empty:
            nothing is known but its traffic, and the prediction says so.
        allocates: the rule for what its kernel allocates besides its results, as ``module:rule`` in
            ``operators.allocation``; empty: nothing.
        meta: the kernel for tensors without data that replaces PyTorch's, or that PyTorch lacks, as ``module:kernel``
            in ``operators.allocation``.
        loads: the libraries that a process loads at the first use, as the GPU files name what they add to the context
            (``catalog.gpus.Context.loads_bytes``).
        workspaces: ``cublas`` and ``cublaslt``, where a call makes its thread allocate their workspace.
        sync: the CPU waits for the GPU because it reads a ``value``, because the ``shape`` of the result depends on
            values, or ``always``, since the library synchronises after each call.
        read_only_list: the list argument that the schema declares as written although the kernel only reads it.
        composite: its kernel for a GPU calls other operators, which are run and recorded in its place.
        uncounted: what its kernel allocates besides, where no rule knows how much; a prediction says so.
        inferred: the group and the FLOP come from the form of the call, not from a row.
    """

    name: str
    group: Group | None = None
    flop: int | None = None
    why: str = ""
    reads: Reads = "all"
    activation: Literal["", "forward", "backward"] = ""
    kernel: bool = True
    launch: LaunchKind = "pointwise"
    cost: str = ""
    allocates: str = ""
    meta: str = ""
    loads: tuple[str, ...] = ()
    workspaces: tuple[str, ...] = ()
    sync: Sync = ""
    composite: bool = False
    uncounted: str = ""
    read_only_list: int | None = None
    inferred: bool = False


Row = tuple[str, dict[str, Any]]

CUDNN = ("cudnn", "convolution")


def row(names: str, **differences: Any) -> Row:
    """Describe the operators ``names`` (separated by spaces) by what differs from their family."""
    return names, differences


def family(shared: Operator, *rows: Row) -> tuple[Operator, ...]:
    """Return an operator for each name of ``rows``."""
    return tuple(replace(shared, name=name, **differences) for names, differences in rows for name in names.split())
