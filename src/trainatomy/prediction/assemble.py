"""Assemble a ``Prediction`` from a simulation: memory breakdown, step time, and the evidence for both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Literal, NamedTuple

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.detail import memory_timeline
from trainatomy.analysis.memory import MemoryAnalysis, analyze_memory, are_wanted, verdict
from trainatomy.analysis.published import bytes_per_parameter
from trainatomy.analysis.variants import StepClock
from trainatomy.catalog.calibrations import Calibration
from trainatomy.libraries import installed_versions
from trainatomy.option import shared_fields
from trainatomy.prediction.host import host_bill_of
from trainatomy.prediction.inputs import context_bytes, emulated_software, facts_of, nccl_bytes_of
from trainatomy.prediction.subject import paddings_of, subject_of
from trainatomy.prediction.tasks import checkpoint_of, evaluation_of, generation_of, restored_of
from trainatomy.requests.predicting import PredictRequest
from trainatomy.results.memory import TimelinePoint
from trainatomy.results.operations import Operations
from trainatomy.results.prediction import GPUSummary, LeadingNote, Prediction, RankPrediction
from trainatomy.results.time import Pipeline, Time
from trainatomy.results.trace import AllocationTrace, DriverCall, TimedOperation
from trainatomy.simulator.steps import peaks_with_skipped_steps
from trainatomy.timing.cost_model import tensor_cores_for_fp32
from trainatomy.timing.step import RankStep, mean_over_period, predict_step_time, timed_operations
from trainatomy.training.shape import samples_per_step
from trainatomy.workload.loops import loop_of
from trainatomy.workload.schema import Workload
from trainatomy.workload.trl import steps_per_generation

if TYPE_CHECKING:
    from trainatomy.simulator.simulation import Simulation


class Executed(NamedTuple):
    """A simulation that a prediction was assembled from."""

    workload: Workload
    simulation: Simulation
    analysis: MemoryAnalysis


_EXECUTED: ContextVar[list[Executed] | None] = ContextVar("_EXECUTED", default=None)


@contextmanager
def keep_executed() -> Iterator[list[Executed]]:
    """Yield a list to which each prediction that is made meanwhile adds its simulation, the last one at the end."""
    found: list[Executed] = []
    token = _EXECUTED.set(found)
    try:
        yield found
    finally:
        _EXECUTED.reset(token)


def prediction_of(
    workload: Workload,
    simulation: Simulation,
    request: PredictRequest,
    started: float,
    *,
    analysis: MemoryAnalysis | None = None,
    pipeline: Pipeline | None = None,
) -> Prediction:
    """Return the prediction for a simulated workload.

    Args:
        workload: The training that was simulated.
        simulation: Its allocation trace and operations.
        request: What is to be predicted, and how.
        started: ``time.perf_counter()`` at the start, for ``seconds_taken``.
        analysis: The analysis of its memory, if there is one already.
        pipeline: The step of the pipeline that the simulated rank belongs to.
    """
    calibration, layouts = request.calibration, request.layouts
    gpu = workload.resolve_gpu()
    analysis = analysis or analysis_of(workload, simulation, calibration, layouts=layouts)
    if (executed := _EXECUTED.get()) is not None:
        executed.append(Executed(workload, simulation, analysis))
    rank, time = rank_prediction_of(workload, simulation, request, analysis), None
    if request.timed:
        time = time_of(workload, simulation, analysis.driver_calls, calibration, pipeline, request.host_paces)
    checkpoint, restored = checkpoint_of(workload, simulation, analysis), restored_of(simulation, analysis)
    return Prediction(
        name=workload.display_name,
        workload=workload.to_mapping(),
        card=GPUSummary(gpu.id, gpu.name, gpu.memory_bytes, gpu.capability),
        **shared_fields(RankPrediction, rank),
        bytes_per_parameter=bytes_per_parameter(
            _with_dtype(workload, simulation.weights_dtype),
            simulation.parameters,
            simulation.trainable_parameters,
            rank.memory,
        ),
        facts=facts_of(workload, simulation),
        notes=tuple(note for note in simulation.notes if not isinstance(note, LeadingNote)),
        leading_notes=tuple(str(note) for note in simulation.notes if isinstance(note, LeadingNote)),
        subject=subject_of(workload, simulation),
        paddings=paddings_of(workload, simulation, calibration, time)
        if request.layouts is True and time is not None
        else (),
        time=time,
        seconds_taken=perf_counter() - started,
        versions=installed_versions(),
        without_workspace=len(analysis.skipped_workspaces),
        trials=simulation.trials,
        evaluation=evaluation_of(workload, simulation, analysis, calibration, timed=request.timed),
        generation=generation_of(workload, simulation, calibration, time),
        checkpoint=checkpoint,
        restored=restored,
        host_bill=host_bill_of(workload, simulation, request, checkpoint, restored, rank.room_bytes),
        experts=simulation.experts,
    )


def _timeline(trace: AllocationTrace, analysis: MemoryAnalysis) -> tuple[TimelinePoint, ...]:
    """Return the memory over a run, which its trace keeps: GPUs on which a training allocates the same share it."""
    sizes, found = trace.replayed.get("timeline", (None, ()))
    if sizes is not analysis.sizes:
        found = memory_timeline(trace, analysis.purposes, analysis.sizes)
        trace.replayed["timeline"] = analysis.sizes, found
    timeline: tuple[TimelinePoint, ...] = found
    return timeline


def analysis_of(
    workload: Workload,
    simulation: Simulation,
    calibration: Calibration | None,
    *,
    layouts: bool | Literal["scarce"] = False,
) -> MemoryAnalysis:
    """Return the analysis of what a simulated process holds on its GPU; see ``PredictRequest`` for ``layouts``."""
    settings = AllocatorSettings.parse(workload.allocator, simulation.torch_version)
    context, nccl = context_bytes(workload, simulation), nccl_bytes_of(workload, simulation)
    gpu_bytes = workload.resolve_gpu().memory_bytes
    clock = _clock(workload, simulation, calibration)
    found = analyze_memory(simulation.trace, settings, gpu_bytes, context, nccl, clock, layouts=layouts)
    if (
        not are_wanted(layouts, found.memory, gpu_bytes)
        or workload.skipped_steps
        or found.out_of_memory is not None
        or found.memory.num_alloc_retries
    ):
        return found
    skipped = peaks_with_skipped_steps(simulation.trace, settings, gpu_bytes, found.memory)
    return replace(found, memory=replace(found.memory, skipped_steps=skipped))


def _clock(workload: Workload, simulation: Simulation, calibration: Calibration | None) -> StepClock | None:
    """Return the clock of the releases that depend on timing; None where none does, or times are not known.

    With DeepSpeed they are made at once: its Python takes so long that the GPU is done by then, which predicted times
    tell too little of (three runs of ZeRO-3 on two H200s).
    """
    operations, trace = simulation.operations, simulation.trace
    on_time = not trace.stream_uses and not trace.collectives
    if on_time or not operations.operations or workload.train.deepspeed is not None:
        return None
    timed, seconds = timed_step(workload, simulation, calibration)
    return StepClock(trace, timed, operations.step, seconds)


def timed_step(
    workload: Workload,
    simulation: Simulation,
    calibration: Calibration | None = None,
    driver_calls: Sequence[DriverCall] = (),
) -> tuple[tuple[TimedOperation, ...], float]:
    """Return the operations of a simulated step with their predicted times, and its duration in seconds.

    ``driver_calls`` are those of replaying its trace.
    """
    return timed_operations(step_of(workload, simulation, simulation.operations, calibration, driver_calls))


def _in_steps(trace: AllocationTrace, calls: Sequence[DriverCall]) -> list[DriverCall]:
    """Return the driver calls until the end of the last step: what a training does after it takes no step's time."""
    end = max((mark.event for mark in trace.marks if mark.name == "step end"), default=len(trace.events))
    return [call for call in calls if call.event < end]


