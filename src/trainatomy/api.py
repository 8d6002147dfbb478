"""The library's functions: predict, fit, compare, measure, ops, calibrate. They take workloads and return values."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.memory import analyze_memory
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction
from trainatomy.runs.options import PredictOptions, RunOptions, load_calibration
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainatomy.analysis.operations import PredictedTimes
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.measurement.process.progress import Progress
    from trainatomy.records.store import Store
    from trainatomy.results.comparison import Comparison
    from trainatomy.results.fit import Fit, FitAcross, Goal, Permission, Shortage
    from trainatomy.results.operation_breakdown import OperationBreakdown
    from trainatomy.results.operations import Operations
    from trainatomy.runs.plan import Finished, RunObserver
    from trainatomy.runs.predicting import PredictionPool
    from trainatomy.runs.single import MeasuredRun
    from trainatomy.search.axes import CanApply
    from trainatomy.search.explore import Observer
    from trainatomy.simulator.simulate import Simulation
    from trainatomy.timing.cost_model import CostModel
    from trainatomy.training.batch import MakeBatch

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
    **settings: Any,
) -> Prediction:
    """Predict, without a GPU, what one training step holds in GPU memory and how long it takes.

    Args:
        what: A workload, or a live module, which is neither changed nor moved.
        batch: A mapping of tensors (on any device; only shapes, dtypes and the values of small integer tensors
            matter), or a function of the batch size that returns one. A transformers model and a workload need none.
        optimizer: A name of ``TrainingArguments.optim``, or an optimizer class.
        gpu: The GPU to predict for.
        timeline: Include memory by component over the step.
        trust_remote_code: Run code that a model on the hub brings along.
        calibration: A calibration of a machine (``trainatomy calibrate``) or its file, for the timing model. By
            default the calibration that ships for the GPU is used, or else its data sheet.
        timed: Predict the time too. False predicts memory only, somewhat faster; ``Prediction.time`` is then None.
        **settings: Settings by their name in ``TrainingArguments`` (``bf16=True``, ``gradient_accumulation_steps=4``),
            and sections of a workload (``loop="trainer"``, ``data={"sequence_length": 512}``). They override those of
            a workload. The loop of a module is "pytorch" by default.

    Raises:
        WorkloadError: The description is wrong: an unknown setting, a contradiction, an argument of the wrong type.
        MissingLibrary: An optional library is needed.
        NetworkError: The hub cannot be reached.
        FactoryError: The user's code raised.
        SimulationError: An operation needs data that a run without a GPU does not have.
    """
    started = time.perf_counter()
    options = PredictOptions(timeline, timed, trust_remote_code, calibration)
    if isinstance(what, Workload):
        _check_keywords(batch, optimizer)
        workload, make_batch = _with_batch(_changed(what, optimizer, gpu, settings), batch, settings)
        options = options.for_workloads([workload])
        simulation = _simulate_workload(workload, make_batch, options)
    else:
        from trainatomy.simulator.live import described

        workload, make_batch = described(what, batch, optimizer, gpu, settings)
        options = options.for_workloads([workload])
        simulation = _simulate_module(what, workload, make_batch, options)
    return _assemble(workload, simulation, options, started)


def _assemble(workload: Workload, simulation: Simulation, options: PredictOptions, started: float) -> Prediction:
    from trainatomy.prediction import prediction_of

    loaded: Any = options.calibration
    return prediction_of(
        workload, simulation, calibration=loaded, timed=options.timed, timeline=options.timeline, started=started
    )


def _simulate_workload(workload: Workload, make_batch: MakeBatch | None, options: PredictOptions) -> Simulation:
    from trainatomy.runs.predicting import shared_simulation
    from trainatomy.simulator.simulate import simulate

    run = partial(
        simulate,
        workload,
        workload.resolve_gpu(),
        make_batch=make_batch,
        trust_remote_code=options.trust_remote_code,
        operations=options.timed,
    )
    if make_batch is not None:
        return run()
    return shared_simulation(workload, (options.trust_remote_code, options.timed), run)


def _simulate_module(
    module: nn.Module, workload: Workload, make_batch: MakeBatch | None, options: PredictOptions
) -> Simulation:
    from trainatomy.simulator.live import on_meta
    from trainatomy.simulator.simulate import simulate
    from trainatomy.training.factory import user_code

    with user_code(f"{type(module).__name__}: its forward"):
        return simulate(
            workload,
            workload.resolve_gpu(),
            model=lambda: on_meta(module),
            make_batch=make_batch,
            operations=options.timed,
        )


def _check_keywords(batch: Any, optimizer: Any) -> None:
    """Raise ``WorkloadError`` if a batch or an optimizer has the wrong type; names need no torch."""
    if batch is not None or not isinstance(optimizer, str | None):
        from trainatomy.simulator.live import check_keywords

        check_keywords(batch, optimizer)


_SECTIONS = frozenset(Workload.model_fields) - {"train"}


def _changed(
    workload: Workload,
    optimizer: str | type[torch.optim.Optimizer] | None,
    gpu: str | None,
    settings: Mapping[str, Any],
) -> Workload:
    """Return the workload with keywords applied: settings of ``train``, and sections by their name."""
    changes: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in _SECTIONS:
            changes[f"train.{name}"] = value
        elif isinstance(value, Mapping):
            changes |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            changes[name] = value
    if gpu is not None:
        changes["gpu"] = gpu
    if optimizer is not None:
        if isinstance(optimizer, str):
            changes["train.optim"] = optimizer
        else:
            changes["train.optim"] = f"{optimizer.__module__}.{optimizer.__qualname__}"
    return workload.replace(changes) if changes else workload


def _with_settings(workload: Workload, settings: Mapping[str, Any], gpu: str | None = None) -> Workload:
    """Return the workload with keywords applied, ``optimizer`` among them; a batch is refused."""
    _check_keywords(None, settings.get("optimizer"))
    if "batch" in settings:
        raise WorkloadError("batch: only predict takes one; name data.factory in the workload", key="data")
    rest = {name: value for name, value in settings.items() if name != "optimizer"}
    return _changed(workload, settings.get("optimizer"), gpu, rest)


def _with_batch(
    workload: Workload, batch: Batch | None, settings: Mapping[str, Any]
) -> tuple[Workload, MakeBatch | None]:
    """Return the workload for an explicit batch, and the function that makes it; the batch replaces ``data``."""
    if batch is None:
        return workload, None
    from trainatomy.simulator.live import batches_of

    make_batch, size = batches_of(batch)
    is_eval = workload.mode == "inference" and workload.train.per_device_eval_batch_size is not None
    name = "per_device_eval_batch_size" if is_eval else "per_device_train_batch_size"
    if size is not None and settings.get(name, size) != size:
        raise WorkloadError(f"{name}={settings[name]}, but the batch holds {size} samples", key=f"train.{name}")
    changes: dict[str, Any] = {"data": {}}
    if size is not None:
        changes[f"train.{name}"] = size
    return workload.replace(changes), make_batch


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
    progress: Callable[[Finished], None] | RunObserver | None = None,
    **settings: Any,
) -> Comparison:
    """Compare several workloads: predict them and, with ``measure``, run them on this machine's GPU one by one.

    A run that fails or runs out of memory is a row that says so; a record that cannot be written is a warning.

    Args:
        workloads: The trainings, in the order of the rows.
        measure: Run each of them in fresh processes; ``repeat``, ``store``, ``group``, ``fresh``, ``time_limit`` and
            ``progress`` need it.
        repeat: Runs per training.
        store: Where records are kept: a store, a folder or its URL (default: TRAINATOMY_RECORDS, or
            ./trainatomy-records). Runs that are on record are not repeated, so an interrupted comparison continues
            where it stopped.
        group: Name that the records share; derived from the workloads by default.
        fresh: Run everything again, whatever is on record.
        time_limit: Seconds for each run.
        gpu: The GPU to predict for. By default the workloads' own or, with ``measure``, this machine's if it is known.
        calibration: See ``predict``.
        timeline: See ``predict``.
        trust_remote_code: See ``predict``.
        jobs: Processes that predict in parallel. A script that asks for several must start its own work behind
            ``if __name__ == "__main__"``.
        progress: Called with each run that ended, or an observer.
        **settings: Settings for all workloads, as in ``predict``.

    Raises:
        TrainatomyError: The errors of ``predict``; with ``measure`` only ``WorkloadError`` among them, because what
            cannot be predicted can still be measured, ``DeviceError`` if there is no GPU, and ``TrainatomyError`` if
            records cannot be written.
        ComparisonInterrupted: A ``KeyboardInterrupt`` that carries the comparison so far.
    """
    predict_options = PredictOptions(timeline, True, trust_remote_code, calibration)
    run_options = RunOptions(repeat, store, group, fresh, time_limit, keep_gpus=gpu is not None)
    changed = [_with_settings(workload, settings, gpu) for workload in workloads]
    if measure:
        return measure_comparison(changed, predict_options, run_options, jobs=jobs, progress=progress)
    if names := run_options.changed():
        raise WorkloadError(f"{', '.join(names)}: needs measure=True; a prediction is the same every time")
    return predict_comparison(changed, predict_options, jobs=jobs)


def predict_comparison(workloads: Sequence[Workload], options: PredictOptions, *, jobs: int = 1) -> Comparison:
    """Predict several workloads and return them side by side (see ``compare``)."""
    from trainatomy.runs.comparison import gather
    from trainatomy.runs.published import published

    predictions = _predict_rows(workloads, options.for_workloads(workloads), jobs)
    for each in predictions:
        if isinstance(each, TrainatomyError):
            raise each
    return gather(workloads, predictions, (), published(workloads))


def measure_comparison(
    workloads: Sequence[Workload],
    predict_options: PredictOptions,
    run_options: RunOptions,
    *,
    jobs: int = 1,
    progress: Callable[[Finished], None] | RunObserver | None = None,
) -> Comparison:
    """Predict several workloads, run them on this machine's GPU, and return both side by side (see ``compare``)."""
    from dataclasses import replace

    from trainatomy.catalog.calibrations import resolve_calibration
    from trainatomy.runs.comparison import prepare
    from trainatomy.runs.plan import observer_of

    options = replace(predict_options, calibration=resolve_calibration(predict_options.calibration))
    run = prepare(workloads, lambda planned: _predict_rows(planned, options, jobs), run_options)
    return run.run(observer_of(progress))


