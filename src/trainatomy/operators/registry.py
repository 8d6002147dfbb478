"""Find the row of an operator by its name, through its in-place and list forms, or infer it from a call."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from trainatomy.operators.operator import Group, LaunchKind, Operator
from trainatomy.operators.table import OPERATORS

if TYPE_CHECKING:
    from trainatomy.results.operations import Call

_LIST = "_foreach_"


@cache
def find(name: str) -> Operator | None:
    """Return the row of an operator, or None if there is none.

    Args:
        name: the operator with its namespace (``aten::addmm``), or an aten operator without. In-place forms (``mul_``)
            are served by the plain row; list forms (``_foreach_mul_``) take group and FLOP from it.
    """
    short = name.removeprefix("aten::")
    row = OPERATORS.get(short)
    if row is not None or short.endswith("__"):
        return row
    short = short.removesuffix("_")
    row = OPERATORS.get(short)
    if row is None and short.startswith(_LIST):
        plain = OPERATORS.get(short.removeprefix(_LIST))
        row = None if plain is None else _list_form(plain)
    return row


def operator_of(call: Call) -> Operator:
    """Return the row that serves a call; what no row says is inferred from the form of the call."""
    row = row_of(call.name)
    if row.group is not None or not row.kernel:
        return row
    return _inferred(row, call)


@cache
def row_of(name: str) -> Operator:
    """Return the row of an operator, or one with what its name says."""
    row = find(name)
    if row is None:
        cost = "lists:foreach" if name.startswith(f"aten::{_LIST}") else ""
        row = Operator(name.removeprefix("aten::"), launch=launch_kind(name), cost=cost)
    return row


def group_of(name: str) -> Group | None:
    """Return the group of ``aten::addmm``, also with the name of a scratch buffer behind it; None without a row."""
    name = name.partition(" ")[0]
    row = find(name) if "::" in name else None
    return row.group if row is not None else None


@cache
def launch_kind(name: str) -> LaunchKind:
    """Return the launch kind of an operator that runs on the GPU; by parts of its name where it has no row."""
    row = find(name)
    if row is not None:
        return row.launch
    if name.startswith("bitsandbytes::"):
        return "library"
    short = name.rpartition("::")[2]
    if short.startswith(("_foreach", "_fused", "_amp_foreach")):
        return "list"
    return next((kind for part, kind in _KIND_OF_PART.items() if part in short), "pointwise")


_KIND_OF_PART: dict[str, LaunchKind] = {
    "convolution": "convolution",
    "attention": "attention",
    "layer_norm": "normalisation",
    "rms_norm": "normalisation",
    "batch_norm": "batch_norm",
    "group_norm": "group_norm",
    "dropout": "dropout",
    "softmax": "reduction",
    "nll": "reduction",
}


def libraries_of(name: str, in_backward: bool) -> tuple[str, ...]:
    """Return the libraries that an operator needs, by the names of ``catalog.gpus.Context.loads_bytes``.

    Autograd's thread has a cuBLAS handle of its own.
    """
    row = find(name)
    if row is None:
        return ()
    return ("cublas_backward",) if in_backward and row.loads == ("cublas",) else row.loads


def _list_form(plain: Operator) -> Operator:
    """Return the row of ``_foreach_X`` from that of ``X``: what is done to each element stays, the kernel differs."""
    return Operator(
        f"{_LIST}{plain.name}",
        plain.group,
        plain.flop,
        plain.why,
        plain.reads,
        plain.activation,
        launch="list",
        cost="lists:foreach",
    )


def _inferred(row: Operator, call: Call) -> Operator:
    """Fill in the group: elementwise (PyTorch's tag), a reduction (fewer elements come out than go in), else a move."""
    if call.pointwise:
        return replace(row, group="elementwise", flop=1, why="PyTorch tags it as elementwise", inferred=True)
    largest = max((array.elements for array in call.inputs), default=0)
    if call.outputs and max(array.elements for array in call.outputs) < largest:
        why = "fewer elements come out than go in: taken for a reduction"
        return replace(row, group="normalisation", why=why, inferred=True)
    return replace(row, group="elementwise", why="unknown: taken for an operation that moves data", inferred=True)
