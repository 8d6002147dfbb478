"""One training on the GPU of this process: the very step that a prediction executes without data, with data."""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import torch

from trainatomy.errors import DeviceError, MissingLibrary, WorkloadError
from trainatomy.measurement.device import nvml
from trainatomy.measurement.device.meter import Meter
from trainatomy.measurement.process.job import warm_up_steps
from trainatomy.measurement.process.reporting import Reporter
from trainatomy.measurement.step.here import is_out_of_memory, versions
from trainatomy.measurement.step.recorded import with_bill
from trainatomy.measurement.step.scribe import Scribe
from trainatomy.measurement.step.watch import EnoughSteps, Patience, Watch
from trainatomy.measurement.traces.settled import Failure
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Instant
from trainatomy.training import model as models
from trainatomy.training import run as steps
from trainatomy.training.throughput import throughput, tokens_per_sample
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainatomy.measurement.process.job import Job

Status = Literal["completed", "out of memory"]
_UNITS = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def run(job: Job, reporter: Reporter | None = None) -> Measurement:
    """Run ``job`` here and measure it.  The process must be fresh: nothing may have used CUDA in it.

    Order matters for exactness: idle reading, context (by the first tensor, which is dropped), model on the CPU, then
    the steps. Raises ``DeviceError`` where PyTorch has no GPU, ``WorkloadError`` for options that its allocator
    refuses.
    """
    workload = Workload.from_mapping(job.workload)
    reporter = reporter or Reporter()
    with _driver() as driver:
        meter = Meter(driver, alone=job.alone)
        reporter.stage("first tensor")
        _start_cuda(workload)
        device = torch.cuda.get_device_properties(0)
        meter.choose(str(device.uuid))
        if job.recorded:
            _record(job)
        _make_context()
        reporter.stage("building the model", meter.read_context(torch.cuda.memory_reserved()))
        watch = _watch(job, workload, meter, reporter)
        end = _execute(workload, watch, _patience(job, workload).steps)
        meter.read()
        reporter.stage("settling the bill")
        measurement = _measurement(job, workload, meter, watch, end)
        if isinstance(watch, Scribe):
            measurement = with_bill(measurement, job, workload, watch, end.failure)
        return measurement


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended: status and message, tokens of a sample (``None``: it is no text), where it failed."""

    status: Status = "completed"
    message: str = ""
    tokens: int | None = None
    failure: Failure | None = None


def _patience(job: Job, workload: Workload) -> Patience:
    """A workload that names its steps gets them."""
    if workload.steps:
        return Patience(workload.steps, workload.steps, 0.0)
    return Patience(max(job.steps, job.most_steps), job.steps, job.seconds)


def _watch(job: Job, workload: Workload, meter: Meter, reporter: Reporter) -> Watch:
    warm_up = warm_up_steps(workload)
    if job.recorded:
        return Scribe(meter, warm_up=warm_up, reporter=reporter, patience=_patience(job, workload))
    return Watch(meter, warm_up=warm_up, reporter=reporter, patience=_patience(job, workload))


def _execute(workload: Workload, watch: Watch, most_steps: int) -> End:
    torch.manual_seed(workload.train.seed)
    model = models.build_model(workload)
    tokens = tokens_per_sample(workload, model)
    try:
        with contextlib.suppress(EnoughSteps):
            steps.run(workload, model, device="cuda", steps=most_steps, observer=watch)
        torch.cuda.synchronize()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        watch.failed()
        message = str(error).splitlines()[0]
        return End("out of memory", message, tokens, failure_of(message, watch))
    finally:
        watch.over()
    return End(tokens=tokens)


def failure_of(message: str, watch: Watch) -> Failure:
    """Where it failed, and what the allocator held then."""
    instant = Instant(watch.step, watch.phase, "", "")
    return Failure(instant, requested_in(message), torch.cuda.memory_allocated(), torch.cuda.memory_reserved())


def requested_in(message: str) -> int:
    """Bytes in PyTorch's ``Tried to allocate 2.00 GiB`` (rounded there to two digits), 0 where it says nothing."""
    found = re.search(r"[Tt]ried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)", message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0


@contextlib.contextmanager
def _driver() -> Iterator[nvml.Driver | None]:
    """NVML's view of the machine; where there is none the measurement goes on, and lacks what only NVML says."""
    with contextlib.ExitStack() as stack:
        driver = None
        try:
            driver = stack.enter_context(nvml.session())
        except (MissingLibrary, nvml.NoAnswer) as error:
            print(f"device memory will be missing: {error}", file=sys.stderr)
        yield driver


def _start_cuda(workload: Workload) -> None:
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
        raise WorkloadError(
            f"allocator: PyTorch {torch.__version__} refuses {workload.allocator!r}: {str(error).splitlines()[0]}"
        ) from error


def _make_context() -> None:
    """Put a first tensor on the card, and let it go: CUDA makes its context."""
    torch.ones((1, 1)).to("cuda")
    torch.cuda.synchronize()


def _record(job: Job) -> None:
    """Have PyTorch write its memory history, from before the first tensor."""
    context = {"none": None, "python": "all", "cpp": "alloc"}[job.stacks]
    torch.cuda.memory._record_memory_history(
        enabled="all", context=context, stacks="all" if job.stacks == "cpp" else "python", max_entries=sys.maxsize
    )


def _measurement(job: Job, workload: Workload, meter: Meter, watch: Watch, end: End) -> Measurement:
    memory = meter.result()
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    rates = throughput(workload, end.tokens, watch.step_seconds)
    return Measurement(
        name=workload.name or "",
        workload=dict(job.workload),
        status=end.status,
        gpu=meter.device.name
        if meter.device and meter.device.is_instance
        else torch.cuda.get_device_properties(0).name,
        driver=meter.driver_version,
        versions=versions(),
        date=datetime.now(UTC).date().isoformat(),
        peak_allocated_bytes=peaks[0],
        peak_reserved_bytes=peaks[1],
        device_bytes=memory.device_bytes,
        process_bytes=memory.process_bytes,
        nvml_used_bytes=memory.nvml_used_bytes,
        idle_bytes=memory.idle_bytes,
        context_bytes=memory.context_bytes,
        model_bytes=watch.model_bytes,
        num_alloc_retries=int(torch.cuda.memory_stats().get("num_alloc_retries", 0)),
        step_seconds=watch.step_seconds,
        steps=watch.steps,
        message=end.message,
        tape_file=None,
        stages=meter.stages(*peaks),
        timed_step_seconds=tuple(watch.timed),
        samples_per_second=rates.samples_per_second,
        tokens_per_second=rates.tokens_per_second,
        neighbours=meter.neighbours(),
        out_of_memory=None if end.failure is None else end.failure.point(),
        notes=meter.notes(),
    )