def _predict_rows(
    workloads: Sequence[Workload], options: PredictOptions, jobs: int
) -> Sequence[Prediction | TrainatomyError]:
    from trainatomy.runs.predicting import jobs_for, predict_rows

    return predict_rows(partial(_predict_row, options), workloads, jobs_for(len(workloads), jobs))


def _predict_row(options: PredictOptions, workload: Workload) -> Prediction:
    return predict(workload, **options.keywords(workload))


def fit(
    what: Workload | nn.Module,
    *,
    effective_batch_size: int | None = None,
    gpu: str | None = None,
    allow: Sequence[Permission] = (),
    headroom: float = 0.05,
    keep: Sequence[str] = (),
    maximize: Goal = "throughput",
    measure: int = 0,
    exhaustive: bool = False,
    can_apply: CanApply | None = None,
    prices: bool = True,
    batch: Batch | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    calibration: Calibration | Path | str | None = None,
    trust_remote_code: bool = False,
    jobs: int = 1,
    progress: Observer | None = None,
    **settings: Any,
) -> Fit:
    """Find, without a GPU, the settings that fit a GPU and train fastest.

    The effective batch size (samples per optimizer step), the model, the optimizer and the length of sequences stay as
    they are; ``allow`` lists what may change.  After Ctrl-C the outcome is the best so far.

    Args:
        what: A workload, or a live module, which is neither changed nor moved.
        effective_batch_size: Samples per optimizer step; by default those of the workload.
        gpu: The GPU.
        allow: Changes of what is trained that the search may make: "precision", "optimizer", "lora", "sequence-length".
        headroom: Share of the GPU's memory that must stay free.
        keep: Settings that the search may not vary, such as "gradient_checkpointing" or "attention"
            (``trainatomy.search.axes`` lists them).
        maximize: "throughput", or "batch", "sequence-length", "model-size": the largest one that fits.
        measure: Run so many of the best candidates on this machine's GPU, which is then the default of ``gpu``.
        exhaustive: Execute every candidate instead of leaving out those that cannot win.
        can_apply: A function that gets the settings of an option, keys of the workload with their values, and returns
            whether the caller can apply them; other options are left out.
        prices: Execute the single changes of the best settings too, for what each costs or saves.
        batch: For a module: see ``predict``.  A mapping is repeated or cut to other batch sizes.
        optimizer: See ``predict``.
        calibration: See ``predict``.
        trust_remote_code: See ``predict``.
        jobs: Processes that predict in parallel, for a workload.  A script that asks for several must start its own
            work behind ``if __name__ == "__main__"``.
        progress: Receives the progress.
        **settings: Settings as in ``predict``.

    Raises:
        WorkloadError: The description is wrong, or it contradicts the GPU or the other arguments.
        TrainatomyError: The errors of ``predict`` and, with ``measure``, of ``compare``.
    """
    from trainatomy.search.fitting import SearchOptions
    from trainatomy.search.run import run

    if not isinstance(what, Workload):
        _check_request_for_module(maximize, measure)
    gpu = gpu or (this_gpu() if measure else None)
    with _searched(what, batch, optimizer, gpu, settings, calibration, trust_remote_code, jobs) as (workload, pool):
        can_apply = _can_apply(what, batch, allow, can_apply)
        options = SearchOptions(
            effective_batch_size, headroom, tuple(allow), tuple(keep), exhaustive, prices, can_apply
        )
        found = run(workload, maximize, options, pool, progress)
    return measure_fit(found, measure, PredictOptions(calibration=calibration), RunOptions()) if measure else found


