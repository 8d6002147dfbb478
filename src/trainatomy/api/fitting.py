"""Find the settings that fit: the library's functions with their keywords.

Search for the settings of a training, given as a workload or as a live module, by one value that says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trainatomy import api
from trainatomy.api.comparing import measure_comparison
from trainatomy.api.elsewhere import predict_candidate, predict_row, with_settings
from trainatomy.api.verb import verb
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.gpus import gpus as all_gpus
from trainatomy.errors import WorkloadError
from trainatomy.measurement.process.pool import Processes
from trainatomy.requests.comparing import CompareRequest
from trainatomy.requests.fitting import FitRequest
from trainatomy.requests.predicting import Batch, Training
from trainatomy.results.fit import Fit, FitAcross, Shortage
from trainatomy.results.prediction import Prediction
from trainatomy.runs.plan import Finished, RunObserver
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
        yield api.module_candidates(training.what, training, request)


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


@verb(FitRequest, without=("translated",))
def fit(
    what: Workload | nn.Module,
    *,
    gpu: str | None = None,
    batch: Batch | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    request: FitRequest,
    progress: Observer | None = None,
    **settings: Any,
) -> Fit:
    """Find, without a GPU, the settings that fit a GPU and train fastest.

    The effective batch size (samples per optimizer step), the model, the optimizer and the length of sequences stay as
    they are; ``allow`` lists what may change.  After Ctrl-C the outcome is the best so far.

    Args:
        what: A workload, or a live module, which is neither changed nor moved.
        gpu: The GPU; with ``measure``, this machine's by default.
        batch: For a module: see ``predict``.  A mapping is repeated or cut to other batch sizes.
        optimizer: See ``predict``.
        request: How to search.
        progress: Receives the progress.
        **settings: Settings as in ``predict``.

    Raises:
        WorkloadError: The description is wrong, or it contradicts the GPU or the other arguments.
        TrainatomyError: The errors of ``predict`` and, with ``measure``, of ``compare``.
    """
    if request.measure and not isinstance(what, Workload):
        raise WorkloadError(
            "measure: candidates run in fresh processes, which cannot be handed a module; give a workload whose "
            "model.factory builds it"
        )
    if request.measure and not gpu:
        gpu = api.this_gpu()
    found = search_settings(Training(what, batch, optimizer, gpu, settings), request, progress)
    if not request.measure:
        return found
    runs = CompareRequest(calibration=request.calibration, trust_remote_code=request.trust_remote_code)
    return measure_fit(found, request.measure, runs)


@verb(FitRequest, without=("maximize", "measure", "try_compile", "translated"))
def fit_gpus(
    what: Workload | nn.Module,
    gpus: Sequence[str] | None = None,
    *,
    costs_per_hour: Mapping[str, float] | None = None,
    batch: Batch | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    request: FitRequest,
    progress: Observer | None = None,
    **settings: Any,
) -> FitAcross:
    """Find, without a GPU, which GPUs can run a training, how fast with the best settings there, and at what cost.

    Args:
        what: See ``fit``.
        gpus: Names of GPUs; all known ones by default.
        costs_per_hour: Prices per hour by the GPU's name, in any currency.
        batch: See ``fit``.
        optimizer: See ``fit``.
        request: How to search.
        progress: See ``fit``.
        **settings: See ``fit``.

    Raises:
        TrainatomyError: The errors of ``fit``.
    """
    chosen = all_gpus() if gpus is None else tuple(dict.fromkeys(map(find_gpu, gpus)))
    costs = {find_gpu(name).id: cost for name, cost in (costs_per_hour or {}).items()}
    training = Training(what, batch, optimizer, None, settings)
    with _candidates(training, request, [each.id for each in chosen]) as (workload, restricted, pool):
        return search_across(workload, chosen, restricted, pool, progress or Observer(), costs)


@verb(
    FitRequest,
    without="effective_batch_size allow maximize measure exhaustive try_compile prices translated".split(),
)
def why_out_of_memory(
    what: Workload | nn.Module,
    *,
    gpu: str | None = None,
    prediction: Prediction | None = None,
    batch: Batch | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    request: FitRequest,
    progress: Observer | None = None,
    **settings: Any,
) -> Shortage:
    """Say what a training needs that does not fit, and list what would make it fit, each change with its effect.

    Args:
        what: See ``fit``.
        gpu: See ``fit``.
        prediction: The prediction of the training with its time and timeline, if there is one: it is not made again.
        batch: See ``fit``.
        optimizer: See ``fit``.
        request: How to search.
        progress: See ``fit``.
        **settings: See ``fit``.

    Raises:
        TrainatomyError: The errors of ``fit``.
    """
    with _candidates(Training(what, batch, optimizer, gpu, settings), request) as (workload, restricted, pool):
        return shortage_of(workload, restricted, pool, progress, prediction)


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
