"""Run a workload's step in a simulated world and keep the tape."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from trainatomy.catalog.gpus import GPU
from trainatomy.catalog.versions import parse_version, version_note
from trainatomy.errors import WorkloadError
from trainatomy.libraries import version_of
from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.plan import Processor
from trainatomy.operators.allocation.workspaces import WorkspaceTracker
from trainatomy.results.operations import Operations
from trainatomy.results.trace import AllocationTrace
from trainatomy.simulator.eras import software_of
from trainatomy.simulator.failures import failures
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.watcher import EXECUTED_MICRO_STEPS, Watcher
from trainatomy.training.batch import MakeBatch
from trainatomy.training.model import build_model, unwrap
from trainatomy.training.positions import sequence_note
from trainatomy.training.process import preload
from trainatomy.training.run import run
from trainatomy.training.throughput import tokens_per_sample
from trainatomy.workload.arguments import arguments
from trainatomy.workload.schema import Workload

#: Micro-batches that are executed at most for the third step; two steps are always run (states and gradients exist from
#: the second on).
_PATIENCE = 6


@dataclass(frozen=True, slots=True)
class Simulation:
    """The tape of a run, what was trained, which libraries were loaded on the way (see ``facts.cards.Context``), and
    the operations of its last step."""

    trace: AllocationTrace
    parameters: int
    trainable_parameters: int
    steps: int
    torch_version: tuple[int, int]
    libraries: frozenset[str]
    notes: tuple[str, ...]
    operations: Operations = field(default_factory=Operations)
    tokens_per_sample: int | None = None


def torch_version(workload: Workload) -> tuple[int, int]:
    """The version of PyTorch that is simulated: the workload's, or the installed one."""
    return parse_version(workload.software.torch or torch.__version__)


def steps_needed(workload: Workload) -> int:
    """How many optimizer steps are executed: enough for optimizer states to exist and the allocator's cache to
    settle."""
    if workload.steps is not None:
        return workload.steps
    if workload.mode == "inference":
        return 2
    micro_steps = min(workload.train.gradient_accumulation_steps, EXECUTED_MICRO_STEPS)
    return 3 if 3 * micro_steps <= _PATIENCE else 2


def simulate(
    workload: Workload,
    gpu: GPU,
    *,
    model: Callable[[], nn.Module] | None = None,
    make_batch: MakeBatch | None = None,
    trust_remote_code: bool = False,
    operations: bool = True,
) -> Simulation:
    """Execute the workload's step without a GPU; ``model`` builds the model on meta tensors, and ``make_batch`` its
    batches, where they are not the workload's own. ``operations``: False where only the tape is wanted.

    Raises ``SimulationError`` for an operation that needs data, and what building the model and the step raises.
    """
    version = torch_version(workload)
    processor = Processor(gpu.capability, gpu.multiprocessors, version)
    world = SimulatedProcess(
        gpu.device_name, gpu.memory_bytes, processor, allocation_rules(), WorkspaceTracker(processor)
    )
    world.recorder.operations.wanted = operations
    steps = steps_needed(workload)
    preload(workload)
    with _quiet(), software_of(workload.era), _libraries(workload, world):
        with torch.device("meta"):
            built = model() if model is not None else build_model(workload, trust_remote_code=trust_remote_code)
        if workload.mode == "training" and not any(p.requires_grad for p in built.parameters()):
            raise WorkloadError(
                f"no parameter of {type(unwrap(built)).__name__} is trained (requires_grad is False for all): "
                "leave model.freeze out or narrow it, or ask for mode: inference"
            )
        with world.open():
            world.adopt(built)
            # A measurement begins so as well: the context, and the allocator's first segment.
            torch.ones((1, 1)).to("cuda")
            # Nobody but the loop holds the observer, which knows the model and its optimizer.
            observed = partial(run, workload, built, device="cuda", steps=steps, make_batch=make_batch)
            with failures(type(unwrap(built)).__name__, world.modules.path):
                observed(observer=Watcher(world.recorder, steps))
    counts = sum(p.numel() for p in built.parameters()), sum(p.numel() for p in built.parameters() if p.requires_grad)
    used = world.recorder.libraries | {"kernels"} | ({"training"} if workload.mode == "training" else set())
    notes = (*_version_notes(version), *_notes(workload, built))
    written = world.recorder.operations.operations
    tokens = tokens_per_sample(workload, built)
    return Simulation(world.trace, *counts, steps, version, frozenset(used), notes, written, tokens)


def _version_notes(torch_version: tuple[int, int]) -> Iterator[str]:
    """Yield a note for each library whose release was never checked."""
    for library, version in (
        ("torch", torch_version),
        ("transformers", parse_version(version_of("transformers") or "0.0")),
    ):
        note = version_note(library, version)
        if note is not None:
            yield note


def _notes(workload: Workload, model: nn.Module) -> tuple[str, ...]:
    """What a reader should know of the description."""
    if workload.data.factory is not None or not hasattr(unwrap(model), "config"):
        return ()
    note = sequence_note(workload.data, model)
    return (note,) if note else ()


def _libraries(workload: Workload, world: SimulatedProcess) -> contextlib.AbstractContextManager[object]:
    """Optimizers that call libraries of their own are helped to run without a GPU."""
    if arguments().package_of(workload.train.optim) != "bitsandbytes":
        return contextlib.nullcontext()
    from trainatomy.simulator.bitsandbytes import simulated_bitsandbytes

    return simulated_bitsandbytes(world.on_host)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings about a GPU that is not there, and no collection of cycles at moments that depend on this machine.

    What exists already is frozen, so that a collection that the training itself asks for (accelerate does) takes no
    time.
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
