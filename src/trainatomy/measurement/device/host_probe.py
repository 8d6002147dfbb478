"""A fixed piece of CPU work, timed to know how fast this host is at the moment.

The work is what launching kernels is: Python calls, PyTorch's dispatcher, nodes of autograd, small allocations, and the
autograd engine's way back.  It runs on tensors of the CPU, so that it neither waits for a GPU nor gives it work, on the
thread that calls it.  Tensors of four numbers keep arithmetic and the number of threads out of it.

One pass is run before the one that is timed.  What a training leaves in the CPU's caches makes the first pass up to 1.6
times as long, and the second no longer than a third one: its time is the host's own, whatever ran before.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

import torch

from trainatomy.catalog.hosts import reference_host
from trainatomy.measurement.device.host_load import HostLoad, LoadMeter
from trainatomy.results.host_pace import HostPace

if TYPE_CHECKING:
    from torch import Tensor

PROBE = "launches/1"
"""Name and version of the work below; change it with the work."""
LAYERS = 2
SHARE = 0.01
"""Share of a training's time that probing may take."""
REPEATS = 3
"""Probes before and after the timed steps."""


@cache
def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Return a scale and a shift that need gradients, and the input of the first layer."""
    with torch.inference_mode(False):
        leaves = (torch.full((4,), value, dtype=torch.float32, device="cpu") for value in (0.5, 0.25))
        scale, shift = (leaf.requires_grad_() for leaf in leaves)
        return scale, shift, torch.ones(4, dtype=torch.float32, device="cpu")


def _layer(value: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (value * scale + shift).view(2, 2).transpose(0, 1).tanh().reshape(4)


def _work() -> None:
    scale, shift, value = _tensors()
    for _ in range(LAYERS):
        value = _layer(value, scale, shift)
    torch.autograd.grad(value.sum(), (scale, shift))


def probe_seconds() -> float:
    """Return the time of the work in seconds, after a pass that is not timed."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        _work()
        began = time.perf_counter()
        _work()
        return time.perf_counter() - began


class HostProbe:
    """Takes the times of a run: several before and after its timed steps, and some between them.

    Between steps the probe runs only when ``SHARE`` of the time since the last one pays for it.
    """

    def __init__(self) -> None:
        self._before: list[float] = []
        self._during: list[float] = []
        self._after: list[float] = []
        self._ended = self._cost = 0.0
        self._meter: LoadMeter | None = None
        self._load: HostLoad | None = None

    def before(self) -> None:
        """Probe before the first timed step, and begin to watch the load of the machine."""
        self._run(self._before, REPEATS)
        self._meter = LoadMeter()

    def is_due(self) -> bool:
        """Return whether the time since the last probe pays for another."""
        return time.perf_counter() - self._ended >= self._cost / SHARE

    def between(self) -> None:
        """Probe between two steps."""
        self._run(self._during, 1)

    def after(self) -> None:
        """Read the load during the steps, and probe after the last one."""
        self._load = None if self._meter is None else self._meter.read()
        self._run(self._after, REPEATS)

    def result(self) -> HostPace | None:
        """Return what was measured; ``None`` if nothing was."""
        if not (self._before or self._during or self._after):
            return None
        reference = reference_host().probe_seconds.get(PROBE)
        load = self._load
        return HostPace(
            PROBE,
            tuple(self._before),
            tuple(self._during),
            tuple(self._after),
            reference,
            others_share=None if load is None else load.others_share,
            stolen_share=None if load is None else load.stolen_share,
            throttled_share=None if load is None else load.throttled_share,
        )

    def _run(self, times: list[float], count: int) -> None:
        began = time.perf_counter()
        times.extend(probe_seconds() for _ in range(count))
        self._ended = time.perf_counter()
        self._cost = (self._ended - began) / count
