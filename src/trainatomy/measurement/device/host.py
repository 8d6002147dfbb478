"""This machine's processors: their pace, other work on them, and threads that wait for one.

Load of this machine's processors by other work, from Linux's counters.

``/proc/stat`` counts the whole machine also inside most containers, and so shows neighbours that a container hides.

A fixed piece of CPU work, timed to know how fast this host is at the moment.

The work is what launching kernels is: Python calls, PyTorch's dispatcher, nodes of autograd, small allocations, and the
autograd engine's way back.  It runs on tensors of the CPU, so that it neither waits for a GPU nor gives it work.
Tensors of four numbers keep arithmetic and the number of threads out of it.

A part runs on the thread that calls it, and a part on the thread from which autograd launches the backward pass on the
GPU: these are two processors, and each may share its core with somebody else's work.  An empty tensor of the GPU leads
there; it takes no memory and launches nothing.

On each thread, some of the work is run before what is timed.  What a training leaves in the CPU's caches makes the
first pass up to 1.6 times as long, and the second no longer than a third one: its time is the host's own, whatever ran
before.

Times that threads of this process waited for a processor while they had work to do.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainatomy.catalog.machines import reference_host
from trainatomy.results.measurement import HostPace

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_STAT = Path("/proc/stat")
_CGROUP_STATS = (Path("/sys/fs/cgroup/cpu.stat"), Path("/sys/fs/cgroup/cpu/cpu.stat"))


@dataclass(frozen=True, slots=True)
class HostLoad:
    """The load of the processors over a stretch of time.

    Attributes:
        others_share: Time that processes other than this one were running, as a share of all processors' time;
            ``None``: not known (not Linux).
        stolen_share: Time that the machine's hypervisor gave to other machines, likewise.
        throttled_share: Share of the time in which the container's limit stopped its processes.
    """

    others_share: float | None
    stolen_share: float | None
    throttled_share: float


@dataclass(frozen=True, slots=True)
class _Counters:
    """Seconds so far: at work and stolen over all processors, of this process, and stopped by a limit."""

    at: float
    busy: float
    stolen: float
    own: float
    stopped: float
    processors: int


class LoadMeter:
    """Reads the load since it was made, or since it was last read."""

    def __init__(self) -> None:
        self._before = _read()

    def read(self) -> HostLoad:
        """Return the load since the last reading."""
        before, self._before = self._before, _read()
        after = self._before
        passed = after.at - before.at
        if not after.processors or passed <= 0:
            return HostLoad(None, None, 0.0)
        total = passed * after.processors
        others = max(after.busy - before.busy - (after.own - before.own), 0.0) / total
        stolen = max(after.stolen - before.stolen, 0.0) / total
        return HostLoad(min(others, 1.0), min(stolen, 1.0), min((after.stopped - before.stopped) / passed, 1.0))


def _read() -> _Counters:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    busy, stolen, processors = _machine()
    return _Counters(time.monotonic(), busy, stolen, own, _stopped_seconds(), processors)


def _machine() -> tuple[float, float, int]:
    """Return seconds at work, seconds stolen, and the number of processors; zeros where there is no ``/proc/stat``."""
    try:
        lines = _STAT.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0, 0.0, 0
    user, nice, system, _idle, _waiting, irq, softirq, steal, *_ = map(int, lines[0].split()[1:])
    processors = sum(line.startswith("cpu") for line in lines[1:])
    return (user + nice + system + irq + softirq) / _TICKS_PER_SECOND, steal / _TICKS_PER_SECOND, processors


def _stopped_seconds() -> float:
    """Return for how long the limit of the container's processors has stopped it."""
    for path, unit in zip(_CGROUP_STATS, (1e-6, 1e-9), strict=True):
        try:
            values = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):
            continue
        return float(values.get("throttled_usec", values.get("throttled_time", 0))) * unit
    return 0.0


PROBE = "launches/2"
"""Name and version of the work below; change it with the work."""
LAYERS = 2
"""Layers forward and backward on the calling thread."""
BACKWARD_LAYERS = 8
"""Layers forward on autograd's thread."""
SHARE = 0.05
"""Time of a probe as a share of the time since the last one; it is no part of the steps.

With a fifth of the readings, a single one of several milliseconds was half of those beside a training."""
REPEATS = 3
"""Probes before and after the timed steps."""


