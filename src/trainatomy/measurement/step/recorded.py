"""What a recorded run adds to its measurement: the bill, and the stream of allocations in a file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.catalog.versions import parse_version
from trainatomy.catalog.workspaces import workspaces
from trainatomy.measurement.traces import trace as trace_files
from trainatomy.measurement.traces.settled import Failure, Place, counted, real_bill

if TYPE_CHECKING:
    from trainatomy.measurement.process.job import Job
    from trainatomy.measurement.step.scribe import Scribe
    from trainatomy.results.measurement import Measurement
    from trainatomy.workload.schema import Workload


def with_bill(
    measurement: Measurement, job: Job, workload: Workload, scribe: Scribe, failure: Failure | None
) -> Measurement:
    """The measurement with what the recorded allocations say; they are kept in ``job.tape`` where that is named."""
    history = trace_files.from_trace(_case(measurement), _trace(), scribe.notes)
    notes, tape_file = list(measurement.notes), None
    if job.trace is not None:
        try:
            trace_files.write(history, job.trace)
            tape_file = str(job.trace)
        except OSError as error:
            notes.append(f"the stream of allocations could not be kept in {job.trace}: {error.strerror or error}")
    measurement = replace(measurement, tape_file=tape_file)
    if job.record:
        version = parse_version(torch.__version__)
        settings = AllocatorSettings.parse(workload.allocator, version)
        sizes = workspaces(torch.cuda.get_device_capability(0), version)
        place = Place(settings, sizes)
        bill = real_bill(history, place, counted(measurement), scribe.followed, failure)
        notes += bill.notes
        point = bill.out_of_memory or measurement.out_of_memory
        measurement = replace(measurement, memory=bill.memory, modules=bill.modules, out_of_memory=point)
    return replace(measurement, notes=tuple(notes))


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
