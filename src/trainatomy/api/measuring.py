"""Measure a training or the timing model's constants on this machine's GPU.

Time the DataLoader of a training alone, and say which settings suffice for its step.

Looking at this machine: what is wrong with GPUs, links, software and host.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.api.predicting import predict, predict_row, with_settings
from trainatomy.catalog.calibrations import parse
from trainatomy.errors import FactoryError, WorkloadError
from trainatomy.results.loader import LoaderReport, LoaderSettings, StepToFeed
from trainatomy.results.machine import Diagnosis
from trainatomy.results.measurement import Measurement
from trainatomy.runs.options import COMPARED_PACES, PredictOptions, RunOptions
from trainatomy.workload.measurable import measurable
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.measurement.process.job import Progress
    from trainatomy.runs.single import MeasuredRun


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

    workload = measurable(with_settings(workload, settings))
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
    from trainatomy.measurement.measure import measure as run_beside
    from trainatomy.measurement.process.pool import Processes
    from trainatomy.runs.single import measure_and_record as run

    ranks = tuple(range(1, workload.parallel.world_size))
    predict_options = replace(predict_options, ranks=ranks, host_paces=COMPARED_PACES)
    with Processes() as processes:
        return run(
            workload,
            partial(predict_row, predict_options),
            lambda described, meanwhile: run_beside(
                described,
                components=components,
                trace=trace,
                time_limit=run_options.time_limit,
                progress=progress,
                meanwhile=meanwhile,
                processes=processes,
            ),
            run_options,
            processes,
            components=components,
        )


def calibrate(
    output: Path | str | None = None, *, time_limit: float = 120.0, gpus: int = 1, force: bool = False
) -> Calibration:
    """Measure what the timing model needs on this machine's GPU, and on the links between several.

    It waits until the machine does nothing else, and measures its CPU again where it did not stay so.

    Args:
        output: File to write the calibration to, as JSON.
        time_limit: Seconds; measurements that do not fit are left out.
        gpus: GPUs between which collectives are measured, each in a process of its own.
        force: Calibrate even if the machine is busy with other work, which makes its CPU seem slow.

    Raises:
        DeviceError: There is no GPU, or fewer than ``gpus``.
        TrainatomyError: The machine is busy with other work.
        WorkloadError: ``output`` cannot be written; checked before anything is measured.
    """
    from trainatomy.measurement.calibration.calibrate import calibrate as run
    from trainatomy.measurement.calibration.calibrate import write
    from trainatomy.measurement.measure import writable

    target = None if output is None else writable(Path(output), "--output")
    content = run(time_limit=time_limit, gpus=gpus, force=force)
    if target is not None:
        write(content, target)
    return parse(json.dumps(content), str(output or "this machine"))


def this_gpu() -> str:
    """Return the id of this machine's GPU."""
    from trainatomy.runs.single import this_machine

    found = this_machine().resolve_gpu()
    if found is None:
        raise WorkloadError("gpu: this machine's GPU is not a known one; name the one to search for", key="gpu")
    return found.id


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
    from trainatomy.measurement.loader import time_settings

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


def diagnose(
    *,
    gpus: Sequence[int] = (),
    bandwidth: bool = True,
    seconds: float = 0.0,
    pid: int | None = None,
    stage: Callable[[str], None] = lambda stage: None,
) -> Diagnosis:
    """Look at this machine: links, power and heat, memory errors, software, other processes, host.

    It never changes a setting. Without a GPU it looks at software and host.

    Args:
        gpus: Numbers of the GPUs to look at, as in nvidia-smi; all if empty.
        bandwidth: Measure copies, and clocks under load (about a second for each GPU); not on GPUs that are in use.
        seconds: Watch a running training for so long; with ``pid`` 5 s if it is left out.
        pid: Process of that training.
        stage: Called with the name of each stage when it begins.

    Raises:
        DeviceError: There is no GPU of a given number, or none to watch.
        TrainatomyError: There is no process ``pid``.
    """
    from trainatomy.doctor.gathering import diagnose as diagnose_machine
    from trainatomy.doctor.gathering import gather

    return diagnose_machine(gather(gpus, bandwidth=bandwidth, seconds=seconds, pid=pid, stage=stage))
