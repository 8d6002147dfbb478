"""The verbs: predict, compare, measure. Each takes descriptions and gives values."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.memory import analyze_memory
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.prediction import context_bytes, name_of, prediction_of
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainatomy.analysis.operations import PredictedTimes
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.measurement.process.reporting import Progress
    from trainatomy.records.store import Store
    from trainatomy.results.comparison import Comparison
    from trainatomy.results.operation_breakdown import OperationBreakdown
    from trainatomy.results.operations import Operations
    from trainatomy.runs.execute import Finished
    from trainatomy.timing.cost_model import CostModel

Batch = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]


def predict(
    what: Workload | nn.Module,
    *,
    batch: Batch | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    gpu: str | None = None,
    timeline: bool = False,
    trust_remote_code: bool = False,
    calibration: Calibration | Path | str | None = None,
    timed: bool = True,
    **train: Any,
) -> Prediction:
    """What one training step holds in GPU memory and how long it takes, without a GPU.

    ``what``: a workload, or a live module, which is neither touched nor moved.  For a module: ``batch`` is a mapping of
    tensors (any device; only their shapes, types and the values of small integer tensors matter) or a function of the
    batch size that makes one (a transformers model needs none); ``optimizer`` a name of ``TrainingArguments.optim`` or
    a class; ``train`` settings by their names in ``TrainingArguments`` (``bf16=True``,
    ``gradient_accumulation_steps=4``), and ``loop`` ("pytorch" unless said).  ``calibration``: of a machine
    (``trainatomy calibrate``) or its file, for the time; else what ships for the card, or its data sheet.  ``timed``:
    False for memory only, in somewhat less time (``Prediction.time`` is ``None``).

    Raises ``WorkloadError``, ``MissingLibrary``, ``NetworkError``, ``FactoryError``, ``SimulationError``.
    """
    from trainatomy.simulator.simulate import simulate

    started = time.perf_counter()
    if isinstance(what, Workload):
        workload = what if gpu is None else what.model_copy(update={"gpu": gpu})
        priced = _calibration(calibration, [workload])
        simulation = simulate(workload, workload.resolve_gpu(), trust_remote_code=trust_remote_code, operations=timed)
    else:
        from trainatomy.simulator.live import described, on_meta
        from trainatomy.training.factory import user_code

        workload, make_batch = described(what, batch, optimizer, gpu, train)
        priced = _calibration(calibration, [workload])
        with user_code(f"{type(what).__name__}: its forward"):
            simulation = simulate(
                workload, workload.resolve_gpu(), model=lambda: on_meta(what), make_batch=make_batch, operations=timed
            )
    return prediction_of(workload, simulation, calibration=priced, timed=timed, timeline=timeline, started=started)


def _calibration(calibration: Calibration | Path | str | None, workloads: Sequence[Workload]) -> Calibration | None:
    """What was given, read, once it is sure that it says something about these workloads; raises ``WorkloadError``."""
    from trainatomy.catalog.calibrations import given

    found = given(calibration)
    if found is None:
        return None
    timed = [workload for workload in workloads if workload.era != "2022"]
    if not timed:
        raise WorkloadError(
            f"calibration {found.source}: it is of today's software, and cannot price that of 2022; "
            "leave the calibration out, or predict for today's software"
        )
    for workload in timed:
        found.check(workload.resolve_gpu())
    return found


def compare(
    workloads: Sequence[Workload],
    *,
    measure: bool = False,
    repeat: int = 1,
    store: Store | Path | str | None = None,
    group: str | None = None,
    fresh: bool = False,
    time_limit: float | None = None,
    gpu: str | None = None,
    calibration: Calibration | Path | str | None = None,
    timeline: bool = False,
    trust_remote_code: bool = False,
    jobs: int = 1,
    progress: Callable[[Finished], None] | None = None,
) -> Comparison:
    """Several workloads side by side, in order: predicted and, with ``measure``, run on this machine's GPU too, one
    after the other, each in fresh processes.

    ``gpu``: the card to predict for (else the workloads' own; with ``measure``, this machine's where it is known);
    ``calibration``: see ``predict``; ``jobs``: processes that predict side by side (a script that asks for several must
    keep its own start behind ``if __name__ == "__main__"``); the others need ``measure``.  ``repeat``: how often each
    is run; ``store``: where its record is kept when a run ends, a folder or its URL (default: TRAINATOMY_RECORDS, or
    ./trainatomy-records);
    ``group``: the name that the records share, which follows from the workloads unless given.  What is on record under
    it is not run again, unless ``fresh``: so an interrupted comparison goes on where it stopped.  ``time_limit``:
    seconds for each run; ``progress``: is told of each run that ended.

    A run that fails or runs out of memory is a row that says so; a record that cannot be kept is a warning.  Raises
    what ``predict`` raises, with ``measure`` for wrong descriptions only: what cannot be predicted otherwise is
    measured nevertheless.  Then also ``DeviceError`` where there is no GPU, ``TrainatomyError`` where records cannot be
    kept at all.
    """
    asked = [workload if gpu is None else workload.model_copy(update={"gpu": gpu}) for workload in workloads]
    if not measure:
        _refuse_without_measure(repeat=repeat != 1, store=store, group=group, fresh=fresh, time_limit=time_limit)
        return _compared(asked, calibration, timeline, trust_remote_code, jobs)
    from trainatomy.catalog.calibrations import given
    from trainatomy.records.store import Store
    from trainatomy.runs.comparison import Wanted, prepare
    from trainatomy.runs.predicting import jobs_for

    one = partial(predict, timeline=timeline, trust_remote_code=trust_remote_code, calibration=given(calibration))
    kept = store if isinstance(store, Store) else Store(store)
    wanted = Wanted(repeat, kept, "comparison", group, fresh, own_cards=gpu is not None, time_limit=time_limit)
    campaign = prepare(asked, one, wanted, jobs_for(len(asked), jobs))
    for each in campaign.run():
        if progress is not None:
            progress(each)
    for note in campaign.notes():
        warnings.warn(note, stacklevel=2)
    return campaign.comparison()


def _compared(
    workloads: Sequence[Workload],
    calibration: Calibration | Path | str | None,
    timeline: bool,
    trust_remote_code: bool,
    jobs: int,
) -> Comparison:
    from trainatomy.runs.gather import gather
    from trainatomy.runs.predicting import jobs_for, predict_all
    from trainatomy.runs.published import published

    priced = _calibration(calibration, workloads)
    one = partial(_of_its_time, timeline=timeline, trust_remote_code=trust_remote_code, calibration=priced)
    made: list[Prediction] = []
    for found in predict_all(one, workloads, jobs_for(len(workloads), jobs)):
        if isinstance(found, TrainatomyError):
            raise found
        made.append(found)
    known = published(workloads)
    return gather(workloads, made, (), known.rows, source=known.source, remark=known.remark, samples=known.samples)


def _of_its_time(
    workload: Workload, *, calibration: Calibration | None, timeline: bool, trust_remote_code: bool
) -> Prediction:
    """A prediction by ``calibration``, which is of today's software."""
    priced = None if workload.era == "2022" else calibration
    return predict(workload, timeline=timeline, trust_remote_code=trust_remote_code, calibration=priced)


