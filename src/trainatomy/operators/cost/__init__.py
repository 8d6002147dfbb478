"""The work of a call for the GPU: arithmetic, bytes moved, kernels; one small function for each family of kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module

from trainatomy.operators.cost.elementwise import pointwise, transfer
from trainatomy.operators.cost.kernel import NOTHING, Chip, KernelWork
from trainatomy.operators.registry import operator_of, row_of
from trainatomy.operators.traffic import crosses
from trainatomy.results.operations import Call

CostFunction = Callable[[Call, Chip], KernelWork]

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "": ("mapped", "pinned", "staged", "transfer"),
    "attention": ("attention",),
    "norms": ("channels_last_norm", "normalisation"),
    "libraries": ("bitsandbytes", "fused", "fused loss", "packed", "quantised"),
    "communication": ("communication",),
    "convolution": ("convolution", "strided groups"),
    "elementwise": ("copied", "glu", "glu_backward", "joined", "joined by number", "rearranged", "softplus", "traffic"),
    "indexing": ("copied", "sort", "table", "traffic"),
    "lists": ("list",),
    "matmul": ("grouped", "many vectors", "matmul", "vector product"),
    "resampling": ("grid", "patches", "pooling", "resampling"),
    "recurrent": ("recurrent",),
    "reduction": (
        "apart",
        "columns",
        "ctc",
        "extremum",
        "logsumexp",
        "normalisation",
        "pairs",
        "parts",
        "reduction",
        "rows",
        "scan",
        "short rows",
        "sort",
        "variance",
        "weight norm",
    ),
}
"""First parts of the names of the families that each module returns; without a name, those of copies from and to the
host.  A calibration's points are grouped by them."""


def kernel_work(call: Call, chip: Chip) -> KernelWork:
    """Return the work of a call for the GPU; ``NOTHING`` for views and for what runs on the CPU."""
    operator = operator_of(call)
    runs = not call.is_view and operator.kernel
    if not runs or all(array.on_host for array in (*call.inputs, *call.outputs)):
        return NOTHING
    if crosses(call):
        return transfer(call, chip)
    return cost_function(operator.cost)(call, chip) if operator.cost else pointwise(call, chip)


@cache
def cost_function(reference: str) -> CostFunction:
    """Return the function that the registry names as ``module:function`` in this package."""
    module, _, name = reference.partition(":")
    function: CostFunction = getattr(import_module(f"{__name__}.{module}"), name)
    return function


def has_cost(call: Call) -> bool:
    """Return whether the cost of a call rests on more than the general rule of traffic."""
    operator = operator_of(call)
    return call.is_view or not operator.kernel or bool(operator.cost)


def cost_module(operator: str) -> str:
    """Return the module of this package that computes the cost of an operator's calls within GPU memory."""
    return row_of(operator).cost.partition(":")[0] or "elementwise"


def root_of(family: str) -> str:
    """Return the first part of a family's name."""
    return family.partition(".")[0]


def modules_of(root: str) -> tuple[str, ...]:
    """Return the modules whose families may begin with a root; all where no module is known to have it."""
    return tuple(module for module, roots in FAMILIES.items() if root in roots) or tuple(FAMILIES)