def fit_gpus(
    what: Workload | nn.Module,
    gpus: Sequence[str] | None = None,
    *,
    costs_per_hour: Mapping[str, float] | None = None,
    effective_batch_size: int | None = None,
    allow: Sequence[Permission] = (),
    headroom: float = 0.05,
    keep: Sequence[str] = (),
    batch: Batch | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    calibration: Calibration | Path | str | None = None,
    trust_remote_code: bool = False,
    jobs: int = 1,
    progress: Observer | None = None,
    **settings: Any,
) -> FitAcross:
    """Find, without a GPU, which GPUs can run a training, how fast with the best settings there, and at what cost.

    Args:
        what: See ``fit``.
        gpus: Names of GPUs; all known ones by default.
        costs_per_hour: Prices per hour by the GPU's name, in any currency.
        effective_batch_size: See ``fit``, as for the arguments below.
        allow: See ``fit``.
        headroom: See ``fit``.
        keep: See ``fit``.
        batch: See ``fit``.
        optimizer: See ``fit``.
        calibration: See ``fit``.
        trust_remote_code: See ``fit``.
        jobs: See ``fit``.
        progress: See ``fit``.
        **settings: See ``fit``.

    Raises:
        TrainatomyError: The errors of ``fit``.
    """
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.catalog.gpus import gpus as all_gpus
    from trainatomy.search.across import search_across
    from trainatomy.search.explore import Observer
    from trainatomy.search.fitting import SearchOptions

    chosen = all_gpus() if gpus is None else tuple(dict.fromkeys(map(find_gpu, gpus)))
    costs = {find_gpu(name).id: cost for name, cost in (costs_per_hour or {}).items()}
    with _searched(what, batch, optimizer, None, settings, calibration, trust_remote_code, jobs) as (workload, pool):
        can_apply = _can_apply(what, batch, allow)
        options = SearchOptions(effective_batch_size, headroom, tuple(allow), tuple(keep), can_apply=can_apply)
        return search_across(workload, chosen, options, pool, progress or Observer(), costs)


