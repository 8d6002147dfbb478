"""Run one training on the GPU of this process and measure it: the same step that a prediction executes without data."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from trainatomy.errors import DeviceError, MissingLibrary, WorkloadError
from trainatomy.measurement.device import nvml
from trainatomy.measurement.device.host import HostProbe
from trainatomy.measurement.device.meter import Meter
from trainatomy.measurement.device.nvml import show_first_gpus
from trainatomy.measurement.device.power import sampler_of
from trainatomy.measurement.host_memory import HostSampler
from trainatomy.measurement.process.job import Job, Reporter, to_plain, warm_up_steps
from trainatomy.measurement.step.building import built_model
from trainatomy.measurement.step.group import (
    RankGroup,
    first_collective,
    followed,
    join,
    join_alone,
    place_of,
)
from trainatomy.measurement.step.instruments import DataWaits, HostPhases, Monitors, host_sampler
from trainatomy.measurement.step.recorder import RunRecorder
from trainatomy.measurement.step.results import (
    PROCESS_GROUP,
    Outcome,
    allocator_setup,
    is_out_of_memory,
    measurement_of,
    of_rank,
    requested_bytes,
    with_other_gpus,
)
from trainatomy.measurement.step.timer import EnoughSteps, StepLimit, StepTimer
from trainatomy.measurement.traces import history as histories
from trainatomy.measurement.traces.breakdown import BUFFERS_NOTE, Failure, MeasuredTotals, measured_breakdown
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Instant
from trainatomy.training import run as steps
from trainatomy.training.observer import Observer
from trainatomy.training.quantization import load_on_device
from trainatomy.training.run import CountedSteps, following_scaled_steps
from trainatomy.training.shape import tokens_per_sample
from trainatomy.workload.schema import Workload

_CASE_FIELDS = (
    "name",
    "workload",
    "status",
    "gpu",
    "versions",
    "date",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "steps",
)
"""Fields of the measurement that describe the run in a file of its allocation history."""


def run(job: Job, reporter: Reporter | None = None) -> Measurement:
    """Run ``job`` in this process and measure it.  The process must be fresh: nothing may have used CUDA in it.

    The order makes the figures exact: idle reading, CUDA context (by a first tensor, which is dropped), on several GPUs
    the process group, model on the CPU, then the steps.

    Raises:
        DeviceError: PyTorch finds no GPU.
        WorkloadError: PyTorch's allocator refuses the workload's options.
    """
    workload = Workload.from_mapping(job.workload)
    place = place_of(workload.parallel)
    job = job if place.rank == 0 else replace(job, trace=None)
    reporter = reporter or Reporter()
    with _open_driver() as driver, _host_followed(job) as host:
        meter = Meter(driver, is_exclusive=job.alone)
        reporter.stage("first tensor")
        if workload.parallel.devices > 1:
            show_first_gpus(workload.parallel.devices)
        start_cuda(workload)
        if place.size > 1:
            torch.cuda.set_device(place.local_rank)
        device = torch.cuda.current_device()
        meter.choose(str(torch.cuda.get_device_properties(device).uuid))
        if job.recorded:
            _record_history(job)
        _make_context()
        reporter.stage("building the model", meter.read_context(torch.cuda.memory_reserved()))
        group = join(place, offloads=workload.shards_on_host)
        if group.size == 1 and workload.train.deepspeed is not None:
            join_alone()
        if group.size > 1:
            first_collective()
            meter.stage(PROCESS_GROUP)
        if host is not None:
            host.phase("loading")
        measurement = _run_in_group(job, workload, meter, group, reporter, host)
        return measurement if host is None else replace(measurement, host_bill=host.bill())


@contextlib.contextmanager
def _host_followed(job: Job) -> Iterator[HostSampler | None]:
    """Follow the host's memory meanwhile, but not while allocations are recorded: the recording takes some itself."""
    if job.recorded:
        yield None
        return
    sampler = host_sampler()
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


