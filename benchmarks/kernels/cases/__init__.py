"""Operations whose allocations are compared between a GPU and the simulation, forward and backward.

A case is a function without arguments, made under ``torch.device("cuda")``, that runs the operation once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from cases.contractions import attention, convolutions, linear
from cases.elementwise import elementwise
from cases.making import Cases
from cases.moving import indexing, sorting
from cases.reducing import losses, norms, reductions
from cases.training import autocast, modules, optimizers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GROUPS = (
    linear,
    norms,
    reductions,
    indexing,
    sorting,
    losses,
    elementwise,
    attention,
    convolutions,
    optimizers,
    modules,
    autocast,
)


def cases() -> Iterator[tuple[str, Callable[[], Cases]]]:
    """Return the groups of cases by name."""
    for (name, dtype), group in itertools.product(DTYPES.items(), GROUPS):
        yield f"{group.__name__} {name}", lambda group=group, dtype=dtype: group(dtype)
