"""Blocks of steps whose phases are timed, with all candidates for the probe of a host's pace between the steps."""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainatomy.training.observer import Silent

BLOCK_SECONDS, LEAST_STEPS, MOST_STEPS, LAUNCHES = 0.8, 8, 80, 30


class Candidates:
    """Candidates for the probe, each timed in seconds; nothing but ``launch`` gives the GPU work."""

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)
        leaves = (torch.empty(0, device=device) for _ in range(3))
        self._scale, self._shift, self._input = leaves
        self._scale.requires_grad_()
        self._shift.requires_grad_()
        self._one = torch.zeros(1, device=device)
        self._inside: list[float] = []
        self._visit = self._visitor()

    def take(self) -> dict[str, float]:
        """Run all candidates once; ``first`` is the shipped probe without its untimed pass."""
        import torch

        from trainatomy.measurement.device import host_probe

        clock, found = time.perf_counter, {}
        with torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            began = clock()
            host_probe._work()
            found["first"] = clock() - began
            began = clock()
            host_probe._work()
            found["main"] = clock() - began
            for name in ("empty_first", "empty"):
                began = clock()
                total = self._empty_forward()
                middle = clock()
                torch.autograd.grad(total, (self._scale, self._shift))
                found[f"{name}_forward"], found[f"{name}_backward"] = middle - began, clock() - middle
            self._inside.clear()
            began = clock()
            torch.autograd.grad(self._visit(self._scale), self._scale, grad_outputs=self._input)
            found["visit"] = clock() - began
            found["thread_first"], found["thread"] = self._inside[-2:]
        began = clock()
        with torch.no_grad():
            for _ in range(LAUNCHES):
                self._one.add_(1.0)
        found["launch"] = clock() - began
        began = clock()
        _python()
        found["python"] = clock() - began
        return found

    def _empty_forward(self) -> Any:
        value = self._input
        for _ in range(4):
            value = (value * self._scale + self._shift).view(0, 1).transpose(0, 1).tanh().reshape(0)
        return value.sum()

    def _visitor(self) -> Any:
        """Return a function whose backward pass times work of the CPU on the thread that autograd uses for the GPU."""
        import torch

        from trainatomy.measurement.device import host_probe

        inside = self._inside

        class Visit(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: Any) -> Any:
                return value.view_as(value)

            @staticmethod
            def backward(ctx: Any, gradient: Any) -> Any:
                scale, shift, value = host_probe._tensors()
                with torch.enable_grad():
                    for _ in range(2):
                        began = time.perf_counter()
                        for _ in range(4):
                            host_probe._layer(value, scale, shift)
                        inside.append(time.perf_counter() - began)
                return gradient

        return Visit.apply


def _python() -> int:
    total = 0
    for number in range(1500):
        total += number & 7
    return total


def threads() -> dict[str, Any]:
    """Return what the scheduler counted so far: seconds run and waited by thread, time of the process, switches."""
    found: dict[str, list[int]] = {}
    for path in Path("/proc/self/task").iterdir():
        with suppress(OSError, ValueError):
            found[path.name] = [int(each) for each in (path / "schedstat").read_text().split()]
    use = resource.getrusage(resource.RUSAGE_SELF)
    own = resource.getrusage(resource.RUSAGE_THREAD)
    return {
        "at": time.perf_counter(),
        "main": str(os.getpid()),
        "schedstat": found,
        "process_seconds": time.process_time(),
        "thread_seconds": time.thread_time(),
        "switches": [use.ru_nvcsw, use.ru_nivcsw, own.ru_nvcsw, own.ru_nivcsw],
    }


class Block(Silent):
    """Times steps, their phases on the CPU, and all candidates between them."""

    def __init__(self, candidates: Candidates, warm_up: int) -> None:
        from trainatomy.measurement.device.host_probe import HostProbe
        from trainatomy.measurement.step.stopwatch import Stopwatch

        self._candidates, self._first = candidates, warm_up
        self._watch, self._probe = Stopwatch(), HostProbe()
        self._began = self._since = self._step_began = 0.0
        self._phase = "other"
        self._step: dict[str, float] = defaultdict(float)
        self._process = self._process_in_steps = 0.0
        self.phases: list[dict[str, float]] = []
        self.wall: list[float] = []
        self.taken: list[list[Any]] = []
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}

    def _enter(self, phase: str) -> None:
        now = time.perf_counter()
        self._step[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def step_begin(self, step: int) -> None:
        import torch

        from trainatomy.measurement.step.timer import EnoughSteps

        if step < self._first:
            return
        if step > self._first:
            self._enter("other")
            self.phases.append(dict(self._step))
            self.wall.append(time.perf_counter() - self._step_began)
            self._process_in_steps += time.process_time() - self._process
            self._watch.tick()
            timed = len(self.wall)
            enough = time.perf_counter() - self._began > BLOCK_SECONDS and timed >= LEAST_STEPS
            if timed >= MOST_STEPS or enough:
                self.after = threads()
                self._probe.after()
                torch.cuda.synchronize()
                self._watch.finish()
                raise EnoughSteps
            if timed % 2 == 0:
                if self._probe.is_due():
                    self._probe.between()
                self.taken.append([timed, self._candidates.take()])
                self._watch.leave_out()
        else:
            torch.cuda.synchronize()
            for _ in range(3):
                self._candidates.take()
            self._probe.before()
            self.before, self._began = threads(), time.perf_counter()
            self._watch.tick()
        self._step = defaultdict(float)
        self._process = time.process_time()
        self._step_began = self._since = time.perf_counter()

    def micro_step_begin(self, micro_step: int) -> None:
        self._enter("forward")

    def forward_end(self) -> None:
        self._enter("backward")

    def micro_step_end(self, micro_step: int) -> None:
        self._enter("other")

    def optimizer_begin(self) -> None:
        self._enter("optimizer")

    def optimizer_end(self) -> None:
        self._enter("other")

    def result(self) -> dict[str, Any]:
        """Return the times of the block."""
        from dataclasses import asdict

        columns = {
            key: [one.get(key, 0.0) for one in self.phases] for key in ("forward", "backward", "optimizer", "other")
        }
        rounded = {key: [round(each * 1e6, 1) for each in values] for key, values in columns.items()}
        return {
            "steps_us": [round(each * 1e6, 1) for each in self._watch.seconds],
            "wall_us": [round(each * 1e6, 1) for each in self.wall],
            "phases_us": rounded,
            "process_seconds": self._process_in_steps,
            "taken_us": [[at, {key: round(value * 1e6, 1) for key, value in one.items()}] for at, one in self.taken],
            "before": self.before,
            "after": self.after,
            "host_pace": asdict(pace) if (pace := self._probe.result()) else None,
        }
