"""A prediction for other programs' viewers: PyTorch's memory viewer, Perfetto, Prometheus.

A predicted training as a memory snapshot of PyTorch, for https://pytorch.org/memory_viz and its other readers.

The format is that of ``torch.cuda.memory._snapshot`` (torch/csrc/cuda/memory_snapshot.cpp, torch 2.9-2.13).  The viewer
(torch/utils/viz/MemoryViz.js) reads pickles of the protocols 2 to 4; it colours allocations by ``category``, and fails
unless some entry has the category ``unknown``.

A predicted step as a trace for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

The format is Chrome's trace events: the CPU and each CUDA stream are threads of one process, memory by component is a
counter.  Times are in microseconds from the begin of the step.

Records as OpenMetrics text, for Prometheus (its textfile collector, or a scrape of a file that is served).

Source: the OpenMetrics specification 1.0: a family has its TYPE, UNIT and HELP, names end with their unit, and the text
ends with ``# EOF``.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

from trainatomy.reporters.labels import PHASES, component
from trainatomy.results.prediction import Prediction
from trainatomy.results.record import History, Summary
from trainatomy.results.trace import (
    PRIVATE_POOL,
    Allocation,
    Detail,
    Segment,
    SegmentEvent,
    Source,
    TimedOperation,
    pool_of,
)

PROTOCOL = 4
_DEVICE = 0
_UNKNOWN = "unknown"


def memory_snapshot(detail: Detail) -> bytes:
    """Return the pickle of a snapshot.

    An allocation has two frames: its operation in its module, and what it holds.  ``time_us`` counts events, because
    not all of them have a predicted time.
    """
    frames = [_frames(source) for source in detail.sources]
    content = {
        "segments": [_segment(segment, detail.allocations, frames) for segment in detail.segments],
        "device_traces": [list(_entries(detail, frames))],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": detail.allocator,
            "expandable_segments": "expandable_segments:True" in detail.allocator,
        },
    }
    return pickle.dumps(content, protocol=PROTOCOL)


def _frames(source: Source) -> list[dict[str, Any]]:
    step = "before the first step" if source.step < 0 else f"step {source.step + 1}"
    phase = PHASES.get(source.phase, source.phase)
    return [
        {"name": source.operation or "(no operation)", "filename": source.module or "(no module)", "line": 0},
        {"name": f"{component(source.component).title}: {source.line}", "filename": f"{step}, {phase}", "line": 0},
    ]


def _entries(detail: Detail, frames: Sequence[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the entries of the trace: what the driver was asked for comes before the event that needed it."""
    born = {each.born: each for each in detail.allocations}
    died = {each.died: each for each in detail.allocations if each.died >= 0}
    driver: dict[int, list[SegmentEvent]] = {}
    for one in detail.segment_events:
        driver.setdefault(one.event, []).append(one)
    for event in range(detail.events):
        for one in driver.get(event, ()):
            yield _entry(one.action, one.address, one.bytes, one.stream, event, [], _UNKNOWN)
        if event in born:
            yield _of_allocation("alloc", born[event], event, detail, frames)
        if event in died:
            yield _of_allocation("free_requested", died[event], event, detail, frames)
            yield _of_allocation("free_completed", died[event], event, detail, frames)


def _of_allocation(
    action: str, one: Allocation, event: int, detail: Detail, frames: Sequence[list[dict[str, Any]]]
) -> dict[str, Any]:
    category = component(detail.sources[one.source].component).title
    return _entry(action, one.address, one.requested, one.stream, event, frames[one.source], category)


def _entry(
    action: str, address: int, size: int, stream: int, event: int, frames: list[dict[str, Any]], category: str
) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": stream % PRIVATE_POOL,
        "time_us": event,
        "pool_id": (0, pool_of(stream)),
        "frames": frames,
        "category": category,
    }


def _segment(
    segment: Segment, allocations: Sequence[Allocation], frames: Sequence[list[dict[str, Any]]]
) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for block in segment.blocks:
        held = allocations[block.allocation] if block.allocation >= 0 else None
        blocks.append(
            {
                "address": block.address,
                "size": block.bytes,
                "requested_size": held.requested if held else 0,
                "state": "active_allocated" if held else "inactive",
                "frames": frames[held.source] if held else [],
            }
        )
    active = [block for block in blocks if block["state"] == "active_allocated"]
    allocated = sum(block["size"] for block in active)
    return {
        "device": _DEVICE,
        "address": segment.address,
        "total_size": segment.bytes,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block["requested_size"] for block in active),
        "stream": segment.stream % PRIVATE_POOL,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": (0, pool_of(segment.stream)),
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": blocks,
    }


_PROCESS = 0
_PHASES, _CPU, _FIRST_STREAM = 0, 1, 2
_MICROSECONDS = 1e6

Event = dict[str, Any]


