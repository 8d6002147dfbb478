"""Time the DataLoader of a training alone, and say which settings suffice for its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.api.keywords import with_settings
from trainatomy.api.predicting import predict
from trainatomy.errors import FactoryError, WorkloadError
from trainatomy.results.loader import LoaderReport, LoaderSettings, StepToFeed
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

    from trainatomy.catalog.calibrations import Calibration

WORKERS = (0, 1, 2, 4, 8)
BATCHES = 10_000
"""Batches of a synthetic dataset: more than are ever fetched."""


def time_loader(
    what: Workload | Dataset[Any] | DataLoader[Any] | Callable[[], Any],
    *,
    workload: Workload | None = None,
    batch_size: int | None = None,
    workers: Sequence[int] = WORKERS,
    prefetch_factor: int = 2,
    pin_memory: bool = True,
    persistent_workers: bool = True,
    seconds: float = 2.0,
    step_seconds: float | None = None,
    calibration: Calibration | Path | str | None = None,
    progress: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> LoaderReport:
    """Time a DataLoader alone with several numbers of workers, and say which of them feed the step.

    Args:
        what: A workload, whose batches come from its ``data.factory`` or are drawn; or a dataset, a DataLoader, or a
            function without arguments that returns one.
        workload: The training of a dataset or DataLoader; its step is predicted.
        batch_size: Samples of a batch of a dataset (default: the workload's).
        workers: Numbers of worker processes to try.
        prefetch_factor: Batches that each worker makes ahead.
        pin_memory: Copy batches to pinned memory, where there is a GPU.
        persistent_workers: Keep the workers from epoch to epoch.
        seconds: Seconds for each number of workers.
        step_seconds: Duration of the step, in place of the predicted one.
        calibration: See ``predict``.
        progress: Called with what is being done.
        **settings: Settings of the workload, as in ``predict``.

    Raises:
        WorkloadError: The workload is wrong, or the batch size is not known.
        FactoryError: The user's code raised, or returned something else.
    """
    from trainatomy.measurement.loader.report import time_settings

    training = what if isinstance(what, Workload) else workload
    if training is not None:
        training = with_settings(training, settings)
    elif settings:
        raise WorkloadError(f"{', '.join(settings)}: settings of a workload, and none is given")
    loader = _loader_of_workload(training) if isinstance(what, Workload) and training else None
    if loader is None:
        loader = loader_of(what, batch_size or (training.batch_size if training else None))
    wrong = [count for count in workers if count < 0]
    if wrong or not workers or prefetch_factor < 1 or seconds <= 0:
        raise WorkloadError("workers, prefetch_factor, seconds: give numbers of workers from 0, and others above 0")
    return time_settings(
        loader,
        [
            LoaderSettings(count, prefetch_factor if count else None, pin_memory, persistent_workers and count > 0)
            for count in sorted(set(workers))
        ],
        _step_of(training, step_seconds, calibration),
        name=training.display_name if training is not None else type(loader.dataset).__name__,
        seconds=seconds,
        random_samples=isinstance(what, Workload) and training is not None and training.data.factory is None,
        progress=progress,
    )


def _loader_of_workload(workload: Workload) -> DataLoader[Any]:
    """Return the loader of a workload's batches, as its training loop makes it."""
    import torch
    from torch.utils.data import DataLoader

    from trainatomy.training.batch import build_dataset
    from trainatomy.training.model import build_model

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
    from torch.utils.data import DataLoader

    from trainatomy.training import factory

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
    from torch.utils.data import DataLoader, Dataset

    if isinstance(what, DataLoader | Dataset):
        return True
    is_sequence = hasattr(what, "__getitem__") and hasattr(what, "__len__")
    return is_sequence and not isinstance(what, str | bytes | bytearray | tuple | Mapping | type)


def _step_of(
    workload: Workload | None, step_seconds: float | None, calibration: Calibration | Path | str | None
) -> StepToFeed | None:
    """Return the step to feed: as given, as predicted, or unknown."""
    training = workload is not None and workload.mode == "training"
    batches = workload.train.gradient_accumulation_steps if workload is not None and training else 1
    if step_seconds is not None:
        return StepToFeed(step_seconds, batches=batches)
    if workload is None:
        return None
    prediction = predict(workload, calibration=calibration)
    time = prediction.time
    if time is None:
        return None
    return StepToFeed(time.step_seconds, time.host_seconds, batches, predicted=True, gpu=prediction.gpu.name)
