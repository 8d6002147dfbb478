"""Profile one step after the warm-up: the GPU time of each operation, by PyTorch's profiler.

Runs in a process of its own: ``python -m trainatomy.measurement.profile WORKLOAD.json RESULT.json``.  Kernels
are attributed to the operation that launched them (by kineto's correlation ids) and to that operation's parents.

Match the operations of a profile with the predicted ones, one by one.

The profiler sees a tree (``aten::linear`` calls ``aten::addmm``), the prediction the level below autograd.  Walking
down, the first node whose name is predicted is the operation, unless it contains another of its own name, which then is
(autocast calls the operator again after it has cast the arguments); kernels above such nodes match no operation.  Both
lists are then aligned in order, by name and by the shapes of the tensors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as TorchProfiler

from trainatomy.analysis.operations import Profile
from trainatomy.errors import DeviceError
from trainatomy.measurement.process.job import set_environment, warm_up_steps
from trainatomy.measurement.step.building import repeated_random_values
from trainatomy.measurement.step.runner import start_cuda
from trainatomy.operators.counts import count
from trainatomy.processes import end_with_parent
from trainatomy.results.operations import Call, Joined, Operations
from trainatomy.training import model as models
from trainatomy.training import run as steps
from trainatomy.training.observer import Observer
from trainatomy.training.quantization import load_on_device
from trainatomy.workload.schema import Workload

_LOG_LINES = 12
_ROUNDING = 1e-4
UNATTRIBUTED = "kernels that no operation launched"


class Profiled(NamedTuple):
    """A node of the profiler's tree: one operation.

    Attributes:
        name: Name of the operator.
        shapes: Shapes of its arguments (``()`` for one that is not a tensor).
        seconds: GPU seconds of the kernels, memory copies and fills that it launched itself.
        children: The operations that it called.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    seconds: float
    children: tuple[Profiled, ...] = ()

    @property
    def total_seconds(self) -> float:
        """GPU seconds including all operations that it called."""
        return self.seconds + sum(child.total_seconds for child in self.children)


class ProfiledStep(Observer):
    """Observer that profiles step ``step``, including what the loop does before ``step_begin``."""

    def __init__(self, profiler: TorchProfiler, step: int) -> None:
        self._profiler, self._step = profiler, step

    def ready(self, model: object, optimizer: object) -> None:
        if self._step == 0:
            self._profiler.start()

    def step_end(self, step: int) -> None:
        if step in (self._step - 1, self._step):
            torch.cuda.synchronize()
        if step == self._step - 1:
            self._profiler.start()
        elif step == self._step:
            self._profiler.stop()