def step_trace(prediction: Prediction, detail: Detail) -> bytes:
    """Return the step of ``detail`` as JSON in UTF-8.

    Raises:
        ValueError: The detail has no times.
    """
    if not detail.timed:
        raise ValueError("a trace needs predicted times")
    streams = sorted({one.stream for one in detail.timed}, key=lambda stream: (stream < 0, abs(stream)))
    threads = {stream: _FIRST_STREAM + place for place, stream in enumerate(streams)}
    events = [
        *_names(prediction, threads),
        *_phases(detail.timed, detail.step_seconds),
        *_launches(detail.timed, threads),
        *_memory(detail),
    ]
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"source": "predicted by trainatomy, not measured", "name": prediction.name}
        | {f"version of {name}": version for name, version in prediction.versions.items()},
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _names(prediction: Prediction, threads: dict[int, int]) -> Iterator[Event]:
    process = f"{prediction.name}, rank {prediction.rank}, predicted for {prediction.gpu.name}"
    yield _named("process_name", 0, process)
    titles = {_PHASES: "phases", _CPU: "CPU: launches"}
    titles |= {thread: _stream_title(stream) for stream, thread in threads.items()}
    for thread, title in titles.items():
        yield _named("thread_name", thread, title)
        yield {"ph": "M", "pid": _PROCESS, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _stream_title(stream: int) -> str:
    return f"GPU: stream {stream}" if stream >= 0 else f"GPU: communication {-stream}"


def _named(kind: str, thread: int, name: str) -> Event:
    return {"ph": "M", "pid": _PROCESS, "tid": thread, "name": kind, "args": {"name": name}}


def _phases(timed: Sequence[TimedOperation], end: float) -> Iterator[Event]:
    """Yield a slice for each stretch of one phase, as the CPU launches it."""
    begins = [(phase, next(some).launched) for phase, some in groupby(timed, key=lambda one: one.phase)]
    ends = [begin for _, begin in begins[1:]] + [max(end, begins[-1][1])]
    for (phase, begin), over in zip(begins, ends, strict=True):
        yield _slice(_PHASES, PHASES.get(phase, phase), begin, over - begin, {})


def _launches(timed: Sequence[TimedOperation], threads: dict[int, int]) -> Iterator[Event]:
    """Yield the launch and the kernels of each operation, joined by an arrow."""
    for number, one in enumerate(timed):
        about = {"module": one.module, "phase": one.phase}
        yield _slice(_CPU, one.name, one.launched, one.launch_seconds, about)
        if not one.seconds:
            continue
        thread = threads[one.stream]
        yield _slice(thread, one.name, one.begin, one.seconds, about)
        arrow = {"name": "launch", "cat": "launch", "id": number, "pid": _PROCESS}
        yield {**arrow, "ph": "s", "tid": _CPU, "ts": _us(one.launched)}
        yield {**arrow, "ph": "f", "bp": "e", "tid": thread, "ts": _us(one.begin)}


def _memory(detail: Detail) -> Iterator[Event]:
    """Yield the bytes allocated by component when each operation of the step is launched, and their peak in it."""
    changes: dict[int, list[tuple[str, int]]] = {}
    for one in detail.allocations:
        title = component(detail.sources[one.source].component).title
        changes.setdefault(one.born, []).append((title, one.bytes))
        if one.died >= 0:
            changes.setdefault(one.died, []).append((title, -one.bytes))
    totals: dict[str, int] = {title: 0 for some in changes.values() for title, _ in some}
    held = done = 0
    during = 0.0
    for timed in detail.timed:
        if timed.event < done:
            continue  # a micro-batch that is repeated
        before = highest = held
        at_peak: dict[str, int] = {}
        for event in range(done, timed.event):
            for title, size in changes.get(event, ()):
                totals[title] += size
                held += size
            if held > highest:
                highest, at_peak = held, dict(totals)
        if done and highest > max(before, held):  # a workspace, which is freed before the next operation
            yield _counter(during, at_peak)
        done, during = timed.event, timed.launched + timed.launch_seconds / 2
        yield _counter(timed.launched, dict(totals))


def _counter(seconds: float, totals: dict[str, int]) -> Event:
    return {"ph": "C", "pid": _PROCESS, "name": "allocated bytes", "ts": _us(seconds), "args": totals}


def _slice(thread: int, name: str, begin: float, seconds: float, about: dict[str, str]) -> Event:
    found = {"ph": "X", "pid": _PROCESS, "tid": thread, "name": name, "ts": _us(begin), "dur": _us(seconds)}
    return {**found, "args": about} if about else found


def _us(seconds: float) -> float:
    return round(seconds * _MICROSECONDS, 3)


Value = Callable[[Summary], float | int | None]

FAMILIES: tuple[tuple[str, str, str, Value], ...] = (
    (
        "trainatomy_device_memory_bytes",
        "bytes",
        "Device memory at the peak of the measured run, as in nvidia-smi.",
        lambda one: one.device_bytes,
    ),
    (
        "trainatomy_predicted_device_memory_bytes",
        "bytes",
        "Device memory as predicted for the same run.",
        lambda one: one.predicted_device_bytes,
    ),
    (
        "trainatomy_prediction_gap_ratio",
        "ratio",
        "Predicted over measured device memory, minus 1.",
        lambda one: one.gap,
    ),
    ("trainatomy_step_seconds", "seconds", "Measured time of an optimizer step.", lambda one: one.step_seconds),
    (
        "trainatomy_samples_per_second",
        "",
        "Measured samples per second.",
        lambda one: one.samples_per_second,
    ),
    (
        "trainatomy_out_of_memory",
        "",
        "1 if the run ran out of memory, else 0.",
        lambda one: int(one.status == "out of memory"),
    ),
)
"""Name, unit, description and value of each metric."""


def openmetrics(history: History) -> str:
    """Return the records of a history as gauges, each with the time of its record."""
    lines: list[str] = []
    for name, unit, help, value in FAMILIES:
        lines += [f"# TYPE {name} gauge", *([f"# UNIT {name} {unit}"] if unit else []), f"# HELP {name} {help}"]
        for one in history.records:
            found = value(one)
            if found is not None:
                lines.append(f"{name}{{{_labels(one)}}} {found!r} {_timestamp(one)}")
    return "\n".join([*lines, "# EOF"]) + "\n"


def _labels(one: Summary) -> str:
    labels = {"record": one.id, "name": one.name, "gpu": one.gpu, "status": one.status, "group": one.group}
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _timestamp(one: Summary) -> str:
    return f"{datetime.fromisoformat(one.created).timestamp():.0f}"
