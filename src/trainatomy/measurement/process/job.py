"""What a worker is asked to do, and how: plain values that both sides of the process boundary share."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from trainatomy import errors
from trainatomy.results.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from pydantic import TypeAdapter

    from trainatomy.workload.schema import Workload

Stacks = Literal["none", "python", "cpp"]
STACKS: tuple[Stacks, ...] = get_args(Stacks)
DEFAULT_STEPS = 4
WARM_UP_STEPS = 2
"""Steps that load kernels, make optimizer states and grow the allocator's cache; not timed."""
SCALED_WARM_UP_STEPS = 7
"""With float16 gradients: a scale that starts too high skips its first steps, and with them the optimizer's states."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Both are read (c10/cuda/CUDAAllocatorConfig.h, torch 2.9-2.13); the second is the older name and wins."""


@dataclass(frozen=True, slots=True)
class Job:
    """One training to run on the GPU of this process.

    ``workload``: the mapping of a workload file; ``steps``: optimizer steps where the workload does not say;
    ``most_steps`` and ``seconds``: then more of them, while those that are timed took less than so long together;
    ``record``: have PyTorch record its allocations, and draw the bill from them; ``tape``: a file for the record, with
    ``stacks`` beside each allocation; ``alone``: no other process uses the card meanwhile.
    """

    workload: Mapping[str, Any]
    steps: int = DEFAULT_STEPS
    trace: Path | None = None
    stacks: Stacks = "none"
    alone: bool = True
    record: bool = False
    most_steps: int = 0
    seconds: float = 0.0

    @property
    def recorded(self) -> bool:
        """Whether allocations are recorded: for their bill, or to be kept."""
        return self.record or self.trace is not None

    def to_json(self) -> str:
        """One line."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)}, default=str)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """What ``to_json`` wrote."""
        content = json.loads(text)
        trace = content.pop("trace")
        return cls(**content, trace=None if trace is None else Path(trace))


def warm_up_steps(workload: Workload) -> int:
    """Steps that are not timed."""
    scaled = workload.mode == "training" and workload.train.fp16
    return SCALED_WARM_UP_STEPS if scaled else WARM_UP_STEPS


def set_environment(environment: MutableMapping[str, str], allocator: str) -> None:
    """Set what PyTorch's allocator reads when it is first used: the workload's options, and nobody else's."""
    for name in ALLOCATOR_VARIABLES:
        environment.pop(name, None)
        if allocator:
            environment[name] = allocator


def to_plain(result: Measurement | errors.TrainatomyError) -> dict[str, Any]:
    """A measurement, or the error that took its place, as plain types."""
    if isinstance(result, Measurement):
        return {"measurement": asdict(result)}
    return {"error": type(result).__name__, "message": str(result)}


def from_plain(content: Mapping[str, Any]) -> Measurement:
    """What ``to_plain`` made, by way of JSON or not; raises the error if it is one."""
    if "measurement" in content:
        measurement: Measurement = _measurements().validate_python(content["measurement"])
        return measurement
    kind = getattr(errors, content["error"], errors.TrainatomyError)
    raise kind(content["message"])


def write_result(path: Path, result: Measurement | errors.TrainatomyError) -> None:
    """Write a measurement, or the error that took its place, as JSON; the file is there whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(to_plain(result)), encoding="utf-8")
    draft.replace(path)


def read_result(path: Path) -> Measurement:
    """Read what ``write_result`` wrote; raises the error if it is one."""
    return from_plain(json.loads(path.read_text(encoding="utf-8")))


@cache
def _measurements() -> TypeAdapter[Measurement]:
    """Reads dataclasses within dataclasses; what a file of an earlier version lacks has its default."""
    from pydantic import TypeAdapter

    return TypeAdapter(Measurement)