def profile(workload: Workload, *, time_limit: float | None = None) -> tuple[Profiled, ...]:
    """Run ``workload`` in a fresh process on this machine's GPU and profile a step after its warm-up.

    Raises:
        DeviceError: The process failed or did not end within ``time_limit`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder:
        description, result = Path(folder, "workload.json"), Path(folder, "result.json")
        description.write_text(json.dumps(workload.to_mapping(), default=str), encoding="utf-8")
        command = [sys.executable, "-m", "trainatomy.measurement.profile", str(description), str(result)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=time_limit, check=False)
        except subprocess.TimeoutExpired as error:
            raise DeviceError(
                f"Profiling did not end within {time_limit:g} s. Allow more time, or describe a smaller training."
            ) from error
        if ended.returncode or not result.exists():
            log = "\n".join(f"  {line}" for line in ended.stderr.strip().splitlines()[-_LOG_LINES:])
            raise DeviceError(f"profiling failed (exit code {ended.returncode}):\n{log}")
        return tuple(map(_from_json, json.loads(result.read_text(encoding="utf-8"))))


def run(workload: Workload) -> tuple[Profiled, ...]:
    """Profile in this process; nothing may have used CUDA in it."""
    start_cuda(workload)
    torch.manual_seed(workload.train.seed)
    step = warm_up_steps(workload)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
    with repeated_random_values():
        model = models.build_model(workload)
    model = load_on_device(workload, model, "cuda")
    steps.run(workload, model, device="cuda", steps=step + 1, observer=ProfiledStep(profiler, step))
    return tree(profiler.events() or ())


def tree(events: Iterable[Any]) -> tuple[Profiled, ...]:
    """Return the CPU events of a profile (``torch.autograd.profiler_util.FunctionEvent``) in order, with children.

    The last one, ``UNATTRIBUTED``, has the GPU time that no CPU event launched.  The profiler reports microseconds.  A
    named range (``record_function``) also has a GPU event of the same name, which is not a kernel.
    """
    known = list(events)
    on_cpu = [event for event in known if _is_on_cpu(event)]
    names = {event.name for event in on_cpu}
    roots = sorted((event for event in on_cpu if event.cpu_parent is None), key=_start)
    found = tuple(_node(root) for root in roots)
    on_gpu = sum(_microseconds(event) for event in known if not _is_on_cpu(event) and event.name not in names) / 1e6
    left = on_gpu - sum(root.total_seconds for root in found)
    return found if left < _ROUNDING * on_gpu else (*found, Profiled(UNATTRIBUTED, (), left))


def _node(event: Any) -> Profiled:
    seconds = sum(kernel.duration for kernel in event.kernels if kernel.name != event.name) / 1e6
    children = sorted(event.cpu_children, key=_start)
    shapes = tuple(_shape(shape) for shape in event.input_shapes or ())
    return Profiled(event.name, shapes, seconds, tuple(map(_node, children)))


def _microseconds(event: Any) -> float:
    return float(event.time_range.end - event.time_range.start)


def _shape(shape: Any) -> tuple[int, ...]:
    """Return the shape of a tensor; ``()`` for a number or a list of tensors, whose shapes are lists themselves."""
    is_tensor = isinstance(shape, (list, tuple)) and all(isinstance(size, int) for size in shape)
    return tuple(shape) if is_tensor else ()


def _start(event: Any) -> float:
    return float(event.time_range.start)


def _is_on_cpu(event: Any) -> bool:
    return str(event.device_type).endswith("CPU")


def _from_json(row: Sequence[Any]) -> Profiled:
    name, shapes, seconds, children = row
    return Profiled(name, tuple(map(tuple, shapes)), seconds, tuple(map(_from_json, children)))


def main(arguments: Sequence[str]) -> int:
    """Run the process that uses the GPU."""
    description, result = map(Path, arguments)
    mapping = json.loads(description.read_text(encoding="utf-8"))
    set_environment(os.environ, mapping.get("allocator", ""))
    result.write_text(json.dumps(run(Workload.from_mapping(mapping))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    end_with_parent()
    raise SystemExit(main(sys.argv[1:]))


_MAX_EDITS = 1500
_Key = tuple[str, tuple[tuple[int, ...], ...]]
_FILL = "a fill"
_FILLS = "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full zero_ fill_ scalar_tensor arange"
_CANONICAL = {
    **{f"aten::{name}": _FILL for name in _FILLS.split()},
    "aten::_index_put_impl_": "aten::index_put_",
    "aten::native_batch_norm": "aten::cudnn_batch_norm",
    "aten::native_batch_norm_backward": "aten::cudnn_batch_norm_backward",
}
"""Canonical names of operators that run the same kernel: the prediction reaches a fill by another path than CUDA's
composite operators (``new_ones`` for ``ones``), and a GPU computes batch norm with cuDNN."""


class _Measured(NamedTuple):
    name: str
    shapes: tuple[tuple[int, ...], ...]
    seconds: float


def join(operations: Operations, tree: Iterable[Profiled]) -> Profile:
    """Return GPU seconds of each operation in the profile (mean of its repeats), and the unmatched calls."""
    kinds = [count(call).kind for call in operations.calls]
    lists = {call.name for call in operations.calls if call.lengths}
    order = [index for index in operations.unrolled() if kinds[operations.operations[index].call] in _PROFILED_KINDS]
    predicted = [_predicted_key(operations, index, lists) for index in order]
    names = {name for name, _ in predicted}
    measured = [row for root in tree for row in _walk(root, names)]
    found: dict[int, list[float]] = defaultdict(list)
    used: set[int] = set()
    known = [position for position, row in enumerate(measured) if _canonical(row.name) in names]
    keys = [_key(measured[position].name, measured[position].shapes, lists) for position in known]
    for position, other in _pairs(predicted, keys):
        found[order[position]].append(measured[known[other]].seconds)
        used.add(known[other])
    matched = sum(len(times) for times in found.values())
    seconds: list[float | None] = [None] * len(operations.operations)
    for index, times in found.items():
        seconds[index] = sum(times) / len(times)
    missing = Counter(operations.calls[operations.operations[index].call].name for index in order if index not in found)
    return Profile(
        seconds,
        Joined(
            matched,
            len(order),
            sum(measured[position].seconds for position in used),
            sum(row.seconds for row in measured),
            dict(missing.most_common()),
            dict(Counter(row.name for i, row in enumerate(measured) if i not in used and row.seconds).most_common()),
        ),
    )


_PROFILED_KINDS = frozenset({"kernel", "transfer", "read"})


def _predicted_key(operations: Operations, index: int, lists: set[str]) -> _Key:
    call = operations.calls[operations.operations[index].call]
    name = "aten::fill_" if _is_fill_from_cpu(call) else call.name
    return _key(name, tuple(array.shape for array in call.inputs), lists)


def _is_fill_from_cpu(call: Call) -> bool:
    """Return whether a copy is of one number on the CPU, which a real step fills in (``tensor[:, 0] = number``)."""
    source = call.inputs[-1] if call.name == "aten::copy_" else None
    return source is not None and source.on_host and not any(source.strides) and not call.inputs[0].on_host


def _canonical(name: str) -> str:
    return _CANONICAL.get(name, name)


def _key(name: str, shapes: tuple[tuple[int, ...], ...], lists: set[str]) -> _Key:
    """Return the name and shapes to match by.

    To the profiler numbers and 0-dimensional tensors look the same, lists have no shapes, and some fills receive the
    shape as numbers.
    """
    name = _canonical(name)
    return name, () if name in lists or name == _FILL else tuple(shape for shape in shapes if shape)


def _walk(node: Profiled, names: set[str]) -> Iterator[_Measured]:
    if _canonical(node.name) in names and not _contains(node, node.name):
        yield _Measured(node.name, node.shapes, node.total_seconds)
        return
    if node.seconds:
        yield _Measured(node.name, node.shapes, node.seconds)
    for child in node.children:
        yield from _walk(child, names)


def _contains(node: Profiled, name: str) -> bool:
    return any(child.name == name or _contains(child, name) for child in node.children)


def _pairs(first: list[_Key], second: list[_Key]) -> Iterator[tuple[int, int]]:
    """Yield matching positions.

    They are equal by name and shapes in the longest common subsequence; in the gaps between, by name, where both sides
    have a name equally often.
    """
    i = j = 0
    for a, b in [*_longest_common(first, second), (len(first), len(second))]:
        others = _by_name(second, j, b)
        for name, positions in _by_name(first, i, a).items():
            if len(positions) == len(others.get(name, ())):
                yield from zip(positions, others[name], strict=True)
        if a < len(first) and b < len(second):
            yield a, b
        i, j = a + 1, b + 1


def _by_name(keys: list[_Key], start: int, end: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for position in range(start, end):
        found[keys[position][0]].append(position)
    return found


def _longest_common(first: list[_Key], second: list[_Key]) -> list[tuple[int, int]]:
    """Return the index pairs of the longest common subsequence.

    Uses the greedy algorithm of Myers ("An O(ND) Difference Algorithm and Its Variations", 1986).  It is fast for
    nearly equal lists and does not prefer long runs, which in a step that repeats layer by layer may lie in different
    layers.  Stops at ``_MAX_EDITS`` differences and returns what it found up to there.
    """
    reach, history = {1: 0}, []
    for edits in range(min(len(first) + len(second), _MAX_EDITS) + 1):
        history.append(dict(reach))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (
                diagonal != edits and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1)
            )
            i = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            while i < len(first) and i - diagonal < len(second) and first[i] == second[i - diagonal]:
                i += 1
            reach[diagonal] = i
            if i >= len(first) and i - diagonal >= len(second):
                return _backtrack(history, i, i - diagonal)
    diagonal = max(reach, key=lambda k: 2 * reach[k] - k)
    return _backtrack(history, reach[diagonal], reach[diagonal] - diagonal)


def _backtrack(history: list[dict[int, int]], i: int, j: int) -> list[tuple[int, int]]:
    """Return the pairs on the path that ends at (i, j)."""
    pairs = []
    for edits in range(len(history) - 1, -1, -1):
        reach, diagonal = history[edits], i - j
        down = diagonal == -edits or (diagonal != edits and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1))
        before = diagonal + 1 if down else diagonal - 1
        start = reach[before]
        begin = start if down else start + 1
        while i > begin and edits:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        if not edits:
            pairs += [(position, position) for position in range(i - 1, -1, -1)]
            break
        i, j = start, start - before
    return pairs[::-1]
