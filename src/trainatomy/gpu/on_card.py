"""One training on the GPU of this process: the very step that a prediction executes without data, with data."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import torch

from trainatomy.errors import DeviceError, MissingLibrary
from trainatomy.gpu import nvml, tape
from trainatomy.gpu.meter import Meter
from trainatomy.gpu.scribe import Scribe
from trainatomy.gpu.watch import Watch
from trainatomy.results.bill import Measurement
from trainatomy.training import model as models
from trainatomy.training import run as steps
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainatomy.gpu.job import Job

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "torchvision")
Status = Literal["completed", "out of memory"]


def run(job: Job) -> Measurement:
    """Run ``job`` here and measure it.  The process must be fresh: nothing may have used CUDA in it.

    Order matters for exactness: idle reading, context (by the first tensor, which is dropped), model on the CPU, then
    the steps. Raises ``DeviceError`` where PyTorch has no GPU.
    """
    workload = Workload.from_mapping(job.workload)
    with _driver() as driver:
        meter = Meter(driver, alone=job.alone)
        _start_cuda()
        device = torch.cuda.get_device_properties(0)
        meter.choose(str(device.uuid))
        if job.tape:
            _record(job)
        _make_context()
        meter.read_context(torch.cuda.memory_reserved())
        watch = Scribe(meter) if job.tape else Watch(meter)
        status, message = _execute(workload, job.steps, watch)
        meter.read()
        place = (device.name, driver.version if driver else "unknown")
        measurement = _measurement(job, workload, meter, watch, (status, message), place)
        if job.tape and isinstance(watch, Scribe):
            tape.write(tape.from_trace(_case(measurement), _trace(), watch.notes), job.tape)
        return measurement


def _execute(workload: Workload, default_steps: int, watch: Watch) -> tuple[Status, str]:
    torch.manual_seed(workload.train.seed)
    model = models.build_model(workload)
    try:
        steps.run(workload, model, device="cuda", steps=workload.steps or default_steps, observer=watch)
        torch.cuda.synchronize()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return "out of memory", str(error).splitlines()[0]
    return "completed", ""


def _is_out_of_memory(error: Exception) -> bool:
    """PyTorch's own allocator has its own error; libraries that allocate by themselves raise CUDA's."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


@contextlib.contextmanager
def _driver() -> Iterator[nvml.Driver | None]:
    """NVML's view of the machine; without its Python binding the measurement goes on, and lacks what only NVML says."""
    with contextlib.ExitStack() as stack:
        driver = None
        try:
            driver = stack.enter_context(nvml.session())
        except MissingLibrary as error:
            print(f"device memory will be missing: {error}", file=sys.stderr)
        yield driver


def _start_cuda() -> None:
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise DeviceError(
            f"PyTorch {torch.__version__} ({built}) finds no GPU that it can use. Install a build of PyTorch that fits "
            "the driver (`nvidia-smi` shows which CUDA it supports); `trainatomy predict` needs no GPU."
        )
    torch.cuda.init()


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


def _measurement(
    job: Job, workload: Workload, meter: Meter, watch: Watch, end: tuple[Status, str], place: tuple[str, str]
) -> Measurement:
    """``end``: status and message; ``place``: GPU and driver."""
    memory = meter.result()
    statistics = torch.cuda.memory_stats()
    return Measurement(
        name=workload.name or "",
        workload=dict(job.workload),
        status=end[0],
        gpu=place[0],
        driver=place[1],
        versions=_versions(),
        date=datetime.now(UTC).date().isoformat(),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(),
        device_bytes=memory.device_bytes,
        process_bytes=memory.process_bytes,
        nvml_used_bytes=memory.nvml_used_bytes,
        idle_bytes=memory.idle_bytes,
        context_bytes=memory.context_bytes,
        model_bytes=watch.model_bytes,
        num_alloc_retries=int(statistics.get("num_alloc_retries", 0)),
        step_seconds=watch.step_seconds,
        steps=watch.steps,
        message=end[1],
        tape_file=str(job.tape) if job.tape else None,
    )


def _case(measurement: Measurement) -> dict[str, Any]:
    names = (
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
    return {name: getattr(measurement, name) for name in names}


def _trace() -> list[dict[str, Any]]:
    torch.cuda.synchronize()
    traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
    return traces[torch.cuda.current_device()]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or ""}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
