"""Facts about an operator that the recorder needs in every call of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainatomy.operators.allocation.plan import Rule
from trainatomy.operators.registry import find
from trainatomy.simulator.data_dependent import LEARNS, READS, SIZED
from trainatomy.simulator.index_ranges import INDEXES
from trainatomy.simulator.mask_bounds import BOUNDED
from trainatomy.simulator.sparse_tensors import NAMES as SPARSE
from trainatomy.simulator.torchvision_kernels import STAND_INS
from trainatomy.simulator.values import CHOOSES, GUESSES, LIKE_FACTORIES


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """Facts that an operator's schema and its row in the table say.

    Attributes:
        func: The operator, which keeps its identity while the facts are kept.
        name: Its name, such as ``aten::addmm``.
        rule: Its allocation rule, if it has one.
        reads: True if it may read a value.
        sized: True if the size of its result may depend on values.
        learns: True if its result may be known to be False.
        bounds: True if it may be known how many elements of its result are true at most.
        indexes: True if it reads entries that one of its arguments names.
        chooses: True if its last result says which entries it picks along a dimension.
        guesses: True if a few unknown numbers may be taken to have been 0 before.
        is_functional: True if it writes to none of its arguments.
        loads: True if it loads libraries or takes workspaces.
        adds_rows: True if its time depends on how often an index occurs among those of its second argument.
        composite: True if PyTorch runs it as a sequence of other operators above autograd.
        may_be_sparse: True if it is run by dense operators where a tensor is sparse.
        resizes: True if it may give one of its arguments a larger storage: ``out=``, ``resize_``.
        uncounted: What it allocates besides that no rule counts.
        stand_in: What runs in its place, with the recorder as its first argument.
        kernel: Key of its kernel, where that calls other operators below autograd, on every device.
    """

    func: Any
    name: str
    rule: Rule | None
    reads: bool
    sized: bool
    learns: bool
    bounds: bool
    indexes: bool
    chooses: bool
    guesses: bool
    is_functional: bool
    loads: bool
    adds_rows: bool
    composite: bool
    may_be_sparse: bool
    resizes: bool
    uncounted: str
    stand_in: Callable[..., Any] | None
    kernel: torch._C.DispatchKey | None


_RESIZES = frozenset({"aten::resize_", "aten::resize_as_"})
_KERNELS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
"""Names of the keys under which PyTorch registers kernels for all devices (torchgen/model.py, ``DispatchKey``)."""
_ADDS_ROWS = frozenset(
    {"aten::embedding_dense_backward", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
)


def facts_of(func: Any, rules: dict[str, Rule]) -> OperatorFacts:
    """Look up the facts of an operator; ``rules``: allocation rules by the operator's name."""
    name = func._schema.name
    row = find(name)
    return OperatorFacts(
        func=func,
        name=name,
        rule=rules.get(name),
        reads=name in READS,
        sized=name in SIZED,
        learns=name in LEARNS,
        bounds=name in BOUNDED,
        indexes=name in INDEXES,
        chooses=name in CHOOSES and any(argument.name in ("dim", "num_samples") for argument in func._schema.arguments),
        guesses=name in GUESSES,
        is_functional=not func._schema.is_mutable and name not in LIKE_FACTORIES,
        loads=row is not None and bool(row.loads or row.workspaces),
        adds_rows=name in _ADDS_ROWS,
        composite=_has_kernel(func, "CompositeImplicitAutograd"),
        may_be_sparse=name in SPARSE,
        resizes=name in _RESIZES or any(argument.is_out for argument in func._schema.arguments),
        uncounted=row.uncounted if row is not None else "",
        stand_in=STAND_INS.get(name),
        kernel=_kernel(func) if row is not None and row.composite else None,
    )


def _kernel(func: Any) -> torch._C.DispatchKey | None:
    """Return the key of an operator's kernel for all devices."""
    return next((getattr(torch._C.DispatchKey, key) for key in _KERNELS if _has_kernel(func, key)), None)


def _has_kernel(func: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
