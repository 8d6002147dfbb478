"""Measure a training or the timing model's constants on this machine's GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.api.keywords import with_settings
from trainatomy.api.predicting import predict_row
from trainatomy.errors import WorkloadError
from trainatomy.results.measurement import Measurement
from trainatomy.runs.options import COMPARED_PACES, PredictOptions, RunOptions
from trainatomy.workload.measurable import measurable
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.measurement.process.progress import Progress
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
    from trainatomy.runs.single import measure_and_record as run

    ranks = tuple(range(1, workload.parallel.world_size))
    predict_options = replace(predict_options, ranks=ranks, host_paces=COMPARED_PACES)
    return run(
        workload,
        partial(predict_row, predict_options),
        lambda described: measure(
            described, components=components, trace=trace, time_limit=run_options.time_limit, progress=progress
        ),
        run_options,
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
    from trainatomy.catalog.calibrations import parse
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
    from trainatomy.runs.machine import this_machine

    found = this_machine().resolve_gpu()
    if found is None:
        raise WorkloadError("gpu: this machine's GPU is not a known one; name the one to search for", key="gpu")
    return found.id
