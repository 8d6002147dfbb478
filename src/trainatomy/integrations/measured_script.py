"""Run a script for real on this machine's GPU, stop it at the step where a dry run stops, and measure it.

``python -m trainatomy.integrations.measured_script JOB FOLDER`` is the script's process.  Only counters are read: the
step hooks wait for the GPU at the end of each step, and nothing is allocated.
"""

from __future__ import annotations

import os
import pickle
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from trainatomy.errors import DeviceError
from trainatomy.integrations.utilization import utilization
from trainatomy.measurement.device import nvml
from trainatomy.measurement.step.results import driver_version, is_out_of_memory, versions
from trainatomy.results.measurement import Measurement, Status
from trainatomy.results.prediction import Prediction
from trainatomy.scripts.job import Job, place_of
from trainatomy.scripts.longest import SampleCounter
from trainatomy.scripts.signals import ScriptListener, ScriptSignals, StepsDone


class StepClock(ScriptListener):
    """Listener that takes the time of each step, with the GPU's work done.

    Attributes:
        seconds: Seconds of each step.
        samples: Counter of the samples of a step.
        micro_steps: Micro-batches whose gradients the last step accumulated.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.samples = SampleCounter()
        self.micro_steps = 0
        self._began = 0.0

    def step_begin(self, step: int) -> None:
        self.samples.step_begin()
        if not self.seconds:
            torch.cuda.synchronize()
            self._began = time.perf_counter()

    def step_end(self, step: int) -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._began)
        self._began = now
        self.micro_steps = self.samples.micro_batches()

    def micro_step_end(self, micro_step: int) -> None:
        self.samples.backward_ended()

    def optimizer_end(self) -> None:
        self.samples.gradients_used()

    def zero_grad_end(self) -> None:
        self.samples.gradients_used()

    def evaluated(self) -> None:
        self.samples.evaluated()
        torch.cuda.synchronize()
        self._began = time.perf_counter()

    def evaluates_within_step(self) -> None:
        self.samples.evaluated()

    def batch(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Count samples."""
        self.samples.trains(arguments, keywords)


def measure_here(job: Job) -> Measurement:
    """Run a job's script in this process until its steps are done.

    Raises:
        DeviceError: It ended before the first step, or PyTorch finds no GPU.
    """
    if torch.version.hip:
        raise DeviceError(nvml.NOT_ON_AMD)
    if not torch.cuda.is_available():
        raise DeviceError("PyTorch finds no GPU on this machine; `trainatomy run` without --measure needs none")
    local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= there:
        raise DeviceError(
            f"`{job.command.text}` starts {local + 1} or more processes, one for each GPU; there are {there} here"
        )
    idle = utilization(local).used_bytes
    clock = StepClock()
    status, message = _run(job, clock)
    if not clock.seconds and status == "completed":
        raise DeviceError(
            f"{job.command.name} ended before its first optimizer step{f': {message}' if message else ''}"
        )
    after = utilization(torch.cuda.current_device())
    timed = clock.seconds[1:] or clock.seconds  # the first includes what a process does once
    seconds = statistics.median(timed) if timed else None
    samples = clock.samples.in_step(clock.micro_steps)
    device = None if after.context_bytes is None else torch.cuda.max_memory_reserved() + after.context_bytes
    return Measurement(
        name=job.command.name,
        workload={"name": job.command.name, "script": list(job.command.typed)},
        status=status,
        gpu=after.gpu,
        driver=driver_version(),
        versions=versions(),
        date=datetime.now(UTC).date().isoformat(),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(),
        device_bytes=device,
        process_bytes=after.process_bytes,
        nvml_used_bytes=after.used_bytes,
        idle_bytes=idle,
        context_bytes=after.context_bytes,
        model_bytes=None,
        num_alloc_retries=int(torch.cuda.memory_stats().get("num_alloc_retries", 0)),
        step_seconds=seconds,
        steps=len(clock.seconds),
        message=message,
        tape_file=None,
        timed_step_seconds=tuple(timed),
        samples_per_second=samples / seconds if seconds and samples else None,
    )


def _run(job: Job, clock: StepClock) -> tuple[Status, str]:
    """Run the script; return whether it ran out of memory, and the message of an error."""
    try:
        with clock.samples.attached(), ScriptSignals(clock, job.steps).attached():
            job.command.execute()
    except StepsDone:
        pass
    except SystemExit as error:
        return "completed", f"the script called sys.exit({error.code or ''})"
    except Exception as error:
        if is_out_of_memory(error):
            return "out of memory", str(error).splitlines()[0]
        return "completed", f"{place_of(error)} raised {type(error).__name__}: {error}"
    return "completed", ""


def compared(measurement: Measurement, prediction: Prediction | None) -> Measurement:
    """Return the measurement as one of the workload that was predicted."""
    if prediction is None:
        return measurement
    return replace(measurement, workload={**prediction.workload, "script": measurement.workload["script"]})


def main(job_file: str, folder: str) -> None:
    """Run the job in a file, and write its measurement, or the message of an error, into a folder."""
    job: Job = pickle.loads(Path(job_file).read_bytes())
    rank = int(os.environ.get("RANK", "0"))
    try:
        found: Measurement | str = measure_here(job)
    except DeviceError as error:
        found = str(error)
    failed = isinstance(found, str) or found.status != "completed" or bool(found.message)
    if rank == 0 or failed:
        Path(folder, f"measured-{rank:04d}.pickle").write_bytes(pickle.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    # Without waiting for workers of a loader, or for ranks that are not done; a rank that failed ends the others.
    os._exit(int(failed and "RANK" in os.environ))


if __name__ == "__main__":
    main(*sys.argv[1:])
