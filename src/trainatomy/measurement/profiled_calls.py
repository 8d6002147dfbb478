"""Record the operators that run as ``Call`` values, with the GPU time of each by PyTorch's profiler (CUPTI)."""

from __future__ import annotations

import gzip
import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainatomy.results.operations import Array, Call

MARK = "trainatomy-call"
_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_COST_FREE_ARGUMENTS = frozenset({"device", "layout", "pin_memory", "non_blocking"})
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")


class Sample(NamedTuple):
    """A run of a call: the call's number, the label under which it ran, its kernels and their microseconds."""

    call: int
    label: str
    microseconds: float
    kernels: tuple[str, ...]


class CallRecorder(TorchDispatchMode):
    """Numbers the distinct calls below autograd, and marks each run for the profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Call, int] = {}
        self.label = "hot"
        self._runs: list[tuple[int, str] | None] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        described = arguments_of(func, args, kwargs)
        number = len(self._runs)
        self._runs.append(None)  # stays None if the call raises; its mark is in the trace all the same
        with torch.profiler.record_function(f"{MARK} {number}"):
            result = func(*args, **kwargs)
        call = call_of(func, described, result)
        self._runs[number] = self.calls.setdefault(call, len(self.calls)), self.label
        return result

    def samples(self, events: Iterable[dict[str, Any]]) -> list[Sample]:
        """Return a sample for every run that completed, in launch order, from the profiler's ``events``."""
        found = []
        for name, microseconds, kernels in device_time_by_mark(events):
            number = name.removeprefix(MARK).strip()
            run = self._runs[int(number)] if number.isdigit() else None
            if run is not None:
                found.append(Sample(*run, microseconds, kernels))
        return found


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return a call's inputs, list lengths, other arguments and the positions of written inputs, before it runs."""
    inputs: list[Array] = []
    lengths: list[int] = []
    numbers: list[tuple[str, str]] = []
    written: list[int] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if isinstance(value, torch.Tensor):
            tensors = [value]
        elif isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
            tensors = [item for item in value if isinstance(item, torch.Tensor)]
            lengths.append(len(tensors))
        else:
            if value != argument.default_value and _affects_cost(func._schema.name, argument.name, value):
                numbers.append((argument.name, str(value).replace(";", ",")))
            continue
        for tensor in tensors:
            if writes:
                written.append(len(inputs))
            inputs.append(array_of(tensor))
    return tuple(inputs), tuple(lengths), tuple(numbers), tuple(written)


def _affects_cost(operator: str, name: str, value: Any) -> bool:
    """Return whether a non-tensor argument can change the cost of a kernel; scalar factors of lists cannot.

    A storage (of ``set_``) has no cost, and its text would have each of its bytes.
    """
    if value is None or name in _COST_FREE_ARGUMENTS or isinstance(value, torch.UntypedStorage | torch.TypedStorage):
        return False
    if isinstance(value, list | tuple) and any(isinstance(item, float) for item in value):
        return False
    return not (isinstance(value, float) and operator.startswith(("aten::_foreach", "aten::_fused")))


def call_of(func: Any, described: tuple[Any, ...], result: Any) -> Call:
    """Return the call with its results; storages are numbered by first appearance, so that equal calls are equal."""
    inputs, lengths, numbers, written = described
    outputs = [array_of(tensor) for tensor in tensors_in(result)]
    order: dict[int, int] = {}
    placed = [tensor._replace(storage=order.setdefault(tensor.storage, len(order))) for tensor in (*inputs, *outputs)]
    aliases = [returned.alias_info for returned in func._schema.returns]
    is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    return Call(
        func._schema.name, tuple(placed[: len(inputs)]), tuple(placed[len(inputs) :]), lengths, numbers, None, written,
        is_view,
    )  # fmt: skip


def array_of(tensor: torch.Tensor) -> Array:
    """Return shape, strides, dtype, device and storage (by address) of a tensor."""
    return Array(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        str(tensor.dtype).removeprefix("torch."),
        tensor.element_size(),
        tensor.untyped_storage()._cdata,
        tensor.device.type == "cpu",
    )


def tensors_in(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result, with lists flattened."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [tensor for item in result for tensor in tensors_in(item)]
    return []


@contextmanager
def profiled(into: list[dict[str, Any]]) -> Iterator[None]:
    """Profile the context and add the profiler's events to ``into``; synchronises with the GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile(activities=activities) as profiler:
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        into += read_trace(path)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a Chrome trace that the profiler wrote, gzipped or not."""
    content = path.read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)[
        "traceEvents"
    ]
    return events


def device_time_by_mark(events: Iterable[dict[str, Any]]) -> list[tuple[str, float, tuple[str, ...]]]:
    """Return for each mark its name, and the microseconds and names of the kernels, copies and fills launched inside.

    A GPU event has the correlation id of the CUDA call that launched it, and that call lies inside a mark.  Marks do
    not overlap: the CPU does one thing at a time, also when autograd's thread does it.
    """
    marks = []
    launches: dict[int, float] = {}
    work = []
    for event in events:
        category = event.get("cat")
        if category == "user_annotation" and event["name"].startswith(MARK):
            marks.append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif category in _LAUNCH_CATEGORIES and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event["ts"]
        elif category in _GPU_CATEGORIES:
            work.append((event["ts"], event["args"]["correlation"], event["dur"], event["name"]))
    marks.sort()
    begins = [mark[0] for mark in marks]
    inside: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for _, correlation, duration, name in sorted(work):
        at = launches.get(correlation)
        index = bisect_right(begins, at) - 1 if at is not None else -1
        if at is not None and index >= 0 and at <= marks[index][1]:
            inside[index].append((duration, name))
    return [
        (mark[2], sum(duration for duration, _ in inside[index]), tuple(name for _, name in inside[index]))
        for index, mark in enumerate(marks)
    ]