def _refuse_without_measure(**given: object) -> None:
    """What would silently do nothing."""
    if names := [name for name, value in given.items() if value not in (None, False)]:
        raise WorkloadError(f"{', '.join(names)}: needs measure=True; a prediction is the same every time")


def ops(
    workload: Workload,
    *,
    top: int = 15,
    measured: bool = False,
    calibration: Calibration | Path | str | None = None,
    trust_remote_code: bool = False,
) -> OperationBreakdown:
    """The anatomy of one step's operations: FLOP, bytes, time and memory by group and phase, the ``top`` heaviest ones,
    shapes that waste the card. ``measured``: with a profile of this machine's GPU beside it; ``calibration``: of a
    machine, or its file (without it, what ships).

    Raises what ``predict`` raises, and ``DeviceError`` where there is no GPU to profile on.
    """
    from trainatomy.analysis.operations import analyze_operations, bytes_by_group
    from trainatomy.analysis.published_layer import SCOPE, published_notes, published_shares
    from trainatomy.simulator.simulate import simulate
    from trainatomy.timing.cost_model import cost_model_of
    from trainatomy.workload.encoder_layer import is_encoder_layer

    gpu, priced = workload.resolve_gpu(), _calibration(calibration, [workload])
    if measured:
        from trainatomy.measurement.device.visible import require_gpu

        require_gpu()
    simulation = simulate(workload, gpu, trust_remote_code=trust_remote_code)
    trace, operations = simulation.trace, simulation.operations
    settings = AllocatorSettings.parse(workload.allocator, simulation.torch_version)
    analysis = analyze_memory(trace, settings, gpu.memory_bytes, context_bytes(workload, simulation))
    profile = None
    if measured:
        from trainatomy.measurement.profiler.join import joined
        from trainatomy.measurement.profiler.profile import profile as run_profile

        profile = joined(operations, run_profile(workload))
    cost_model = cost_model_of(gpu, priced, tf32=bool(workload.train.tf32))
    clock = _clock(operations, cost_model)
    told = f"predicted times are priced by: {cost_model.source}"
    published = is_encoder_layer(workload)
    return analyze_operations(
        name_of(workload),
        workload.to_mapping(),
        gpu,
        operations,
        peak=bytes_by_group(trace, analysis.held_at_peak, analysis.sizes),
        predicted=clock,
        profile=profile,
        scope=SCOPE if published else None,
        tf32=bool(workload.train.tf32),
        top=top,
        published=published_shares() if published else None,
        notes=(*(published_notes(operations, clock.times) if published else ()), told),
    )