def why_out_of_memory(
    what: Workload | nn.Module,
    *,
    gpu: str | None = None,
    headroom: float = 0.05,
    keep: Sequence[str] = (),
    batch: Batch | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    calibration: Calibration | Path | str | None = None,
    trust_remote_code: bool = False,
    jobs: int = 1,
    progress: Observer | None = None,
    **settings: Any,
) -> Shortage:
    """Say what a training needs that does not fit, and list what would make it fit, each change with its effect.

    Args:
        what: See ``fit``, as for the arguments below.
        gpu: See ``fit``.
        headroom: See ``fit``.
        keep: See ``fit``.
        batch: See ``fit``.
        optimizer: See ``fit``.
        calibration: See ``fit``.
        trust_remote_code: See ``fit``.
        jobs: See ``fit``.
        progress: See ``fit``.
        **settings: See ``fit``.

    Raises:
        TrainatomyError: The errors of ``fit``.
    """
    from trainatomy.search.fitting import SearchOptions
    from trainatomy.search.remedies import shortage_of

    with _searched(what, batch, optimizer, gpu, settings, calibration, trust_remote_code, jobs) as (workload, pool):
        options = SearchOptions(headroom=headroom, keep=tuple(keep), can_apply=_can_apply(what, batch, ()))
        return shortage_of(workload, options, pool, progress)


