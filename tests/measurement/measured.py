"""Made-up measurements: ``RESULT`` is minimal, ``FULL`` has a memory breakdown and all optional fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from trainatomy.results.measurement import Measurement, OtherProcess, Stage
from trainatomy.results.memory import Components, Instant, Line, Memory, ModuleActivations

GIB, MIB = 2**30, 2**20
RESULT = Measurement(
    name="tiny",
    workload={"model": {"class": "BertModel"}},
    status="completed",
    gpu="NVIDIA H200",
    driver="580",
    versions={"torch": "2.11.0"},
    date="2026-11-21",
    peak_allocated_bytes=10,
    peak_reserved_bytes=20,
    device_bytes=None,
    process_bytes=None,
    nvml_used_bytes=None,
    idle_bytes=None,
    context_bytes=None,
    model_bytes=5,
    num_alloc_retries=0,
    step_seconds=0.1,
    steps=4,
    message="",
    tape_file=None,
)
PARTS = Components(
    weights=GIB, optimizer_states=2 * GIB, gradients=GIB, activations=3 * GIB, temporary=0, functionality=32 * MIB,
    cache=224 * MIB, context=768 * MIB,
)  # fmt: skip
MEMORY = Memory(
    peak_allocated_bytes=7 * GIB + 32 * MIB,
    peak_reserved_bytes=7 * GIB + 256 * MIB,
    device_bytes=8 * GIB,
    peak_requested_bytes=7 * GIB,
    model_bytes=GIB,
    components=PARTS,
    lines=(
        Line("weights", "parameters", 768 * MIB, 9),
        Line("weights", "16-bit copies kept by autocast", 256 * MIB, 4),
        Line("functionality", "inputs", 32 * MIB, 2),
    ),
    peak=Instant(1, "backward", "", ""),
    num_alloc_retries=0,
)
FULL = replace(
    RESULT,
    device_bytes=8 * GIB,
    peak_allocated_bytes=MEMORY.peak_allocated_bytes,
    peak_reserved_bytes=MEMORY.peak_reserved_bytes,
    memory=MEMORY,
    modules=(ModuleActivations("layer.*.mlp", 3 * GIB, 12),),
    stages=(Stage("idle", 0, 615 * MIB, 0, 0), Stage("training", 8 * GIB, 9 * GIB, 7 * GIB, 7 * GIB)),
    timed_step_seconds=(0.25, 0.24, 0.27),
    step_seconds=0.25,
    recorded_step_seconds=0.255,
    samples_per_second=16.0,
    tokens_per_second=8192.0,
    neighbours=(OtherProcess(4711, "python", 3 * GIB), OtherProcess(9, "", None)),
    notes=("another process uses the card",),
)


def called_here(_: object, like: object, function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Stand in for ``Processes.call`` in this process, where tests replace what is called."""
    return partial(function, *arguments)
