"""Executes the steps of a workload without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.catalog.gpus import GPU
from trainatomy.catalog.versions import parse_version
from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.convolution import settings_of_plans
from trainatomy.operators.allocation.cudnn.ways import say_plans
from trainatomy.operators.allocation.plan import Processor
from trainatomy.operators.allocation.workspaces import WorkspaceTracker
from trainatomy.simulator import live
from trainatomy.simulator.adapters.registry import adapters_of, opened
from trainatomy.simulator.amd import amd_notes, check_amd
from trainatomy.simulator.cards import others_like, processor_of
from trainatomy.simulator.compiled import captures, compiles, compiling, optimizer_that_compiles, preload_compiler
from trainatomy.simulator.cudnn import chosen_alike, heuristics_of
from trainatomy.simulator.description import Description, describe, host_use, with_execution
from trainatomy.simulator.evaluation import CheckpointFiles, ExecutedRestoring, arrays_without_data, files_without_data
from trainatomy.simulator.experts import masks_rows, share_rows
from trainatomy.simulator.failures import explained_failures
from trainatomy.simulator.isolation import isolated
from trainatomy.simulator.live import loading
from trainatomy.simulator.notes import Note, mask_notes, version_notes
from trainatomy.simulator.parallel.group import Topology
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.releases import python_part_notes, software_of
from trainatomy.simulator.run_notes import host_memory_notes, plan_notes, run_notes, selection_notes, trial_notes
from trainatomy.simulator.simulation import Execution, Simulation
from trainatomy.simulator.steps import continued
from trainatomy.simulator.watcher import EXECUTED_MICRO_STEPS, Watcher
from trainatomy.training.batch import BatchesOfLengths, MakeBatch, batch_shapes
from trainatomy.training.model import (
    build_model,
    cast_weights,
    is_loaded_by_gpu,
    is_quantised,
    unwrap,
)
from trainatomy.training.optimizer import needs_closure, refuse_closures, steps_with_closure
from trainatomy.training.process import preload, seed_host
from trainatomy.training.quantization import load_on_device
from trainatomy.training.run import run
from trainatomy.workload.schema import Workload
from trainatomy.workload.trl import steps_per_generation

_MAX_MICRO_STEPS_IN_THREE = 6
"""Micro-batches that three steps may have in all; with more, two steps run, as states and gradients exist from the
second on."""


_STEPS_WITH_GRAPHS = 4
"""Steps with CUDA graphs: functions warm up in the first one and are recorded in the second; the others replay."""


def torch_version(workload: Workload) -> tuple[int, int]:
    """Return the version of PyTorch to simulate: the workload's, or the installed one."""
    return parse_version(workload.software.torch or torch.__version__)


def topology_of(workload: Workload, rank: int = 0) -> Topology:
    """Return the place of a rank of the workload's training; of ``DataParallel``, of a GPU of its one process."""
    parallel = workload.parallel
    if parallel.devices > 1:
        links = parallel.links(workload.resolve_gpu())
        direct = links is not None and links.intra.buffers_on_gpu
        return Topology(gpus_per_node=parallel.gpus, devices=parallel.devices, device=rank, peer_access=direct)
    return Topology(rank, parallel.world_size, parallel.gpus, is_launched=workload.train.deepspeed is not None)


