"""Search for the settings of a training, given as a workload or as a live module, by one value that says how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trainatomy.api.keywords import Batch, with_settings
from trainatomy.api.predicting import predict_candidate, predict_module, predict_row
from trainatomy.errors import WorkloadError
from trainatomy.runs.options import PredictOptions
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainatomy.results.fit import Fit, FitAcross, Goal, Shortage
    from trainatomy.results.prediction import Prediction
    from trainatomy.runs.predicting import PredictionPool
    from trainatomy.search.execution import Observer
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
    from trainatomy.search.lengths import with_all_lengths
    from trainatomy.search.run import run

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
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.catalog.gpus import gpus as all_gpus
    from trainatomy.search.across import search_across
    from trainatomy.search.execution import Observer

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