@contextmanager
def _searched(
    what: Workload | nn.Module,
    batch: Batch | None,
    optimizer: str | type[torch.optim.Optimizer] | None,
    gpu: str | None,
    settings: Mapping[str, Any],
    calibration: Calibration | Path | str | None,
    trust_remote_code: bool,
    jobs: int,
) -> Iterator[tuple[Workload, PredictionPool]]:
    """Yield the workload to vary, and processes that predict it; a live module is predicted in this process."""
    from trainatomy.runs.predicting import PredictionPool, prediction_pool

    options = PredictOptions(trust_remote_code=trust_remote_code, calibration=calibration)
    if isinstance(what, Workload):
        workload = _with_settings(what, {**settings, **({"optimizer": optimizer} if optimizer else {})}, gpu)
        if batch is not None:
            raise WorkloadError("batch: only a module takes one; name data.factory in the workload", key="data")
        with prediction_pool(partial(_predict_row, options.for_workloads([workload])), jobs) as pool:
            yield workload, pool
        return
    from trainatomy.simulator.live import described, resized

    make = resized(batch) if isinstance(batch, Mapping) else batch
    workload, make_batch = described(what, make, optimizer, gpu, settings)
    if isinstance(batch, Mapping) and "per_device_train_batch_size" not in settings:
        rows = next(len(value) for value in batch.values() if getattr(value, "ndim", 0))
        workload = workload.replace("train.per_device_train_batch_size", rows)
    options = options.for_workloads([workload])
    yield workload, PredictionPool(partial(_predict_module, what, make_batch, options), None, 1)


def _check_request_for_module(maximize: Goal, measure: int) -> None:
    """Raise ``WorkloadError`` for what needs the configuration of a model, which a live module's workload lacks."""
    if measure:
        raise WorkloadError(
            "measure: candidates run in fresh processes, which cannot be handed a module; give a workload whose "
            "model.factory builds it"
        )
    if maximize in ("sequence-length", "model-size"):
        raise WorkloadError(f"maximize: {maximize} needs the configuration of the model; give a workload")


def _can_apply(
    what: Workload | nn.Module, batch: Batch | None, allow: Sequence[Permission], can_apply: CanApply | None = None
) -> CanApply | None:
    """Return which settings a search may try: those that apply to a live module, and that the caller can apply."""
    if isinstance(what, Workload):
        return can_apply
    from trainatomy.simulator.live import applies_to, check_permissions

    check_permissions(allow, batch)
    to_module = applies_to(what, batch)
    return to_module if can_apply is None else lambda settings: to_module(settings) and can_apply(settings)


def _predict_module(
    module: nn.Module, make_batch: MakeBatch | None, options: PredictOptions, workload: Workload
) -> Prediction:
    started = time.perf_counter()
    return _assemble(workload, _simulate_module(module, workload, make_batch, options), options, started)


def this_gpu() -> str:
    """Return the id of this machine's GPU."""
    from trainatomy.runs.machine import this_machine

    found = this_machine().resolve_gpu()
    if found is None:
        raise WorkloadError("gpu: this machine's GPU is not a known one; name the one to search for", key="gpu")
    return found.id


def measure_fit(
    found: Fit,
    count: int,
    predict_options: PredictOptions,
    run_options: RunOptions,
    *,
    progress: Callable[[Finished], None] | RunObserver | None = None,
) -> Fit:
    """Run the best candidates of a search on this machine's GPU, and return the outcome with their measurements.

    Args:
        found: The outcome of a search.
        count: How many candidates to run: the best one and the next best ones (``Fit.runner_ups``).
        predict_options: How to predict.
        run_options: How to run.
        progress: See ``compare``.

    Raises:
        TrainatomyError: The errors of ``compare``.
    """
    from dataclasses import replace

    if found.best is None:
        return found
    candidates = (found.best, *found.runner_ups)[:count]
    workloads = [Workload.from_mapping({**each.workload, "name": each.name}) for each in candidates]
    options = replace(run_options, keep_gpus=True, title=run_options.title or "fit")
    return replace(found, measured=measure_comparison(workloads, predict_options, options, progress=progress))


def measure(
    workload: Workload,
    *,
    components: bool = True,
    steps: int | None = None,
    trace: Path | str | None = None,
    time_limit: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    **settings: Any,
) -> Measurement:
    """Measure a training step on this machine's GPU, in fresh processes: one run is timed, one is recorded.

    Running out of memory is a result, not an error.

    Args:
        workload: The training.
        components: Make the recorded run, which attributes memory to components.
        steps: Optimizer steps, if the workload does not name a number.
        trace: File for the allocation trace of the recorded run.
        time_limit: Seconds for everything.
        progress: Called while the runs go on.
        **settings: Settings that override those of the workload, as in ``predict``.

    Raises:
        DeviceError: There is no GPU, or the process that used it failed.
        TrainatomyError: Errors that the workload itself causes.
    """
    from trainatomy.measurement.measure import measure as run

    workload = _with_settings(workload, settings)
    return run(workload, components=components, steps=steps, trace=trace, time_limit=time_limit, progress=progress)