def steps_needed(workload: Workload) -> int:
    """Return how many optimizer steps to execute, so that states exist and the allocator's cache is stable."""
    if workload.steps is not None:
        return workload.steps
    if workload.mode != "training":
        return 2
    if needs_closure(workload.train):
        return steps_with_closure(workload.train)
    if workload.loop == "grpo":  # the last one generates, as the first one does
        return steps_per_generation(workload) + 1
    counted = workload.microbatches if workload.parallel.pp_size > 1 else workload.train.gradient_accumulation_steps
    micro_steps = min(counted, EXECUTED_MICRO_STEPS)
    steps = 3 if 3 * micro_steps <= _MAX_MICRO_STEPS_IN_THREE else 2
    if captures(workload):
        steps = _STEPS_WITH_GRAPHS
    return steps + 1 if workload.pauses else steps


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """How a training is executed.

    Attributes:
        model: Builds the model on meta tensors, if it is not the workload's.
        make_batch: Makes batches, if they are not the workload's.
        trust_remote_code: True if code from the Hugging Face hub may run.
        operations: False if only the allocation trace is wanted.
        topology: Place of the process in a training on several GPUs; by default it is rank 0 of ``workload.parallel``.
        steps: Optimizer steps to execute; by default as many as are needed (see ``steps_needed``).
        watch: Makes the observer of the loop.
        files: Files that the training may load, of another simulation.
        others: Other GPUs that the execution is to serve, where the training does the same on them.
        goes_on: Whether the last step may be repeated, as far as the peaks need it; by default unless ``watch`` is
            given.
    """

    model: Callable[[], nn.Module] | None = None
    make_batch: MakeBatch | BatchesOfLengths | None = None
    trust_remote_code: bool = False
    operations: bool = True
    topology: Topology | None = None
    steps: int | None = None
    watch: Callable[[Recorder, int], Watcher] = Watcher
    files: CheckpointFiles | None = None
    others: Collection[GPU] = ()
    goes_on: bool | None = None


_DEFAULTS = ExecutionOptions()


def simulate(workload: Workload, gpu: GPU, **how: Any) -> Simulation:
    """Execute the workload's step without a GPU, for one GPU; ``how``: the attributes of ``ExecutionOptions``."""
    return _on(workload, gpu, ExecutionOptions(**how))


def _on(workload: Workload, gpu: GPU, how: ExecutionOptions) -> Simulation:
    found = execute(workload, gpu, how).on(workload, gpu)
    assert found is not None
    return found


def execute(workload: Workload, gpu: GPU, how: ExecutionOptions = _DEFAULTS) -> Execution:
    """Execute the workload's step without a GPU.

    The process is left as it was found, also after an exception or Ctrl-C; threads that simulate at once wait for each
    other.

    Raises:
        SimulationError: An operation needs data, or this thread is already simulating.
        TrainatomyError: What building the model and the step raises.
    """
    check_amd(gpu, torch_version(workload))
    processor = processor_of(gpu, torch_version(workload), heuristics_of(workload, gpu))
    first = replace(how, watch=Watcher, files=None, others=(), goes_on=None)  # that of a training it continues

    def once(training: Workload, **changed: Any) -> Simulation:
        return _on(training, gpu, replace(first, **changed))

    rank = 0 if how.topology is None else how.topology.rank
    with continued(workload, how.files, once, rank) as (training, found_files), isolated():
        _prepare(training)
        seed_host(training.train.seed)  # a model may be built at random
        process = _process_on(gpu, processor, training, how)
        process.recorder.operations.wanted = how.operations
        selections: dict[str, None] = {}
        process.recorder.sizes.assumes = lambda name: selections.setdefault(
            f"{name} in {process.modules.current() or 'the training loop'}"
        )
        found_files.open(process)
        steps = how.steps or steps_needed(training)
        with (
            software_of(training.era),
            _pauses(training, process, found_files),
            opened(adapters_of(training, None), process, training),
        ):
            built = _build(training, how)
            host = host_use(training, built, is_built=how.model is not None)
            if is_loaded_by_gpu(built):
                process.cards.keep(())
            described = describe(training, built) if _changes_when_spread(training, built) else None
            built = _execute(training, process, built, steps, how)
        if processor.cudnn is not None:
            calls, settings = process.recorder.operations.operations.calls, settings_of_plans(processor)
            say_plans(calls, processor.cudnn, gpu.capability, **settings)
    process.notes.extend(selection_notes(tuple(selections)))
    if process.misses_a_mask and how.make_batch is None:
        process.notes.extend(mask_notes(training))
    if training.parallel.enable_expert_parallel and masks_rows(built):
        share_rows(process.recorder.operations.operations, training.parallel.tp_size)
    goes_on = how.watch is Watcher if how.goes_on is None else how.goes_on
    described = described or describe(training, built)
    library = None if processor.cudnn is None else processor.cudnn.version
    result = _result(process, described, steps, found_files, library)
    shapes = batch_shapes(built, training.batch_size * training.parallel.devices)
    return Execution(
        own=process.cards.own,
        others=frozenset(process.cards.others),
        heard=process.allocator() if process.cards.are_counters_read else None,
        goes_on=goes_on and training.mode == "training" and training.steps is None and not training.pauses,
        trace=process.trace,
        notes=_notes(training, process, described, library),
        simulation=replace(result, input_shapes=shapes, host=with_execution(host, process, built)),
    )


