"""Find the settings that fit: the library's functions with their keywords.

Search for the settings of a training, given as a workload or as a live module, by one value that says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.api.comparing import measure_comparison
from trainatomy.api.measuring import this_gpu
from trainatomy.api.predicting import Batch, predict_candidate, predict_module, predict_row, with_settings
from trainatomy.catalog.calibrations import resolve_calibration
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.gpus import gpus as all_gpus
from trainatomy.errors import WorkloadError
from trainatomy.runs.options import PredictOptions, RunOptions
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.measurement.process.pool import Processes
    from trainatomy.results.fit import Fit, FitAcross, Goal, Permission, Shortage
    from trainatomy.results.prediction import Prediction
    from trainatomy.runs.plan import Finished, RunObserver
    from trainatomy.runs.predicting import PredictionPool
    from trainatomy.search.axes import CanApply
    from trainatomy.search.explore import Observer
    from trainatomy.search.options import SearchOptions


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """A training whose settings are searched for, and how.

    Attributes:
        what: A workload, or a live module.
        options: How to search.
        predict_options: How to predict the candidates.
        batch: Of a module: see ``predict``.
        optimizer: See ``predict``.
        gpu: The GPU, in place of the workload's own.
        settings: Settings by their name, in place of the workload's own.
        jobs: Processes that predict in parallel: by default this one or, with ``executor``, all that it has.
        executor: Where to predict in place of local processes (see ``compare``).
        observer: Receives the progress.
    """

    what: Workload | nn.Module
    options: SearchOptions
    predict_options: PredictOptions = field(default_factory=PredictOptions)
    batch: Batch | None = None
    optimizer: str | type[torch.optim.Optimizer] | None = None
    gpu: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    jobs: int | None = None
    observer: Observer | None = None
    executor: object = None


def search_settings(request: SearchRequest, goal: Goal = "throughput") -> Fit:
    """Search for the settings that fit a GPU and train fastest, or for the largest size (see ``fit``)."""
    from trainatomy.search.run import run, with_all_lengths

    if not isinstance(request.what, Workload) and goal in ("sequence-length", "model-size"):
        raise WorkloadError(f"maximize: {goal} needs the configuration of the model; give a workload")
    with _candidates(request) as (workload, options, pool):
        found = run(workload, goal, options, pool, request.observer)
    if not workload.data.varies or not isinstance(request.what, Workload) or found.interrupted:
        return found
    return with_all_lengths(found, partial(predict_row, request.predict_options))


def search_gpus(
    request: SearchRequest, gpus: Sequence[str] | None = None, costs_per_hour: Mapping[str, float] | None = None
) -> FitAcross:
    """Search for the best settings on each of several GPUs (see ``fit_gpus``)."""
    from trainatomy.search.across import search_across
    from trainatomy.search.explore import Observer

    chosen = all_gpus() if gpus is None else tuple(dict.fromkeys(map(find_gpu, gpus)))
    costs = {find_gpu(name).id: cost for name, cost in (costs_per_hour or {}).items()}
    with _candidates(request) as (workload, options, pool):
        return search_across(workload, chosen, options, pool, request.observer or Observer(), costs)


def search_remedies(request: SearchRequest, prediction: Prediction | None = None) -> Shortage:
    """Search for what would make a training fit (see ``why_out_of_memory``)."""
    from trainatomy.search.remedies import shortage_of

    with _candidates(request) as (workload, options, pool):
        return shortage_of(workload, options, pool, request.observer, prediction)


@contextmanager
def _candidates(request: SearchRequest) -> Iterator[tuple[Workload, SearchOptions, PredictionPool]]:
    """Yield the workload to vary, how it may vary, and what predicts the candidates."""
    if isinstance(request.what, Workload):
        with _of_workload(request.what, request) as (workload, pool):
            yield workload, request.options, pool
    else:
        workload, pool = _of_module(request.what, request)
        yield workload, _options_for_module(request.what, request), pool


@contextmanager
def _of_workload(what: Workload, request: SearchRequest) -> Iterator[tuple[Workload, PredictionPool]]:
    """Yield a workload with the keywords applied, and processes that predict it."""
    from trainatomy.runs.predicting import prediction_pool

    optimizer = {"optimizer": request.optimizer} if request.optimizer else {}
    workload = with_settings(what, {**request.settings, **optimizer}, request.gpu)
    if request.batch is not None:
        raise WorkloadError("batch: only a module takes one; name data.factory in the workload", key="data")
    request.predict_options.check([workload])
    options = replace(request.predict_options, layouts=False, timeline=True)
    with prediction_pool(
        partial(predict_candidate, partial(predict_row, options)), request.jobs, request.executor
    ) as pool:
        yield workload, pool


def _of_module(module: nn.Module, request: SearchRequest) -> tuple[Workload, PredictionPool]:
    """Return the workload of a live module, which is predicted in this process."""
    from trainatomy.runs.predicting import PredictionPool
    from trainatomy.simulator.live import described, resized

    if request.executor is not None:
        raise WorkloadError(
            "executor: a live module is predicted in this process; give a workload, which workers can build"
        )
    batch, settings = request.batch, request.settings
    make = resized(batch) if isinstance(batch, Mapping) else batch
    workload, make_batch = described(module, make, request.optimizer, request.gpu, settings)
    if isinstance(batch, Mapping) and "per_device_train_batch_size" not in settings:
        rows = next(len(value) for value in batch.values() if getattr(value, "ndim", 0))
        workload = workload.replace("train.per_device_train_batch_size", rows)
    request.predict_options.check([workload])
    options = replace(request.predict_options, layouts=False, timeline=True)
    return workload, PredictionPool(
        partial(predict_candidate, partial(predict_module, module, make_batch, options)), None, 1
    )


def _options_for_module(module: nn.Module, request: SearchRequest) -> SearchOptions:
    """Return the options of a search restricted to the settings that apply to a live module."""
    from trainatomy.simulator.live import applies_to, check_permissions

    check_permissions(request.options.allow, request.batch)
    to_module, can_apply = applies_to(module, request.batch), request.options.can_apply
    if can_apply is None:
        return replace(request.options, can_apply=to_module)
    return replace(request.options, can_apply=lambda settings: to_module(settings) and can_apply(settings))


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
        maximize: "throughput", or "batch", "sequence-length", "model-size": the largest one that fits.
        measure: Run this many of the best candidates on this machine's GPU, which is then the default of ``gpu``.
        exhaustive: Execute every candidate instead of leaving out those that cannot win.
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
    from trainatomy.search.options import SearchOptions

    if measure and not isinstance(what, Workload):
        raise WorkloadError(
            "measure: candidates run in fresh processes, which cannot be handed a module; give a workload whose "
            "model.factory builds it"
        )
    gpu = gpu or (this_gpu() if measure else None)
    predict_options = PredictOptions(trust_remote_code=trust_remote_code, calibration=resolve_calibration(calibration))
    options = SearchOptions(effective_batch_size, headroom, tuple(allow), tuple(keep), exhaustive, prices, can_apply)
    request = SearchRequest(what, options, predict_options, batch, optimizer, gpu, settings, jobs, progress, executor)
    found = search_settings(request, maximize)
    return measure_fit(found, measure, predict_options, RunOptions()) if measure else found


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
    from trainatomy.search.options import SearchOptions

    predict_options = PredictOptions(trust_remote_code=trust_remote_code, calibration=resolve_calibration(calibration))
    options = SearchOptions(effective_batch_size, headroom, tuple(allow), tuple(keep))
    request = SearchRequest(what, options, predict_options, batch, optimizer, None, settings, jobs, progress, executor)
    return search_gpus(request, gpus, costs_per_hour)


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
    from trainatomy.search.options import SearchOptions

    predict_options = PredictOptions(trust_remote_code=trust_remote_code, calibration=resolve_calibration(calibration))
    options = SearchOptions(headroom=headroom, keep=tuple(keep))
    request = SearchRequest(what, options, predict_options, batch, optimizer, gpu, settings, jobs, progress, executor)
    return search_remedies(request, prediction)


def measure_fit(
    found: Fit,
    count: int,
    predict_options: PredictOptions,
    run_options: RunOptions,
    *,
    progress: Callable[[Finished], None] | RunObserver | None = None,
    processes: Processes | None = None,
) -> Fit:
    """Run the best candidates of a search on this machine's GPU, and return the outcome with their measurements.

    Args:
        found: The outcome of a search.
        count: How many candidates to run: the best one and the next best ones (``Fit.runner_ups``).
        predict_options: How to predict.
        run_options: How to run.
        progress: See ``compare``.
        processes: Where to run (default: processes that are started and ended here).

    Raises:
        TrainatomyError: The errors of ``compare``.
    """
    if found.best is None:
        return found
    candidates = (found.best, *found.runner_ups)[:count]
    workloads = [Workload.from_mapping({**each.workload, "name": each.name}) for each in candidates]
    options = replace(run_options, keep_gpus=True, title=run_options.title or "fit")
    measured = measure_comparison(workloads, predict_options, options, progress=progress, processes=processes)
    return replace(found, measured=measured)