def _run_in_group(
    job: Job, workload: Workload, meter: Meter, group: RankGroup, reporter: Reporter, host: HostSampler | None
) -> Measurement:
    """Build the model, run the steps and gather what was measured."""
    device = torch.cuda.current_device()
    limit = _step_limit(job, workload)
    timer = StepTimer(
        meter,
        warm_up=warm_up_steps(workload),
        reporter=reporter,
        limit=limit,
        group=group,
        monitors=_monitors(job, meter, group),
        compiles=workload.mode == "training" and workload.train.compiles,
    )
    recorder = RunRecorder(timer.warm_up) if job.recorded else None
    skipped = CountedSteps()
    with following_scaled_steps(decided=skipped.decided):
        others = [] if host is None else [HostPhases(host)]
        outcome = _execute(workload, timer, recorder, limit.max_steps, others)
    meter.read()
    if outcome.failure is None:
        group.wait_for_all()
    reporter.stage("analyzing memory")
    measurement = measurement_of(job, workload, meter, timer, outcome, device)
    measurement = replace(measurement, skipped_steps=skipped.count)
    if group.size > 1:
        measurement = of_rank(measurement, timer, group)
    if workload.parallel.devices > 1:
        measurement = with_other_gpus(measurement, workload.parallel.devices)
    if recorder is not None:
        measurement = _with_breakdown(measurement, job, workload, recorder, outcome.failure, device)
    return measurement


def _monitors(job: Job, meter: Meter, group: RankGroup) -> Monitors:
    """Return what to watch: nothing while allocations are recorded, power where no other run uses the GPU."""
    if job.recorded:
        return Monitors()
    power = sampler_of(meter.device) if job.alone else None
    return Monitors(HostProbe(), DataWaits(), power, between=group.size == 1)