def _prepare(workload: Workload) -> None:
    """Import what the training needs, and refuse what cannot be trained."""
    preload(workload)
    if workload.mode == "training":
        refuse_closures(workload)
    if compiles(workload):
        preload_compiler()
    elif (optimizer := optimizer_that_compiles(workload)) is not None:
        preload_compiler(f"train.optim: {optimizer} compiles its step, and")


def _process_on(gpu: GPU, processor: Processor, workload: Workload, how: ExecutionOptions) -> SimulatedProcess:
    """Return a process on a GPU, which is not entered yet."""
    return SimulatedProcess(
        gpu.device_name,
        gpu.memory_bytes,
        processor,
        allocation_rules(),
        WorkspaceTracker,
        how.topology or topology_of(workload),
        allocator=partial(AllocatorSettings.parse, workload.allocator, processor.torch_version),
        others=others_like(gpu, processor, chosen_alike(processor.cudnn, gpu, how.others)),
    )


def _changes_when_spread(workload: Workload, model: nn.Module) -> bool:
    """Return whether a model is another one after its training, so that it has to be described before.

    FSDP1 leaves only this rank's shards in it. On one GPU it is described after, as the first step may complete it, and
    so is a quantised one, which is loaded in the process, with DDP, which leaves it as it is.
    """
    is_spread = workload.parallel.world_size > 1 or workload.train.deepspeed is not None
    return is_spread and not is_quantised(workload, model)


def _build(workload: Workload, how: ExecutionOptions) -> nn.Module:
    """Build the model on meta tensors and check that its step can be simulated."""
    with torch.device("meta"):
        built = how.model() if how.model else build_model(workload, trust_remote_code=how.trust_remote_code)
    name = type(unwrap(built)).__name__
    if any(isinstance(module, torch.jit.ScriptModule) for module in built.modules()):
        raise SimulationError(
            f"{name} contains modules that torch.jit.script or torch.jit.trace compiled, which are not simulated: "
            "give the plain modules"
        )
    is_adapted_later = is_quantised(workload, built)
    if workload.mode == "training" and not is_adapted_later and not any(p.requires_grad for p in built.parameters()):
        raise WorkloadError(
            f"no parameter of {name} is trained (requires_grad is False for all): "
            "leave model.freeze out or narrow it, or ask for mode: inference",
            key="model.freeze",
        )
    return built


def _execute(
    workload: Workload, process: SimulatedProcess, model: nn.Module, steps: int, how: ExecutionOptions
) -> nn.Module:
    """Run the steps in the simulated process, and return the model that ran."""
    adapters = adapters_of(workload, model)
    for adapter in adapters:
        adapter.load(workload)
    with process.open(), opened(adapters, process, workload), compiling(workload, process):
        process.adopt(model)
        # A measurement begins in the same way: with the context and the allocator's first segment.
        torch.ones((1, 1)).to("cuda")
        if is_quantised(workload, model):
            model = _load(workload, process, model)
        else:
            live.place(model)
            cast_weights(model, workload, "cuda")
        # Only the loop may hold the observer, which refers to the model and its optimizer.
        run_steps = partial(run, workload, model, device="cuda", steps=steps, make_batch=how.make_batch)
        with explained_failures(
            type(unwrap(model)).__name__,
            process.modules.path,
            lambda: process.recorder.stage,
            own_batch=how.make_batch is None and workload.data.factory is None,
        ):
            run_steps(observer=_observer(workload, how.watch(process.recorder, steps)))
    process.recorder.end_run()
    size = len(list(model.modules())), len(list(model.parameters()))
    for operations in filter(None, (process.recorder.operations.operations, process.recorder.step_before)):
        operations.modules, operations.parameters = size
    return model


