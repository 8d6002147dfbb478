"""Compiled steps: PyTorch's own compiler, whose device alone is simulated, and its code with kernels that do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trainatomy.catalog.versions import parse_version
from trainatomy.errors import SimulationError
from trainatomy.libraries import import_library, version_of
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.workload.schema import Workload

OLDEST, NEWEST = (2, 13), (2, 13)
"""Releases of PyTorch whose compiler was simulated; it is the installed one's."""


def compiles(workload: Workload) -> bool:
    """Return whether a training compiles its model."""
    return workload.mode == "training" and workload.train.compiles


def preload_compiler() -> None:
    """Import the compiler before the simulated GPU appears.

    Raises:
        MissingLibrary: Triton is not installed, in whose language Inductor writes its kernels.
        SimulationError: The compiler of the installed PyTorch was never simulated.
    """
    installed = parse_version(version_of("torch") or "0")
    if not OLDEST <= installed <= NEWEST:
        raise SimulationError(
            f"train.torch_compile: the compiler of PyTorch {installed[0]}.{installed[1]} is not simulated; that of "
            f"{OLDEST[0]}.{OLDEST[1]} is.\nLeave it out to predict the eager step, or install torch {OLDEST[0]}.{OLDEST[1]}"
        )
    import_library("triton", "train.torch_compile", install="'trainatomy[compile]'")
    from trainatomy.simulator.compiled.module import preload

    preload()


@contextlib.contextmanager
def compiling(workload: Workload, process: SimulatedProcess) -> Iterator[None]:
    """Let ``torch.compile`` compile for the simulated process, where the workload uses it."""
    if not compiles(workload):
        yield
        return
    from trainatomy.simulator.compiled.module import Compiler

    with contextlib.ExitStack() as stack:
        Compiler(process).install(stack)
        yield
