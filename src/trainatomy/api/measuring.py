"""Measure a training or the timing model's constants on this machine's GPU.

Time the DataLoader of a training alone, and say which settings suffice for its step.

Looking at this machine: what is wrong with GPUs, links, software and host.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from trainatomy.api.elsewhere import predict_row, with_settings
from trainatomy.api.predicting import predict_training
from trainatomy.catalog.calibrations import parse, resolve_calibration
from trainatomy.doctor.deaths import last_words
from trainatomy.doctor.gathering import diagnose as diagnose_machine
from trainatomy.doctor.gathering import gather
from trainatomy.errors import FactoryError, WorkloadError
from trainatomy.measurement.calibration.calibrate import calibrate as calibrate_gpu
from trainatomy.measurement.calibration.calibrate import write
from trainatomy.measurement.loader import time_settings
from trainatomy.measurement.measure import measure as measure_run
from trainatomy.measurement.measure import writable
from trainatomy.measurement.process.pool import Processes
from trainatomy.requests.measuring import DiagnoseRequest, LoaderRequest, MeasureRequest
from trainatomy.requests.predicting import COMPARED_PACES, PredictRequest, Training
from trainatomy.results.loader import LoaderReport, LoaderSettings, StepToFeed
from trainatomy.results.machine import Diagnosis
from trainatomy.results.measurement import Measurement
from trainatomy.runs.single import measure_and_record as record_run
from trainatomy.runs.single import this_machine
from trainatomy.training import factory
from trainatomy.training.batch import build_dataset
from trainatomy.training.model import build_model
from trainatomy.workload.measurable import measurable
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
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
    workload = measurable(with_settings(workload, settings))
    return measure_run(
        workload, components=components, steps=steps, trace=trace, time_limit=time_limit, progress=progress
    )


def measure_and_record(
    workload: Workload, request: MeasureRequest, progress: Callable[[Progress], None] | None = None
) -> MeasuredRun:
    """Predict a training, measure it on this machine's GPU, and record both.

    Args:
        workload: The training; predicted for this machine's GPU unless ``request.keep_gpus``.
        request: How to measure and to predict it, and where to keep the record.
        progress: See ``measure``.

    Raises:
        TrainatomyError: The errors of ``measure``, or the record's folder cannot be written.
    """
    predicting = PredictRequest(
        calibration=request.calibration,
        trust_remote_code=request.trust_remote_code,
        ranks=tuple(range(1, workload.parallel.world_size)),
        host_paces=COMPARED_PACES,
    )
    with Processes() as processes:
        return record_run(
            workload,
            partial(predict_row, predicting),
            lambda described, meanwhile: measure_run(
                described,
                components=request.components,
                trace=request.trace,
                time_limit=request.time_limit,
                progress=progress,
                meanwhile=meanwhile,
                processes=processes,
            ),
            request,
            processes,
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
    target = None if output is None else writable(Path(output), "--output")
    content = calibrate_gpu(time_limit=time_limit, gpus=gpus, force=force)
    if target is not None:
        write(content, target)
    return parse(json.dumps(content), str(output or "this machine"))


def this_gpu() -> str:
    """Return the id of this machine's GPU."""
    found = this_machine().resolve_gpu()
    if found is None:
        raise WorkloadError("gpu: this machine's GPU is not a known one; name the one to search for", key="gpu")
    return found.id


BATCHES = 10_000
"""Batches of a synthetic dataset: more than are ever fetched."""


def time_loader(
    what: Workload | Dataset[Any] | DataLoader[Any] | Callable[[], Any],
    *,
    workload: Workload | None = None,
    batch_size: int | None = None,
    workers: Sequence[int] = (0, 1, 2, 4, 8),
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
    training = what if isinstance(what, Workload) else workload
    if training is not None:
        training = with_settings(training, settings)
    elif settings:
        raise WorkloadError(f"{', '.join(settings)}: settings of a workload, and none is given")
    request = LoaderRequest(
        workers=workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers,
        seconds=seconds,
        step_seconds=step_seconds,
        calibration=resolve_calibration(calibration),
    )
    is_drawn = isinstance(what, Workload)
    return time_loader_of(training if is_drawn else what, training, request, batch_size, progress)


def time_loader_of(
    what: Any,
    training: Workload | None,
    request: LoaderRequest,
    batch_size: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> LoaderReport:
    """Time a DataLoader as it is asked for (see ``time_loader``); a workload as ``what`` is the training itself."""
    if isinstance(what, Workload):
        loader = _loader_of_workload(what)
    else:
        loader = loader_of(what, batch_size or (training.batch_size if training else None))
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
        _step_of(training, request),
        name=training.display_name if training is not None else type(loader.dataset).__name__,
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


def diagnose(
    *,
    gpus: Sequence[int] = (),
    bandwidth: bool = True,
    seconds: float = 0.0,
    pid: int | None = None,
    died: str = "",
    stage: Callable[[str], None] = lambda stage: None,
) -> Diagnosis:
    """Look at this machine: links, power and heat, memory errors, software, other processes, host.

    It never changes a setting. Without a GPU it looks at software and host.

    Args:
        gpus: Numbers of the GPUs to look at, as in nvidia-smi; all if empty.
        bandwidth: Measure copies, and clocks under load (about a second for each GPU); not on GPUs that are in use.
        seconds: Watch a running training for so long; with ``pid`` 5 s if it is left out.
        pid: Process of that training.
        died: How a training died: its exit code, its last lines, a line of the kernel's log, ``memory.events``, or the
            file that holds any of them.
        stage: Called with the name of each stage when it begins.

    Raises:
        DeviceError: There is no GPU of a given number, or none to watch.
        TrainatomyError: There is no process ``pid``.
    """
    return look_at_machine(DiagnoseRequest(tuple(gpus), bandwidth, pid, seconds, died), stage)


def look_at_machine(request: DiagnoseRequest, stage: Callable[[str], None] = lambda stage: None) -> Diagnosis:
    """Look at this machine as it is asked for (see ``diagnose``)."""
    facts = gather(
        request.gpus,
        bandwidth=request.bandwidth,
        seconds=request.seconds,
        pid=request.pid,
        died=last_words(request.died),
        stage=stage,
    )
    return diagnose_machine(facts)