def _observer(workload: Workload, watcher: Watcher) -> Watcher:
    """Return the observer of a run; where only every so many steps generate, it keeps one of the others, too."""
    watcher.keeps_step_before = workload.loop == "grpo" and steps_per_generation(workload) > 1
    return watcher


def _load(workload: Workload, process: SimulatedProcess, model: nn.Module) -> nn.Module:
    """Load a model with quantised weights in the simulated process."""
    with loading(process.on_host):
        loaded = load_on_device(workload, model, "cuda")
    process.modules.learn(loaded)
    return loaded


def _notes(
    workload: Workload, process: SimulatedProcess, described: Description, library: str | None
) -> tuple[Note, ...]:
    """Return the notes on a run; ``library``: the version of cuDNN's library that chose for convolutions."""
    recorder, version = process.recorder, process.processor.torch_version
    names = frozenset(call.name for call in recorder.operations.operations.calls)  # the notes keep no recorder
    return (
        lambda on_gpu: version_notes(version, on_gpu.resolve_gpu().capability),
        lambda on_gpu: amd_notes(on_gpu.resolve_gpu(), names),
        *python_part_notes(workload),
        *described.notes,
        *trial_notes(recorder.trace.trials, known=library is not None),
        *plan_notes(recorder.operations.operations.calls, library),
        *run_notes(recorder),
        *process.notes,
        *host_memory_notes(process.storages.host_memory),
    )


def _result(
    process: SimulatedProcess, described: Description, steps: int, files: CheckpointFiles, library: str | None
) -> Simulation:
    """Collect the records of the run, but for its notes."""
    recorder = process.recorder
    read = {"resume": files.found_bytes, "best": files.own_bytes}
    return Simulation(
        trace=recorder.trace,
        parameters=described.parameters,
        communicators={ranks: frozenset(uses) for ranks, uses in recorder.groups.items()},
        communicator_copies={ranks: len(names) for ranks, names in recorder.group_names.items() if len(names) > 1},
        trainable_parameters=described.trainable_parameters,
        steps=steps,
        torch_version=process.processor.torch_version,
        libraries=described.libraries | recorder.loaded,
        notes=(),
        stack_bytes=recorder.stack_bytes,
        operations=recorder.operations.operations,
        tokens_per_sample=described.tokens_per_sample,
        trials=len(recorder.trace.trials),
        weights_dtype=described.weights_dtype,
        evaluation=recorder.evaluation,
        layers=described.layers,
        generation=recorder.generation,
        saving=recorder.saving,
        operations_between=recorder.step_before,
        restored={
            name: ExecutedRestoring(events, max(read[name], recorder.largest_read))
            for name, events in recorder.restored.items()
        },
        host_bytes_of_saving=files.host_bytes,
        experts=described.experts,
        cudnn=library,
        models=(described.model,),
        attention=described.attention,
        stored_quantization=described.stored_quantization,
    )


@contextlib.contextmanager
def _pauses(workload: Workload, process: SimulatedProcess, files: CheckpointFiles) -> Iterator[None]:
    """Open a context in which evaluation gathers outputs of any size, and checkpoints are files without data."""
    with contextlib.ExitStack() as stack:
        if workload.evaluates:
            stack.enter_context(arrays_without_data(process.recorder))
        if workload.saves or workload.resumes:
            stack.enter_context(files_without_data(files))
        yield
