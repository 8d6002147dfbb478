"""What a worker is asked to do, and how: plain values that both sides of the process boundary share."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from trainatomy import errors
from trainatomy.results.bill import Measurement

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping
    from pathlib import Path

Stacks = Literal["none", "python", "cpp"]
STACKS: tuple[Stacks, ...] = get_args(Stacks)
DEFAULT_STEPS = 4
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Both are read (c10/cuda/CUDAAllocatorConfig.h, torch 2.9-2.13); the second is the older name and wins."""


@dataclass(frozen=True, slots=True)
class Job:
    """One training to run on the GPU of this process.

    ``workload``: the mapping of a workload file; ``steps``: optimizer steps where the workload does not say; ``tape``:
    where to keep the stream of allocations, with ``stacks`` beside each; ``alone``: no other process uses the card
    meanwhile.
    """

    workload: Mapping[str, Any]
    steps: int = DEFAULT_STEPS
    tape: Path | None = None
    stacks: Stacks = "none"
    alone: bool = True


def set_environment(environment: MutableMapping[str, str], allocator: str) -> None:
    """Set what PyTorch's allocator reads when it is first used: the workload's options, and nobody else's."""
    for name in ALLOCATOR_VARIABLES:
        environment.pop(name, None)
        if allocator:
            environment[name] = allocator


def write_result(path: Path, result: Measurement | errors.TrainatomyError) -> None:
    """Write a measurement, or the error that took its place, as JSON; the file is there whole or not at all."""
    content: dict[str, Any]
    if isinstance(result, Measurement):
        content = {"measurement": asdict(result)}
    else:
        content = {"error": type(result).__name__, "message": str(result)}
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)


def read_result(path: Path) -> Measurement:
    """Read what ``write_result`` wrote; raises the error if it is one."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if "measurement" in content:
        return Measurement(**content["measurement"])
    kind = getattr(errors, content["error"], errors.TrainatomyError)
    raise kind(content["message"])
