"""A predicted step as a trace for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

The format is Chrome's trace events: the CPU and each CUDA stream are threads of one process, memory by component is a
counter.  Times are in microseconds from the begin of the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from trainatomy.reporters.labels import PHASES, component
from trainatomy.results.detail import Detail, TimedOperation
from trainatomy.results.prediction import Prediction

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
    """Yield the bytes allocated by component whenever an operation of the step begins to be launched."""
    changes: dict[int, list[tuple[str, int]]] = {}
    for one in detail.allocations:
        title = component(detail.sources[one.source].component).title
        changes.setdefault(one.born, []).append((title, one.bytes))
        if one.died >= 0:
            changes.setdefault(one.died, []).append((title, -one.bytes))
    totals: dict[str, int] = {title: 0 for some in changes.values() for title, _ in some}
    done = 0
    for timed in detail.timed:
        if timed.event < done:
            continue  # a micro-batch that is repeated
        for event in range(done, timed.event):
            for title, size in changes.get(event, ()):
                totals[title] += size
        done = timed.event
        yield {"ph": "C", "pid": _PROCESS, "name": "allocated bytes", "ts": _us(timed.launched), "args": dict(totals)}


def _slice(thread: int, name: str, begin: float, seconds: float, about: dict[str, str]) -> Event:
    found = {"ph": "X", "pid": _PROCESS, "tid": thread, "name": name, "ts": _us(begin), "dur": _us(seconds)}
    return {**found, "args": about} if about else found


def _us(seconds: float) -> float:
    return round(seconds * _MICROSECONDS, 3)
