"""Conversion of an exported Chrome trace back to the events of PyTorch's profiler.

What ``torch.autograd.profiler`` does with kineto's results, done with their export: an event for each operator, CUDA
call, kernel, copy and fill; kernels at the operator that launched them (``External id``); then PyTorch's own nesting.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

_ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")


def events_of(path: Path) -> EventList:
    """Return the nested profiler events of the gzipped trace in ``path``."""
    rows = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    timed = [row for row in rows if row.get("cat") in (*_ON_HOST, *_ON_CARD)]
    begin = min(row["ts"] for row in timed)
    events = [_event(row, begin) for row in timed]
    operators = {event.id: event for event, row in zip(events, timed, strict=True) if _is_operator(row)}
    for event, row in zip(events, timed, strict=True):
        owner = operators.get(row["args"].get("External id", -1))
        if owner is None or _is_operator(row):
            continue
        if row["cat"] in _ON_CARD:
            owner.append_kernel(event.name, 0, row["dur"])
        else:
            event.thread = owner.thread
    found = EventList(events, use_device="cuda")
    found._build_tree()
    return found


def _is_operator(row: dict[str, Any]) -> bool:
    return row["cat"] in ("cpu_op", "user_annotation")


def _event(row: dict[str, Any], begin: float) -> FunctionEvent:
    known = row["args"]
    return FunctionEvent(
        id=known.get("External id" if _is_operator(row) else "correlation", 0),
        name=row["name"],
        thread=row["tid"],
        start_us=row["ts"] - begin,
        end_us=row["ts"] - begin + row["dur"],
        input_shapes=known.get("Input Dims", []),
        device_type=DeviceType.CUDA if row["cat"] in _ON_CARD else DeviceType.CPU,
        use_device="cuda",
    )