def measure_and_record(
    workload: Workload,
    predict_options: PredictOptions,
    run_options: RunOptions,
    *,
    components: bool = True,
    trace: Path | str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> MeasuredRun:
    """Predict a training, measure it on this machine's GPU, and record both.

    Args:
        workload: The training; predicted for this machine's GPU unless ``run_options.keep_gpus``.
        predict_options: How to predict.
        run_options: How to run and where to keep the record.
        components: See ``measure``.
        trace: See ``measure``.
        progress: See ``measure``.

    Raises:
        TrainatomyError: The errors of ``measure``, or the record's folder cannot be written.
    """
    from trainatomy.runs.single import measure_and_record as run

    return run(
        workload,
        partial(_predict_row, predict_options),
        lambda described: measure(
            described, components=components, trace=trace, time_limit=run_options.time_limit, progress=progress
        ),
        run_options,
        components=components,
    )


def ops(
    workload: Workload,
    *,
    top: int = 15,
    measured: bool = False,
    calibration: Calibration | Path | str | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> OperationBreakdown:
    """Break one step down into its operations: FLOP, bytes, time and memory by group and phase.

    Args:
        workload: The training.
        top: How many of the heaviest operations and modules to list.
        measured: Add a profile of this machine's GPU.
        calibration: See ``predict``.
        trust_remote_code: See ``predict``.
        **settings: Settings that override those of the workload, as in ``predict``.

    Raises:
        TrainatomyError: The errors of ``predict``, and ``DeviceError`` if there is no GPU to profile on.
    """
    from trainatomy.analysis.operations import analyze_operations, bytes_by_group
    from trainatomy.analysis.published_layer import SCOPE, published_notes, published_shares
    from trainatomy.prediction import context_bytes
    from trainatomy.simulator.simulate import simulate
    from trainatomy.timing.cost_model import cost_model_of, tensor_cores_for_fp32
    from trainatomy.workload.encoder_layer import is_encoder_layer

    workload = _with_settings(workload, settings)
    gpu, loaded = workload.resolve_gpu(), load_calibration(calibration, [workload])
    if measured:
        from trainatomy.measurement.device.visible import require_gpu

        require_gpu()
    simulation = simulate(workload, gpu, trust_remote_code=trust_remote_code)
    trace, operations = simulation.trace, simulation.operations
    allocator = AllocatorSettings.parse(workload.allocator, simulation.torch_version)
    memory = analyze_memory(trace, allocator, gpu.memory_bytes, context_bytes(workload, simulation))
    cost_model = cost_model_of(gpu, loaded, tf32=tensor_cores_for_fp32(workload.train.tf32, simulation.torch_version))
    predicted = _predict_times(operations, cost_model)
    source = f"predicted times are based on: {cost_model.source}"
    published = is_encoder_layer(workload)
    return analyze_operations(
        workload.display_name,
        workload.to_mapping(),
        gpu,
        operations,
        peak=bytes_by_group(trace, memory.held_at_peak, memory.sizes),
        predicted=predicted,
        profile=_profile(workload, operations) if measured else None,
        scope=SCOPE if published else None,
        tf32=bool(workload.train.tf32),
        top=top,
        published=published_shares() if published else None,
        notes=(*(published_notes(operations, predicted.times) if published else ()), source),
    )


def _profile(workload: Workload, operations: Operations) -> Any:
    """Profile a step on this machine's GPU, and join it with the predicted operations."""
    from trainatomy.measurement.profiler.join import join
    from trainatomy.measurement.profiler.profile import profile

    return join(operations, profile(workload))


def _predict_times(operations: Operations, cost_model: CostModel) -> PredictedTimes:
    """Return the GPU seconds of each operation."""
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
    """Measure what the timing model needs on this machine's GPU.

    Args:
        output: File to write the calibration to, as JSON.
        time_limit: Seconds; measurements that do not fit are left out.

    Raises:
        DeviceError: There is no GPU.
        WorkloadError: ``output`` cannot be written; checked before anything is measured.
    """
    from trainatomy.catalog.calibrations import parse
    from trainatomy.measurement.calibration.calibrate import calibrate as run
    from trainatomy.measurement.calibration.calibrate import write
    from trainatomy.measurement.measure import writable

    target = None if output is None else writable(Path(output), "--output")
    content = run(time_limit=time_limit)
    if target is not None:
        write(content, target)
    return parse(json.dumps(content), str(output or "this machine"))
