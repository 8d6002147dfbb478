"""Time the DataLoader of a training alone, and say which settings suffice for its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from trainatomy.api.elsewhere import with_settings
from trainatomy.api.predicting import predict_training
from trainatomy.api.verb import verb
from trainatomy.errors import FactoryError, WorkloadError
from trainatomy.measurement.loader import time_settings
from trainatomy.requests.measuring import LoaderRequest
from trainatomy.requests.predicting import PredictRequest, Training
from trainatomy.results.loader import LoaderReport, LoaderSettings, StepToFeed
from trainatomy.training import factory
from trainatomy.training.batch import build_dataset
from trainatomy.training.model import build_model
from trainatomy.workload.schema import Workload

BATCHES = 10_000
"""Batches of a synthetic dataset: more than are ever fetched."""


@verb(LoaderRequest)
def time_loader(
    what: Workload | Dataset[Any] | DataLoader[Any] | Callable[[], Any],
    *,
    workload: Workload | None = None,
    batch_size: int | None = None,
    request: LoaderRequest,
    progress: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> LoaderReport:
    """Time a DataLoader alone with several numbers of workers, and say which of them feed the step.

    Args:
        what: A workload, whose batches come from its ``data.factory`` or are drawn; or a dataset, a DataLoader, or a
            function without arguments that returns one.
        workload: The training of a dataset or DataLoader; its step is predicted.
        batch_size: Samples of a batch of a dataset (default: the workload's).
        request: How to time it.
        progress: Called with what is being done.
        **settings: Settings of the workload, as in ``predict``.

    Raises:
        WorkloadError: The workload is wrong, or the batch size is not known.
        FactoryError: The user's code raised, or returned something else.
    """
    if isinstance(what, Workload):
        what = workload = with_settings(what, settings)
        loader = _loader_of_workload(workload)
    else:
        if workload is not None:
            workload = with_settings(workload, settings)
        elif settings:
            raise WorkloadError(f"{', '.join(settings)}: settings of a workload, and none is given")
        loader = loader_of(what, batch_size or (workload.batch_size if workload else None))
    request.check()
    return time_settings(
        loader,
        [
            LoaderSettings(
                count,
                request.prefetch_factor if count else None,
                request.pin_memory,
                request.persistent_workers and count > 0,
            )
            for count in sorted(set(request.workers))
        ],
        _step_of(workload, request),
        name=workload.display_name if workload is not None else type(loader.dataset).__name__,
        seconds=request.seconds,
        random_samples=isinstance(what, Workload) and what.data.factory is None,
        progress=progress,
    )


def load_dataset(path: str) -> Any:
    """Return what ``--dataset`` names, ``FILE.py:FUNCTION``."""
    return factory.load(path, "--dataset")


def _loader_of_workload(workload: Workload) -> DataLoader[Any]:
    """Return the loader of a workload's batches, as its training loop makes it."""
    with torch.device("meta"):
        model = build_model(workload)
    dataset = build_dataset(workload, model, workload.batch_size * BATCHES)
    return DataLoader(dataset, batch_size=workload.batch_size, collate_fn=dataset.collate)


def loader_of(what: Any, batch_size: int | None) -> DataLoader[Any]:
    """Return the DataLoader that ``what`` is or makes: a DataLoader, a dataset, or a function that returns one.

    Raises:
        WorkloadError: A dataset has no batch size.
        FactoryError: The function raised, or returned something else.
    """
    name = getattr(what, "__name__", type(what).__name__)
    if callable(what) and (isinstance(what, type) or not _is_data(what)):
        what = factory.call(what, f"dataset: {name}", ())
    if isinstance(what, DataLoader):
        return what
    if not _is_data(what):
        raise FactoryError(
            f"dataset: {name} gives {type(what).__name__}, which is no data set: return a torch Dataset, a list of "
            "samples or a DataLoader"
        )
    if batch_size is None:
        raise WorkloadError("batch_size: a dataset alone does not say it; give it, or a workload", key="batch_size")
    return DataLoader(what, batch_size=batch_size)


def _is_data(what: Any) -> bool:
    """Return whether something is a data set or a loader: texts, tables by name and pairs are none."""
    if isinstance(what, DataLoader | Dataset):
        return True
    is_sequence = hasattr(what, "__getitem__") and hasattr(what, "__len__")
    return is_sequence and not isinstance(what, str | bytes | bytearray | tuple | Mapping | type)


def _step_of(workload: Workload | None, request: LoaderRequest) -> StepToFeed | None:
    """Return the step to feed: as given, as predicted, or unknown."""
    training = workload is not None and workload.mode == "training"
    batches = workload.train.gradient_accumulation_steps if workload is not None and training else 1
    if request.step_seconds is not None:
        return StepToFeed(request.step_seconds, batches=batches)
    if workload is None:
        return None
    prediction = predict_training(Training(workload), PredictRequest(calibration=request.calibration))
    time = prediction.time
    if time is None:
        return None
    return StepToFeed(time.step_seconds, time.host_seconds, batches, predicted=True, gpu=prediction.gpu.name)
