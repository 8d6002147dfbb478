"""All adapters: those of this package, and those that other packages bring by an entry point."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from trainatomy.simulator.adapters import (
    axolotl,
    bitsandbytes,
    cut_cross_entropy,
    deepspeed,
    flash_attention,
    liger,
    torchao,
    triton,
    trl,
)
from trainatomy.simulator.adapters.adapter import Adapter

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.simulator.process import SimulatedProcess
    from trainatomy.workload.schema import Workload

ENTRY_POINTS = "trainatomy.adapters"
"""Group of entry points that name an ``Adapter``."""
_OWN = (
    flash_attention.ADAPTER,
    triton.ADAPTER,
    bitsandbytes.OPTIMIZERS,
    torchao.ADAPTER,
    bitsandbytes.LAYERS,
    deepspeed.ADAPTER,
    liger.ADAPTER,
    cut_cross_entropy.ADAPTER,
    axolotl.ADAPTER,
    trl.ADAPTER,
)
"""In the order in which they are opened."""


@cache
def adapters() -> tuple[Adapter, ...]:
    """Return the adapters that this environment has."""
    return (*_OWN, *(point.load() for point in entry_points(group=ENTRY_POINTS)))


def adapters_of(workload: Workload, model: nn.Module | None) -> list[Adapter]:
    """Return the adapters of a workload: before its model is built (None), or those of its steps."""
    return [each for each in adapters() if each.before_model == (model is None) and each.is_used(workload, model)]


@contextlib.contextmanager
def opened(used: Iterable[Adapter], process: SimulatedProcess, workload: Workload) -> Iterator[None]:
    """Let the libraries of some adapters run in a simulated process."""
    with contextlib.ExitStack() as stack:
        for adapter in used:
            stack.enter_context(adapter.simulated(process, workload))
        yield


def adapter_notes(workload: Workload, model: nn.Module) -> Iterator[str]:
    """Yield what a prediction leaves out of the libraries that a workload runs."""
    for adapter in adapters():
        if adapter.is_used(workload, model):
            yield from adapter.notes(workload, model)
