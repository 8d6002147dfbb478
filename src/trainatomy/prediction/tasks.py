"""Memory and time of what a training does besides its steps: evaluations, checkpoints, and calls of ``generate()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainatomy.catalog.calibrations import Calibration
from trainatomy.prediction.inputs import emulated_software
from trainatomy.results.operations import Operations
from trainatomy.results.tasks import Checkpoint, Evaluation, Generation, RestoredCheckpoint
from trainatomy.results.time import Time
from trainatomy.results.trace import DriverCall
from trainatomy.timing.cost_model import tensor_cores_for_fp32
from trainatomy.timing.host_costs import first_evaluation_seconds, first_on_machine_seconds
from trainatomy.timing.step import RankStep, predict_step_time

if TYPE_CHECKING:
    from trainatomy.analysis.memory import MemoryAnalysis
    from trainatomy.simulator.simulation import Simulation
    from trainatomy.workload.schema import Workload


def evaluation_of(
    workload: Workload,
    simulation: Simulation,
    analysis: MemoryAnalysis,
    calibration: Calibration | None,
    *,
    timed: bool,
) -> Evaluation | None:
    """Return what the evaluation of the training costs, None without one."""
    executed = simulation.evaluation
    if executed is None:
        return None
    allocated, reserved = analysis.allocated_bytes, analysis.reserved_bytes
    begin, end = executed.events.start, executed.events.stop
    calls = executed.operations.calls, simulation.operations.calls
    time = evaluation_time(workload, simulation, analysis, calibration) if timed else None
    return Evaluation(
        batch_size=workload.eval_batch_size,
        batches=executed.batches,
        samples=workload.eval_samples,
        allocated_before_bytes=max(allocated[:begin], default=0),
        reserved_before_bytes=max(reserved[:begin], default=0),
        allocated_after_bytes=max(allocated[:end], default=0),
        reserved_after_bytes=max(reserved[:end], default=0),
        own_allocated_bytes=max(allocated[begin:end], default=0),
        seconds=None if time is None else time.step_seconds,
        first_extra_seconds=first_evaluation_seconds(*calls) if timed else None,
        first_on_machine_seconds=first_on_machine_seconds(*calls) if timed else None,
    )


def evaluation_time(
    workload: Workload,
    simulation: Simulation,
    analysis: MemoryAnalysis,
    calibration: Calibration | None = None,
    paces: Sequence[float] = (),
) -> Time:
    """Return the predicted time of the evaluation that a simulation executed: its "step" is the whole of it."""
    executed = simulation.evaluation
    assert executed is not None
    calls = [call for call in analysis.driver_calls if call.event in executed.events]
    return _time_of(workload, simulation, executed.operations, calibration, calls, loop="evaluation", paces=paces)


def first_token_time(
    workload: Workload, simulation: Simulation, calibration: Calibration | None = None, paces: Sequence[float] = ()
) -> Time:
    """Return the predicted time to the first token of the call of ``generate()`` that a simulation executed."""
    assert simulation.generation is not None
    prefill = simulation.generation.prefill(simulation.operations)
    return _time_of(workload, simulation, prefill, calibration, loop="generation", paces=paces)


def _time_of(
    workload: Workload,
    simulation: Simulation,
    operations: Operations,
    calibration: Calibration | None,
    driver_calls: Sequence[DriverCall] = (),
    *,
    loop: str,
    paces: Sequence[float] = (),
) -> Time:
    """Return the predicted time of operations without gradients, in a loop with the CPU costs of that name."""
    return predict_step_time(
        RankStep(
            operations,
            workload.resolve_gpu(),
            loop=loop,
            tf32=tensor_cores_for_fp32(workload.tf32, simulation.torch_version),
            samples=1,
            calibration=calibration,
            driver_calls=driver_calls,
            links=workload.parallel.links(workload.resolve_gpu()),
            one_thread=workload.parallel.processes > 1,
        ),
        tokens_per_sample=None,
        current_software=emulated_software(workload).current,
        gpus=workload.parallel.world_size,
        paces=paces,
    )


def checkpoint_of(workload: Workload, simulation: Simulation, analysis: MemoryAnalysis) -> Checkpoint | None:
    """Return what a checkpoint takes, None where none is saved."""
    executed = simulation.saving
    if executed is None:
        return None
    allocated, (begin, end) = analysis.allocated_bytes, (executed.events.start, executed.events.stop)
    return Checkpoint(
        files=dict(executed.files),
        kept=workload.train.save_total_limit,
        allocated_before_bytes=max(allocated[:begin], default=0),
        allocated_after_bytes=max(allocated[:end], default=0),
        own_allocated_bytes=max(allocated[begin - 1 : end], default=0),
        host_bytes=simulation.host_bytes_of_saving,
    )


def restored_of(simulation: Simulation, analysis: MemoryAnalysis) -> tuple[RestoredCheckpoint, ...]:
    """Return what loading checkpoints takes."""
    allocated, found = analysis.allocated_bytes, []
    for purpose, executed in simulation.restored.items():
        begin, end = executed.events.start, executed.events.stop
        found.append(
            RestoredCheckpoint(
                purpose,
                allocated_before_bytes=max(allocated[:begin], default=0),
                allocated_after_bytes=max(allocated[:end], default=0),
                own_allocated_bytes=max(allocated[max(begin - 1, 0) : end], default=0),
                host_bytes=executed.host_bytes,
            )
        )
    return tuple(found)


def generation_of(
    workload: Workload, simulation: Simulation, calibration: Calibration | None, time: Time | None
) -> Generation | None:
    """Return what a call of ``generate()`` holds, None without one."""
    executed, tokens = simulation.generation, workload.generation.max_new_tokens
    if executed is None or tokens is None:
        return None
    first = rest = None
    if time is not None:
        first = first_token_time(workload, simulation, calibration).step_seconds
        rest = (time.step_seconds - first) / (tokens - 1) if tokens > 1 else None
    return Generation(
        prompts=workload.batch_size,
        sequences=executed.sequences,
        new_tokens=tokens,
        cache_bytes=executed.cache_bytes,
        cache_bytes_per_token=executed.cache_bytes_per_token,
        first_token_seconds=first,
        token_seconds=rest,
    )
