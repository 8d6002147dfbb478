"""Describe what measuring processes run, and pass their results back: plain values on both sides of the boundary.

Processes report progress and results as lines of JSON on a pipe that all of them share.  A pipe rather than a file: a
full disk loses nothing, and a process whose reader is gone ends at its next line.

The end of a process's log: its last lines, and the exception before them.

PyTorch's message about an operator without a kernel ends with a list of all its kernels, so that the last lines alone
would not say what failed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from trainatomy import errors
from trainatomy.results.measurement import Measurement

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload


Stacks = Literal["none", "python", "cpp"]
DEFAULT_STEPS = 4
WARM_UP_STEPS = 2
"""Untimed steps, which load kernels, create optimizer states and grow the allocator's cache."""
SCALED_WARM_UP_STEPS = 7
"""Warm-up steps with a gradient scaler: a scale that starts too high skips the first steps, so that no optimizer
states are created in them."""
STEPS_BEFORE_EVALUATION = 3
"""Steps that come before an evaluation, so that it finds the memory of a steady training; the warm-up ends with the
step after it."""
COMPILING_STEPS = 2
"""Steps in which a compiled model compiles: gradients and optimizer states exist from the second on."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the allocator's options (c10/cuda/CUDAAllocatorConfig.h, torch 2.9-2.13); PyTorch reads
both, and the second, older name wins."""
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable that makes PyTorch query NVML for GPUs instead of CUDA, which no
fork could use afterwards
(torch/cuda/__init__.py)."""
RUN_VARIABLE = "TRAINATOMY_RUN"
"""Environment variable with the number of a task, which tells the process groups in one store apart."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training to run on a GPU.

    Attributes:
        workload: The mapping of a workload file.
        steps: Optimizer steps, if the workload does not set them.
        trace: File for the recorded allocation history.
        stacks: Stacks to record with each allocation.
        alone: True if no other process uses the GPU meanwhile.
        record: Record allocations and compute the memory breakdown from them.
        most_steps: Run up to this many steps while the timed ones took less than ``seconds`` together.
        seconds: See ``most_steps``.
        quiet: File that is locked while the timed steps should not begin yet.
        until: Time (``time.monotonic``) from which on no further step is timed.
    """

    workload: Mapping[str, Any]
    steps: int = DEFAULT_STEPS
    trace: Path | None = None
    stacks: Stacks = "none"
    alone: bool = True
    record: bool = False
    most_steps: int = 0
    seconds: float = 0.0
    quiet: Path | None = None
    until: float | None = None

    @property
    def recorded(self) -> bool:
        """True if allocations are recorded, for the memory breakdown or for a file."""
        return self.record or self.trace is not None

    def to_json(self) -> str:
        """Return the job as one line of JSON."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)}, default=str)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read what ``to_json`` wrote."""
        content = json.loads(text)
        for name in ("trace", "quiet"):
            content[name] = None if content[name] is None else Path(content[name])
        return cls(**content)


@dataclass(frozen=True, slots=True)
class Task:
    """A function to run in new processes, one for each rank.

    Attributes:
        name: Name of the run in its progress.
        function: ``module:function``; gets ``arguments`` and a ``Reporter`` and returns a mapping of plain values, in
            which ``left_early`` says that other ranks wait for it in vain.
        arguments: Plain values.
        prepare: ``module:function`` that gets ``arguments`` before the processes are forked, or empty.
        ranks: Number of processes; more than one get the variables that torchrun sets.
        allocator: Options of PyTorch's allocator.
        loop: Name of the training loop, whose libraries are imported before the processes are forked.
        preloaded: Fork from a process that has imported the libraries; False where they must be imported in each.
        environment: Variables that the processes get besides those of this one.
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    prepare: str = ""
    ranks: int = 1
    allocator: str = ""
    loop: str = ""
    preloaded: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


def needs_bitsandbytes(workload: Mapping[str, Any]) -> bool:
    """Return whether the optimizer of a workload's mapping may be one of bitsandbytes.

    Its import asks CUDA about the GPU, which no fork could use afterwards.
    """
    optimizer = workload.get("train", {}).get("optim", "")
    return any(word in optimizer for word in ("bnb", "8bit", "lion", "ademamix", "paged"))


def warm_up_steps(workload: Workload) -> int:
    """Return the number of steps to run before timing."""
    has_scaler = workload.mode == "training" and workload.train.fp16
    steps = SCALED_WARM_UP_STEPS if has_scaler else WARM_UP_STEPS
    if workload.mode == "training" and workload.train.compiles:
        steps = max(steps, COMPILING_STEPS + 2)
    return max(steps, STEPS_BEFORE_EVALUATION) + 1 if workload.pauses else steps


def set_environment(environment: MutableMapping[str, str], allocator: str) -> None:
    """Replace the allocator's options in ``environment`` by ``allocator``; PyTorch reads them when first used."""
    for name in ALLOCATOR_VARIABLES:
        environment.pop(name, None)
        if allocator:
            environment[name] = allocator


