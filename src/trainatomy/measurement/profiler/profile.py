"""Profile one step after the warm-up: the GPU time of each operation, by PyTorch's profiler.

Runs in a process of its own: ``python -m trainatomy.measurement.profiler.profile WORKLOAD.json RESULT.json``.  Kernels
are attributed to the operation that launched them (by kineto's correlation ids) and to that operation's parents.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainatomy.errors import DeviceError
from trainatomy.measurement.process.job import set_environment, warm_up_steps
from trainatomy.processes import end_with_parent
from trainatomy.training.observer import Silent
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from torch.profiler import profile as TorchProfiler

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


class ProfiledStep(Silent):
    """Observer that profiles step ``step``, including what the loop does before ``step_begin``."""

    def __init__(self, profiler: TorchProfiler, step: int) -> None:
        self._profiler, self._step = profiler, step

    def ready(self, model: object, optimizer: object) -> None:
        if self._step == 0:
            self._profiler.start()

    def step_end(self, step: int) -> None:
        import torch

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
        command = [sys.executable, "-m", "trainatomy.measurement.profiler.profile", str(description), str(result)]
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
    import torch
    from torch.profiler import ProfilerActivity

    from trainatomy.measurement.step.initial_values import repeated_random_values
    from trainatomy.measurement.step.runner import start_cuda
    from trainatomy.training import model as models
    from trainatomy.training import run as steps
    from trainatomy.training.quantization import load_on_device

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
