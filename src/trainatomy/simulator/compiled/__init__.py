"""Compiled steps: PyTorch's own compiler for a simulated GPU, and its code with kernels that do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.versions import parse_version, version_text
from trainatomy.errors import SimulationError
from trainatomy.libraries import import_library, version_of
from trainatomy.simulator.adapters.torchao import packed_weights
from trainatomy.simulator.flex.calls import run_without_compiling
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.workload.arguments import arguments, is_factory
from trainatomy.workload.schema import Workload
from trainatomy.workload.train import CAPTURING

if TYPE_CHECKING:
    from trainatomy.simulator.compiled.module import Compiler

OLDEST, NEWEST = (2, 11), (2, 15)
"""Releases of PyTorch whose compiler was simulated; it is the installed one's."""


def compiles(workload: Workload) -> bool:
    """Return whether a training compiles its model."""
    return workload.mode == "training" and workload.train.compiles


def captures(workload: Workload) -> bool:
    """Return whether a training compiles its model with CUDA graphs."""
    return compiles(workload) and workload.train.torch_compile_mode in CAPTURING


def optimizer_that_compiles(workload: Workload) -> str | None:
    """Return the name of an optimizer that compiles its own step, as torchao's do; None for others."""
    optim = workload.train.optim
    package = None if is_factory(optim) else arguments().package_of(optim)
    return optim if workload.mode == "training" and package == "torchao" else None


def preload_compiler(asked: str = "train.torch_compile") -> None:
    """Import the compiler before the simulated GPU appears; ``asked`` is what asks for it, for messages.

    Raises:
        MissingLibrary: Triton is not installed, in whose language Inductor writes its kernels.
        SimulationError: The compiler of the installed PyTorch was never simulated.
    """
    installed = parse_version(version_of("torch") or "0")
    if not OLDEST <= installed <= NEWEST:
        raise SimulationError(
            f"{asked}: the compiler of PyTorch {version_text(installed)} is not simulated; those of "
            f"{version_text(OLDEST)} to {version_text(NEWEST)} are.\n"
            "Leave it out to predict the eager step, or install one of these releases"
        )
    import_library("triton", asked, install="'trainatomy[compile]'")
    from trainatomy.simulator.compiled.module import preload

    preload()


def compiling(workload: Workload, process: SimulatedProcess) -> contextlib.AbstractContextManager[object]:
    """Return a context in which ``torch.compile`` compiles for the simulated process, where the workload uses it."""
    if compiles(workload):
        return simulated_compiler(process)
    optimizer = optimizer_that_compiles(workload)
    return run_without_compiling(process.notes) if optimizer is None else _compiling_optimizer(process, optimizer)


@contextlib.contextmanager
def _compiling_optimizer(process: SimulatedProcess, optim: str) -> Iterator[None]:
    with simulated_compiler(process, asked=f"train.optim: {optim}"), packed_weights(process):
        yield


@contextlib.contextmanager
def simulated_compiler(
    process: SimulatedProcess,
    fails: Callable[[Any, SimulationError], None] | None = None,
    asked: str = "train.torch_compile",
) -> Iterator[None]:
    """Let ``torch.compile`` compile for a simulated process; notes of the process say what happened.

    The process must be open, and ``preload_compiler`` must have run before it was.

    Args:
        process: The simulated process.
        fails: Called with a model or function that the compiler cannot compile, which runs eagerly from then on;
            without it, that is an error.
        asked: What asks for it, for notes.
    """
    from trainatomy.simulator.compiled.module import Compiler

    process.processor.need_cuda(asked if fails is None else "torch.compile")
    with contextlib.ExitStack() as stack:
        compiler = Compiler(process, fails)
        compiler.install(stack)
        yield
        if compiler.wrappers:
            process.notes += compiled_notes(compiler, asked if fails is None else "torch.compile")
        if compiler.eager:
            process.notes.append(
                f"torch.compile with {', '.join(dict.fromkeys(compiler.eager))} is not simulated: eager steps ran, "
                "which usually hold more"
            )


def compiled_notes(compiler: Compiler, asked: str) -> list[str]:
    """Return notes on what the compiler did, and on what a prediction of a compiled step leaves out.

    Args:
        compiler: What compiled.
        asked: What asked for it.
    """
    release = (version_of("torch") or "").partition("+")[0]
    notes = [
        f"{asked} is experimental: memory is that of the buffers in the code that Inductor of PyTorch {release} writes "
        f"({len(compiler.wrappers)} graphs), and that in which kernels are tried before their first launch, which a "
        "later run need not do; compiling itself is not counted: the first steps took 18 to 42 s more in 20 trainings "
        "of 4 to 12 layers on an H200's host, and 4 to 20 s in later runs, by Inductor's cache (PyTorch 2.11)",
        *compiler.recompilations.notes(),
        *compiler.graphs.notes(),
    ]
    if any("_flex_attention_" in text for text in compiler.wrappers):
        notes.append(
            "FlexAttention in a compiled graph is timed as if its mask kept all blocks of scores: a step may be "
            "shorter than predicted"
        )
    if compiler.autotunes:
        notes.append(
            "max-autotune measures Triton's products against cuBLAS's, which are assumed to be faster: a step may be "
            "shorter than predicted"
        )
    return notes
