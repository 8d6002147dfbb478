"""Families of rows of the table: operators that share most of what is known about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainatomy.operators.operator import Operator

Row = tuple[str, dict[str, Any]]

CUDNN = ("cudnn", "convolution")


def row(names: str, **differences: Any) -> Row:
    """Describe the operators ``names`` (separated by spaces) by what differs from their family."""
    return names, differences


def family(shared: Operator, *rows: Row) -> tuple[Operator, ...]:
    """Return an operator for each name of ``rows``."""
    return tuple(replace(shared, name=name, **differences) for names, differences in rows for name in names.split())