def to_plain(result: Measurement | errors.TrainatomyError) -> dict[str, Any]:
    """Return a measurement, or the error that took its place, as plain types."""
    if isinstance(result, Measurement):
        return {"measurement": asdict(result)}
    return {"error": type(result).__name__, "message": str(result)}


def from_plain(content: Mapping[str, Any]) -> Measurement:
    """Return the measurement that ``to_plain`` wrote, through JSON or not; raise the error if it is one."""
    if "measurement" in content:
        measurement: Measurement = _adapter().validate_python(content["measurement"])
        return measurement
    kind = getattr(errors, content["error"], errors.TrainatomyError)
    raise kind(content["message"])


@cache
def _adapter() -> TypeAdapter[Measurement]:
    """Return an adapter that reads nested dataclasses; fields that an older file lacks get their defaults."""
    return TypeAdapter(Measurement)


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a measurement.

    Attributes:
        run: ``control`` (nothing is recorded) or ``recorded``.
        stage: loading libraries, first tensor, building the model, model loaded, training, analyzing memory.
        step: Completed steps.
        steps: Steps in total.
        device_bytes: Device memory that the process holds (``None``: the driver does not report it).
    """

    run: str
    stage: str
    step: int = 0
    steps: int = 0
    device_bytes: int | None = None

    def __str__(self) -> str:
        steps = f", step {self.step} of {self.steps}" if self.step else ""
        return f"{self.run} run: {self.stage}{steps}"


class Channel:
    """A pipe to which several processes write, a whole line at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = tempfile.TemporaryFile()  # noqa: SIM115  forks share it, and each locks it for itself

    def write(self, content: Mapping[str, Any]) -> None:
        """Write one line of JSON.  Raises ``BrokenPipeError`` when nobody reads any more."""
        line = memoryview(json.dumps(content, default=str).encode() + b"\n")
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)


class Reporter:
    """Passes progress to ``write``; does nothing without one."""

    def __init__(self, write: Callable[[Mapping[str, Any]], None] | None = None, run: str = "control") -> None:
        self._write = write
        self._last = Progress(run, "loading libraries")

    def stage(self, name: str, device_bytes: int | None = None) -> None:
        """Report that a stage begins; ``device_bytes`` keeps its last value if it is ``None``."""
        self._report(device_bytes, stage=name)

    def step(self, step: int, steps: int, device_bytes: int | None) -> None:
        """Report that ``step`` of ``steps`` steps are complete."""
        self._report(device_bytes, stage="training", step=step, steps=steps)

    def _report(self, device_bytes: int | None, **changes: Any) -> None:
        held = self._last.device_bytes if device_bytes is None else device_bytes
        self._last = replace(self._last, device_bytes=held, **changes)
        if self._write is not None:
            self._write({"progress": asdict(self._last)})


def read_progress(content: Mapping[str, Any]) -> Progress:
    """Read the progress that a ``Reporter`` wrote."""
    return Progress(**content)


_LINES = 12
_MAX_CHARACTERS = 400
_EXCEPTION = re.compile(r"^\s*([\w.]+\.)?\w*(Error|Exception|Interrupt)\b: ")


class LogTail:
    """Last lines of a log, and the last one that names an exception."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        """Start with ``lines``."""
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._exception, self._place, self._count = "", 0, 0
        for line in lines:
            self.append(line)

    def append(self, line: str) -> None:
        """Add a line."""
        self._count += 1
        self._lines.append(line)
        if _EXCEPTION.match(line):
            self._exception, self._place = line, self._count

    def clear(self) -> None:
        """Forget all lines."""
        self._lines.clear()
        self._exception, self._place, self._count = "", 0, 0

    def text(self) -> str:
        """Return the end of the log, indented; the exception comes first if it lies further back."""
        lines = list(self._lines)
        if self._exception and self._place <= self._count - len(lines):
            lines = [self._exception[:_MAX_CHARACTERS], "…", *lines]
        return "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"
