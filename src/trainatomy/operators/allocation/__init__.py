"""Rules for the memory that CUDA kernels allocate besides their results, and meta kernels with CUDA's layouts."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch

from trainatomy.operators.allocation.plan import Rule
from trainatomy.operators.table import OPERATORS


def resolve(reference: str) -> Any:
    """Return the rule or meta kernel that the registry names as ``module:name`` in this package."""
    module, _, name = reference.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), name)


@cache
def allocation_rules() -> dict[str, Rule]:
    """Return the rule of every operator that has one, by its name as the dispatcher has it (``aten::addmm``).

    In-place forms that PyTorch knows (``aten::addmm_``) have the rule of the plain operator.
    """
    found: dict[str, Rule] = {}
    for operator in OPERATORS.values():
        if operator.allocates:
            rule = resolve(operator.allocates)
            if "::" in operator.name:  # of an extension, which may be imported later
                found[operator.name] = rule
                continue
            names = f"aten::{operator.name}", f"aten::{operator.name}_"
            found |= {name: rule for name in names if torch._C._jit_get_schemas_for_operator(name)}
    return found