def _clock(operations: Operations, cost_model: CostModel) -> PredictedTimes:
    """GPU seconds of each operation."""
    from trainatomy.analysis.operation_table import PredictedTime
    from trainatomy.analysis.operations import PredictedTimes
    from trainatomy.timing.cost_model import kernel_cost

    costs = [kernel_cost(call, cost_model) for call in operations.calls]
    bounds = ["arithmetic" if cost.flop_seconds > cost.bytes_seconds else "memory bandwidth" for cost in costs]
    by_call = [PredictedTime(cost.seconds, bound) for cost, bound in zip(costs, bounds, strict=True)]
    return PredictedTimes(
        [by_call[one.call] for one in operations.operations], lambda call: kernel_cost(call, cost_model).seconds
    )


def calibrate(output: Path | str | None = None, *, time_limit: float = 120.0) -> Calibration:
    """What the clock needs, measured on this machine's GPU in at most ``time_limit`` seconds and a few; written to
    ``output`` as JSON where that is given.  Raises ``DeviceError`` where there is no GPU, ``WorkloadError`` at once
    where ``output`` cannot be written."""
    from trainatomy.catalog.calibrations import parse
    from trainatomy.measurement.calibration.calibrate import calibrate as run
    from trainatomy.measurement.calibration.calibrate import write
    from trainatomy.measurement.measure import writable

    target = None if output is None else writable(Path(output), "--output")
    content = run(time_limit=time_limit)
    if target is not None:
        write(content, target)
    return parse(json.dumps(content), str(output or "this machine"))


def measure(
    workload: Workload,
    *,
    components: bool = True,
    steps: int | None = None,
    trace: Path | str | None = None,
    time_limit: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Measurement:
    """The same step on this machine's GPU, in fresh processes: once timed, once recorded for the bill.

    ``components``: False leaves the recorded run out; ``steps``: optimizer steps where the workload does not say;
    ``tape``: a file for the recorded run's allocations; ``time_limit``: seconds; ``progress``: is told where it is.

    Out of memory is a result.  Raises ``DeviceError`` where there is no GPU or the process that used it failed, and
    what the workload itself causes.
    """
    from trainatomy.measurement.measure import measure as run

    return run(workload, components=components, steps=steps, trace=trace, time_limit=time_limit, progress=progress)
