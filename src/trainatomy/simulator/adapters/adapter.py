"""What an adapter is: how a library with kernels of its own runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.simulator.process import SimulatedProcess
    from trainatomy.workload.schema import Workload


def _import_nothing(workload: Workload) -> None:
    """Do nothing: the library is not run, or nothing in it looks for a GPU."""


def _no_notes(workload: Workload, model: nn.Module) -> Iterable[str]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A library whose kernels become operations on meta tensors.

    Attributes:
        is_used: Whether a workload runs the library; the model is None where ``before_model`` is set.
        simulated: Returns the context in which the library runs; the workload is None in a script.
        load: Imports the library before the simulated GPU appears.
        notes: Returns what a prediction with the library leaves out.
        modules: A script runs the library once it has imported all of these; it never does if there are none.
        before_model: True if the library has to be there when the model is built.
    """

    is_used: Callable[[Workload, nn.Module | None], bool]
    simulated: Callable[[SimulatedProcess, Workload | None], AbstractContextManager[object]]
    load: Callable[[Workload], object] = _import_nothing
    notes: Callable[[Workload, nn.Module], Iterable[str]] = _no_notes
    modules: tuple[str, ...] = ()
    before_model: bool = False