@cache
def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Return a scale and a shift that need gradients, and the input of the first layer."""
    with torch.inference_mode(False):
        leaves = (torch.full((4,), value, dtype=torch.float32, device="cpu") for value in (0.5, 0.25))
        scale, shift = (leaf.requires_grad_() for leaf in leaves)
        return scale, shift, torch.ones(4, dtype=torch.float32, device="cpu")


@cache
def _empty(device: str) -> Tensor:
    """Return a tensor without numbers, which needs a gradient."""
    with torch.inference_mode(False):
        return torch.empty(0, device=device).requires_grad_()


def _layer(value: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (value * scale + shift).view(2, 2).transpose(0, 1).tanh().reshape(4)


def _work() -> None:
    scale, shift, value = _tensors()
    for _ in range(LAYERS):
        value = _layer(value, scale, shift)
    torch.autograd.grad(value.sum(), (scale, shift))


class _Visit(torch.autograd.Function):
    """Times work on the thread that runs the backward pass of its input's device."""

    seconds = 0.0
    thread = 0

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        scale, shift, value = _tensors()
        with torch.enable_grad():
            for layers in (BACKWARD_LAYERS // 2, BACKWARD_LAYERS):
                began = time.perf_counter()
                for _ in range(layers):
                    _layer(value, scale, shift)
                _Visit.seconds = time.perf_counter() - began
        _Visit.thread = threading.get_native_id()
        return gradients[0]


def _visit() -> tuple[float, int]:
    """Return the time of the work on autograd's thread, and that thread's number."""
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu"
    empty = _empty(device)
    torch.autograd.grad(_Visit.apply(empty), empty, grad_outputs=empty.detach())
    return _Visit.seconds, _Visit.thread


def probe_seconds() -> float:
    """Return the time of the work in seconds, after passes that are not timed."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        _work()
        began = time.perf_counter()
        _work()
        return time.perf_counter() - began + _visit()[0]


def launching_threads() -> tuple[int, ...]:
    """Return the numbers of this thread and of the one from which autograd launches."""
    return tuple({threading.get_native_id(), _Visit.thread or threading.get_native_id()})


class HostProbe:
    """Takes the times of a run: several before and after its timed steps, and some between them.

    Between steps the probe runs only when ``SHARE`` of the time since the last one pays for it.
    """

    def __init__(self) -> None:
        self._before: list[float] = []
        self._during: list[float] = []
        self._after: list[float] = []
        self._backward: list[float] = []
        self._ended, self._cost = 0.0, float("inf")
        self._meter: LoadMeter | None = None
        self._load: HostLoad | None = None
        self._threads: ThreadMeter | None = None
        self._waited: float | None = None

    def before(self) -> None:
        """Probe before the first timed step, and begin to watch the load of the machine and waits for a processor."""
        self._run(self._before, REPEATS)
        self._meter = LoadMeter()
        self._threads = ThreadMeter(launching_threads())

    def is_due(self) -> bool:
        """Return whether the time since the last probe pays for another."""
        return not self._ended or time.perf_counter() - self._ended >= self._cost / SHARE

    def between(self) -> None:
        """Probe between two steps."""
        self._run(self._during, 1)

    def after(self) -> None:
        """Read the load during the steps, and probe after the last one."""
        self._load = None if self._meter is None else self._meter.read()
        self._waited = None if self._threads is None else self._threads.read()
        self._run(self._after, REPEATS)

    def result(self) -> HostPace | None:
        """Return what was measured; ``None`` if nothing was."""
        if not (self._before or self._during or self._after):
            return None
        reference, load = reference_host(), self._load
        return HostPace(
            PROBE,
            tuple(self._before),
            tuple(self._during),
            tuple(self._after),
            reference.probe_seconds.get(PROBE),
            others_share=None if load is None else load.others_share,
            stolen_share=None if load is None else load.stolen_share,
            throttled_share=None if load is None else load.throttled_share,
            waited_share=self._waited,
            exponent=reference.pace_exponents.get(PROBE, 1.0),
            backward_seconds=tuple(self._backward),
            backward_reference_share=reference.backward_probe_shares.get(PROBE),
        )

    def _run(self, times: list[float], count: int) -> None:
        began = time.perf_counter()
        for _ in range(count):
            times.append(probe_seconds())
            self._backward.append(_Visit.seconds)
        self._ended = time.perf_counter()
        self._cost = min(self._cost, (self._ended - began) / count)


_TASKS = Path("/proc/self/task")


class ThreadMeter:
    """Reads the scheduler's counters of some threads, since it was made (Linux)."""

    def __init__(self, threads: Iterable[int]) -> None:
        self._before = {thread: times for thread in threads if (times := _times(thread)) is not None}

    def read(self) -> float | None:
        """Return the waits as a share of the time in which the threads ran or waited; ``None``: not known.

        A thread that sleeps, because another one works for it, does neither.
        """
        ran = waited = 0
        for thread, before in self._before.items():
            if (after := _times(thread)) is not None:
                ran += after[0] - before[0]
                waited += after[1] - before[1]
        return waited / (ran + waited) if ran > 0 else None


def _times(thread: int) -> tuple[int, int] | None:
    """Return the nanoseconds that a thread ran and waited; ``None`` where the kernel does not count them."""
    with suppress(OSError, ValueError):
        ran, waited, *_ = map(int, (_TASKS / str(thread) / "schedstat").read_text(encoding="ascii").split())
        return ran, waited
    return None
