"""Find the settings that fit: the library's functions with their keywords.

Search for the settings of a training, given as a workload or as a live module, by one value that says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.api.comparing import measure_comparison
from trainatomy.api.elsewhere import predict_candidate, predict_row, with_settings
from trainatomy.catalog.calibrations import resolve_calibration
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.gpus import gpus as all_gpus
from trainatomy.errors import WorkloadError
from trainatomy.requests.comparing import CompareRequest
from trainatomy.requests.fitting import CanApply, FitRequest
from trainatomy.requests.predicting import Batch, Training
from trainatomy.runs.predicting import PredictionPool, prediction_pool
from trainatomy.search.across import search_across
from trainatomy.search.explore import Observer
from trainatomy.search.remedies import shortage_of
from trainatomy.search.run import could_compile, run, with_all_lengths, with_compiled
from trainatomy.workload.dialects.answer import settings_in
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.measurement.process.pool import Processes
    from trainatomy.results.fit import Fit, FitAcross, Goal, Permission, Shortage
    from trainatomy.results.prediction import Prediction
    from trainatomy.runs.plan import Finished, RunObserver


def search_settings(training: Training, request: FitRequest, observer: Observer | None = None) -> Fit:
    """Search for the settings that fit a GPU and train fastest, or for the largest size (see ``fit``)."""
    goal, what = request.maximize, training.what
    is_of_model = goal in ("sequence-length", "model-size") or goal.startswith(("model.", "data."))
    if not isinstance(what, Workload) and is_of_model:
        raise WorkloadError(f"maximize: {goal} needs the configuration of the model; give a workload")
    if request.try_compile and (goal != "throughput" or not isinstance(what, Workload)):
        raise WorkloadError("try_compile: needs a workload, whose throughput is searched for")
    with _candidates(training, request) as (workload, restricted, pool):
        found = run(workload, goal, restricted, pool, observer)
        if request.try_compile and not found.interrupted:
            found = with_compiled(found, restricted, pool, observer)
        elif isinstance(what, Workload) and could_compile(found, restricted):
            found = replace(found, notes=(*found.notes, "not_compiled"))
    if not workload.data.varies or not isinstance(what, Workload) or found.interrupted:
        return found
    return with_all_lengths(found, partial(predict_row, request.predicting))


def search_gpus(
    training: Training,
    request: FitRequest,
    gpus: Sequence[str] | None = None,
    costs_per_hour: Mapping[str, float] | None = None,
    observer: Observer | None = None,
) -> FitAcross:
    """Search for the best settings on each of several GPUs (see ``fit_gpus``)."""
    chosen = all_gpus() if gpus is None else tuple(dict.fromkeys(map(find_gpu, gpus)))
    costs = {find_gpu(name).id: cost for name, cost in (costs_per_hour or {}).items()}
    with _candidates(training, request, [each.id for each in chosen]) as (workload, restricted, pool):
        return search_across(workload, chosen, restricted, pool, observer or Observer(), costs)


def search_remedies(
    training: Training, request: FitRequest, observer: Observer | None = None, prediction: Prediction | None = None
) -> Shortage:
    """Search for what would make a training fit (see ``why_out_of_memory``)."""
    with _candidates(training, request) as (workload, restricted, pool):
        return shortage_of(workload, restricted, pool, observer, prediction)


@contextmanager
def _candidates(
    training: Training, request: FitRequest, gpus: Sequence[str] = ()
) -> Iterator[tuple[Workload, FitRequest, PredictionPool]]:
    """Yield the workload to vary, the request restricted to what applies to it, and what predicts the candidates."""
    if isinstance(training.what, Workload):
        with _of_workload(training.what, training, request, gpus) as (workload, pool):
            if workload.origin is not None:
                request = replace(request, translated=partial(settings_in, workload.origin))
            yield workload, request, pool
    else:
        workload, pool = _of_module(training.what, training, request)
        yield workload, _request_for_module(training.what, training, request), pool


@contextmanager
def _of_workload(
    what: Workload, training: Training, request: FitRequest, gpus: Sequence[str]
) -> Iterator[tuple[Workload, PredictionPool]]:
    """Yield a workload with the keywords applied, and processes that predict it on these GPUs."""
    optimizer = {"optimizer": training.optimizer} if training.optimizer else {}
    workload = with_settings(what, {**training.settings, **optimizer}, training.gpu)
    if training.batch is not None:
        raise WorkloadError("batch: only a module takes one; name data.factory in the workload", key="data")
    request.predicting.check_calibration([workload])
    with prediction_pool(
        partial(predict_candidate, partial(predict_row, request.predicting_candidates)),
        request.jobs,
        request.executor,
        gpus,
    ) as pool:
        yield workload, pool


def _of_module(module: nn.Module, training: Training, request: FitRequest) -> tuple[Workload, PredictionPool]:
    """Return the workload of a live module, which is predicted in this process."""
    from trainatomy.api.predicting import predict_module
    from trainatomy.simulator import live

    if request.executor is not None:
        raise WorkloadError(
            "executor: a live module is predicted in this process; give a workload, which workers can build"
        )
    batch, settings = training.batch, training.settings
    make = live.resized(batch) if isinstance(batch, Mapping) else batch
    workload, make_batch = live.described(module, make, training.optimizer, training.gpu, settings)
    if isinstance(batch, Mapping) and "per_device_train_batch_size" not in settings:
        rows = next(len(value) for value in batch.values() if getattr(value, "ndim", 0))
        workload = workload.replace("train.per_device_train_batch_size", rows)
    request.predicting.check_calibration([workload])
    return workload, PredictionPool(
        partial(predict_candidate, partial(predict_module, module, make_batch, request.predicting_candidates)), None, 1
    )


def _request_for_module(module: nn.Module, training: Training, request: FitRequest) -> FitRequest:
    """Return a search restricted to the settings that apply to a live module."""
    from trainatomy.simulator import live

    live.check_permissions(request.allow, training.batch)
    to_module, can_apply = live.applies_to(module, training.batch), request.can_apply
    if can_apply is None:
        return replace(request, can_apply=to_module)
    return replace(request, can_apply=lambda settings: to_module(settings) and can_apply(settings))


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
    try_compile: bool = False,
    can_apply: CanApply | None = None,
    prices: bool = True,
    batch: Batch | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    calibration: Calibration | Path | str | None = None,
    trust_remote_code: bool = False,
    jobs: int | None = None,
    executor: object = None,
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
        allow: Changes of what is trained that the search may make: "precision", "optimizer", "lora",
            "quantization", "sequence-length", "evaluation".
        headroom: Share of the GPU's memory that must stay free.
        keep: Settings that the search may not vary, such as "gradient_checkpointing" or "attention"
            (``trainatomy.search.axes`` lists them).
        maximize: "throughput", or "batch", "sequence-length", "model-size", or a key of the workload with a whole
            number ("data.image_size", "data.image_size:14" in steps): the largest one that fits.
        measure: Run this many of the best candidates on this machine's GPU, which is then the default of ``gpu``.
        exhaustive: Execute every candidate instead of leaving out those that cannot win.
        try_compile: Predict the best settings with ``torch.compile`` too, whole and layer by layer.
        can_apply: A function that gets the settings of an option, keys of the workload with their values, and returns
            whether the caller can apply them; other options are left out.
        prices: Execute the single changes of the best settings too, for what each costs or saves.
        batch: For a module: see ``predict``.  A mapping is repeated or cut to other batch sizes.
        optimizer: See ``predict``.
        calibration: See ``predict``.
        trust_remote_code: See ``predict``.
        jobs: Processes that predict in parallel, for a workload: by default this one or, with ``executor``, all that it
            has.  A script that asks for several must start its own work behind ``if __name__ == "__main__"``.
        executor: For a workload: where to predict in place of local processes (see ``compare``).
        progress: Receives the progress.
        **settings: Settings as in ``predict``.

    Raises:
        WorkloadError: The description is wrong, or it contradicts the GPU or the other arguments.
        TrainatomyError: The errors of ``predict`` and, with ``measure``, of ``compare``.
    """
    if measure and not isinstance(what, Workload):
        raise WorkloadError(
            "measure: candidates run in fresh processes, which cannot be handed a module; give a workload whose "
            "model.factory builds it"
        )
    if measure and not gpu:
        from trainatomy.api.measuring import this_gpu

        gpu = this_gpu()
    request = FitRequest(
        effective_batch_size=effective_batch_size,
        headroom=headroom,
        allow=tuple(allow),
        keep=tuple(keep),
        exhaustive=exhaustive,
        try_compile=try_compile,
        prices=prices,
        can_apply=can_apply,
        maximize=maximize,
        jobs=jobs,
        executor=executor,
        calibration=resolve_calibration(calibration),
        trust_remote_code=trust_remote_code,
    )
    found = search_settings(Training(what, batch, optimizer, gpu, settings), request, progress)
    if not measure:
        return found
    runs = CompareRequest(calibration=request.calibration, trust_remote_code=trust_remote_code)
    return measure_fit(found, measure, runs)


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
    jobs: int | None = None,
    executor: object = None,
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
        executor: See ``fit``.
        progress: See ``fit``.
        **settings: See ``fit``.

    Raises:
        TrainatomyError: The errors of ``fit``.
    """
    request = FitRequest(
        effective_batch_size=effective_batch_size,
        headroom=headroom,
        allow=tuple(allow),
        keep=tuple(keep),
        jobs=jobs,
        executor=executor,
        calibration=resolve_calibration(calibration),
        trust_remote_code=trust_remote_code,
    )
    training = Training(what, batch, optimizer, None, settings)
    return search_gpus(training, request, gpus, costs_per_hour, progress)


def why_out_of_memory(
    what: Workload | nn.Module,
    *,
    gpu: str | None = None,
    headroom: float = 0.05,
    keep: Sequence[str] = (),
    prediction: Prediction | None = None,
    batch: Batch | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    calibration: Calibration | Path | str | None = None,
    trust_remote_code: bool = False,
    jobs: int | None = None,
    executor: object = None,
    progress: Observer | None = None,
    **settings: Any,
) -> Shortage:
    """Say what a training needs that does not fit, and list what would make it fit, each change with its effect.

    Args:
        what: See ``fit``, as for the arguments below.
        gpu: See ``fit``.
        headroom: See ``fit``.
        keep: See ``fit``.
        prediction: The prediction of the training with its time and timeline, if there is one: it is not made again.
        batch: See ``fit``.
        optimizer: See ``fit``.
        calibration: See ``fit``.
        trust_remote_code: See ``fit``.
        jobs: See ``fit``.
        executor: See ``fit``.
        progress: See ``fit``.
        **settings: See ``fit``.

    Raises:
        TrainatomyError: The errors of ``fit``.
    """
    request = FitRequest(
        headroom=headroom,
        keep=tuple(keep),
        jobs=jobs,
        executor=executor,
        calibration=resolve_calibration(calibration),
        trust_remote_code=trust_remote_code,
    )
    return search_remedies(Training(what, batch, optimizer, gpu, settings), request, progress, prediction)


def measure_fit(
    found: Fit,
    count: int,
    request: CompareRequest,
    progress: Callable[[Finished], None] | RunObserver | None = None,
    processes: Processes | None = None,
) -> Fit:
    """Run the best candidates of a search on this machine's GPU, and return the outcome with their measurements.

    Args:
        found: The outcome of a search.
        count: How many candidates to run: the best one and the next best ones (``Fit.runner_ups``).
        request: How to run and to predict them.
        progress: See ``compare``.
        processes: Where to run (default: processes that are started and ended here).

    Raises:
        TrainatomyError: The errors of ``compare``.
    """
    if found.best is None:
        return found
    candidates = (found.best, *found.runner_ups)[:count]
    workloads = [Workload.from_mapping({**each.workload, "name": each.name}) for each in candidates]
    runs = replace(request, keep_gpus=True)
    return replace(found, measured=measure_comparison(workloads, runs, progress, processes))