def run_rank(arguments: Mapping[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Run a job (``job``: its line of JSON) as one rank of several; out of memory ends it before the others."""
    measurement = run(Job.from_json(arguments["job"]), reporter)
    return {**to_plain(measurement), "left_early": measurement.status != "completed"}


def start_cuda(workload: Workload) -> None:
    """Initialise CUDA.

    Raises:
        DeviceError: PyTorch finds no GPU.
        WorkloadError: PyTorch's allocator refuses the workload's options.
    """
    if torch.version.hip:
        raise DeviceError(nvml.NOT_ON_AMD)
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise DeviceError(
            f"PyTorch {torch.__version__} ({built}) finds no GPU that it can use. Install a build of PyTorch that fits "
            "the driver (`nvidia-smi` shows which CUDA it supports); `trainatomy predict` needs no GPU."
        )
    try:
        torch.cuda.init()
    except (RuntimeError, ValueError) as error:  # the allocator reads its options while CUDA starts
        if not workload.allocator:
            raise
        reason = str(error).splitlines()[0]
        raise WorkloadError(
            f"allocator: PyTorch {torch.__version__} refuses {workload.allocator!r}: {reason}", key="allocator"
        ) from error


_ANSWERED = frozenset(
    {"leaves_out", "repeat", "repeat_evaluation", "evaluates_after", "repeat_generation", "repeat_generate"}
)
"""Events whose answer the loop needs."""


class _Observers(Observer):
    """Forward each event of the loop to several observers, in order."""

    def __init__(self, *observers: Observer) -> None:
        self._all = observers
        for event in vars(Observer):
            if not event.startswith("_") and event not in _ANSWERED:
                setattr(self, event, partial(_notify, [getattr(observer, event) for observer in observers]))

    def evaluates_after(self, step: int) -> bool:
        return any(observer.evaluates_after(step) for observer in self._all)

    def repeat_evaluation(self, batch: Any) -> Any:
        for observer in self._all:
            observer.repeat_evaluation(batch)


def _notify(handlers: list[Any], *arguments: Any) -> None:
    for handler in handlers:
        handler(*arguments)


def _step_limit(job: Job, workload: Workload) -> StepLimit:
    """Return the job's limit; a workload that sets its number of steps gets exactly those."""
    steps, seconds = (workload.steps, 0.0) if workload.steps else (job.steps, job.seconds)
    most = workload.steps or max(job.steps, job.most_steps)
    return StepLimit(most, steps, seconds, job.quiet, math.inf if job.until is None else job.until)


def _execute(
    workload: Workload,
    timer: StepTimer,
    recorder: RunRecorder | None,
    max_steps: int,
    others: Sequence[Observer] = (),
) -> Outcome:
    model = built_model(workload)
    tokens = tokens_per_sample(workload, model)
    observer = _Observers(*([] if recorder is None else [recorder]), timer, *others)
    try:
        following = (
            contextlib.nullcontext() if recorder is None or workload.parallel.processes == 1 else followed(recorder)
        )
        with contextlib.suppress(EnoughSteps), timer.meter.reading_before_release(), following:
            model = load_on_device(workload, model, "cuda")
            steps.run(workload, model, device="cuda", steps=max_steps, observer=observer)
        torch.cuda.synchronize()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if recorder is not None:
            recorder.failed()
        message = str(error).splitlines()[0]
        return Outcome("out of memory", message, tokens, _failure(message, timer))
    finally:
        timer.finish()
        if recorder is not None:
            recorder.stop_tracking()
    return Outcome(tokens=tokens)


def _failure(message: str, timer: StepTimer) -> Failure:
    instant = Instant(timer.step, timer.phase, "", "")
    return Failure(instant, requested_bytes(message), torch.cuda.memory_allocated(), torch.cuda.memory_reserved())


@contextlib.contextmanager
def _open_driver() -> Iterator[nvml.Driver | None]:
    """Open NVML; without it the measurement goes on and lacks what only NVML reports."""
    with contextlib.ExitStack() as stack:
        driver = None
        try:
            driver = stack.enter_context(nvml.session())
        except (MissingLibrary, nvml.NoAnswer) as error:
            print(f"device memory will be missing: {error}", file=sys.stderr)
        yield driver


def _make_context() -> None:
    """Make the CUDA context by moving a first tensor to the GPU."""
    torch.ones((1, 1)).to("cuda")
    torch.cuda.synchronize()


def _record_history(job: Job) -> None:
    """Start PyTorch's memory history, before the first tensor."""
    context = {"none": None, "python": "all", "cpp": "alloc"}[job.stacks]
    torch.cuda.memory._record_memory_history(
        enabled="all", context=context, stacks="all" if job.stacks == "cpp" else "python", max_entries=sys.maxsize
    )


def _with_breakdown(
    measurement: Measurement,
    job: Job,
    workload: Workload,
    recorder: RunRecorder,
    failure: Failure | None,
    device: int,
) -> Measurement:
    """Add the memory breakdown from the recorded allocations, and write them to ``job.trace`` if that is set."""
    case = {name: getattr(measurement, name) for name in _CASE_FIELDS}
    # After a failure other ranks may never take part in the collectives that this GPU waits for.
    trace = _device_trace(device, wait=failure is None or workload.parallel.processes == 1)
    history = histories.from_snapshot(case, trace, recorder.notes)
    notes, trace_file = list(measurement.notes), None
    if job.trace is not None:
        try:
            histories.write(history, job.trace)
            trace_file = str(job.trace)
        except OSError as error:
            notes.append(f"the allocation trace could not be kept in {job.trace}: {error.strerror or error}")
    measurement = replace(measurement, tape_file=trace_file)
    if job.record:
        setup = allocator_setup(workload.allocator, device)
        totals = MeasuredTotals.of(measurement)
        breakdown = measured_breakdown(history, setup, totals, recorder.tracked_steps, failure)
        notes += [*breakdown.notes, *([BUFFERS_NOTE] if workload.parallel.devices > 1 else [])]
        point = breakdown.out_of_memory or measurement.out_of_memory
        measurement = replace(measurement, memory=breakdown.memory, modules=breakdown.modules, out_of_memory=point)
    return replace(measurement, notes=tuple(notes))


def _device_trace(device: int, *, wait: bool) -> list[dict[str, Any]]:
    if wait:
        torch.cuda.synchronize()
    traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
    return traces[device]