def step_of(
    workload: Workload,
    simulation: Simulation,
    operations: Operations,
    calibration: Calibration | None,
    driver_calls: Sequence[DriverCall],
) -> RankStep:
    """Return a step of a simulated training with these operations, as it is replayed on the timelines.

    ``driver_calls`` are those of replaying its trace.
    """
    return RankStep(
        operations,
        workload.resolve_gpu(),
        loop=loop_of(workload).cpu_costs,
        tf32=tensor_cores_for_fp32(workload.tf32, simulation.torch_version),
        samples=samples_per_step(workload),
        calibration=calibration,
        driver_calls=_in_steps(simulation.trace, driver_calls),
        links=workload.parallel.links(workload.resolve_gpu()),
        collated=workload.data.factory is None,
        one_thread=workload.parallel.processes > 1,
    )


def rank_prediction_of(
    workload: Workload, simulation: Simulation, request: PredictRequest, analysis: MemoryAnalysis | None = None
) -> RankPrediction:
    """Return the memory of the rank that was simulated; the arguments are those of ``prediction_of``."""
    gpu = workload.resolve_gpu()
    analysis = analysis or analysis_of(workload, simulation, request.calibration, layouts=True)
    return RankPrediction(
        rank=simulation.trace.rank,
        fits=analysis.out_of_memory is None,
        verdict=verdict(analysis.memory, gpu.memory_bytes, analysis.out_of_memory),
        room_bytes=gpu.memory_bytes - analysis.memory.device_bytes,
        memory=analysis.memory,
        modules=analysis.modules,
        out_of_memory=analysis.out_of_memory,
        timeline=_timeline(simulation.trace, analysis) if request.timeline else (),
    )


def _with_dtype(workload: Workload, dtype: str) -> Workload:
    """Return the workload with the dtype that ``model.dtype: auto`` came to."""
    return workload.model_copy(update={"model": workload.model.model_copy(update={"dtype": dtype})})


def time_of(
    workload: Workload,
    simulation: Simulation,
    driver_calls: Sequence[DriverCall],
    calibration: Calibration | None,
    pipeline: Pipeline | None = None,
    paces: Sequence[float] = (),
) -> Time:
    """Return the predicted time of the step whose operations a simulation has.

    Where only one in so many steps generates, it is that of the mean step.  ``driver_calls`` are those of replaying its
    trace.
    """

    def of_step(operations: Operations, driver_calls: Sequence[DriverCall]) -> Time:
        return predict_step_time(
            step_of(workload, simulation, operations, calibration, driver_calls),
            tokens_per_sample=simulation.tokens_per_sample,
            current_software=emulated_software(workload).current,
            gpus=workload.parallel.world_size,
            data_parallel_size=workload.parallel.data_parallel_size,
            pipeline=pipeline,
            paces=paces,
        )

    found, between = of_step(simulation.operations, driver_calls), simulation.operations_between
    if between is None:
        return found
    return mean_over_period(found, of_step(between, ()), steps_per_generation(workload))
