"""Notes of a measured run, taken in a simulated one, so that the labels of both can be compared."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.analysis.memory import lifetimes, purposes
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.versions import workspaces
from trainatomy.measurement.step.group import followed
from trainatomy.measurement.step.recorder import ModuleTracker
from trainatomy.measurement.traces import breakdown
from trainatomy.measurement.traces.history import BUCKETS, COMMUNICATION, AllocationHistory, HistoryEvent, Note
from trainatomy.measurement.traces.trace import to_trace
from trainatomy.simulator import simulate
from trainatomy.simulator.watcher import Watcher
from trainatomy.training.optimizer import tensors_in
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pytest

    from trainatomy.results.trace import AllocationTrace


class NoteTaker(Watcher):
    """Takes the notes of a ``RunRecorder`` in a simulated run; addresses are allocation numbers from 1."""

    def __init__(self, recorder: Any, steps: int, tracked: int) -> None:
        super().__init__(recorder, steps)
        self.notes: list[Note] = []
        self.tracked = tracked

    def take(
        self,
        name: str,
        found: dict[str, list[int]] | None = None,
        module: str = "",
        copies: tuple[tuple[int, int], ...] = (),
    ) -> None:
        at = len(self._recorder.trace.events)
        self.notes.append(Note(at, name, self._recorder.step, found or {}, module, copies))

    def places(self, tensors: Iterable[torch.Tensor | None]) -> list[int]:
        numbers = [self._recorder.number_of(tensor) for tensor in tensors if tensor is not None]
        return [number + 1 for number in numbers if number is not None and number >= 0]

    def communicates(self, tensors: list[torch.Tensor]) -> None:
        self.take(COMMUNICATION, {"communication_buffer": self.places(tensors)})

    def gathered(self, storage: torch.UntypedStorage) -> None:
        number = self._recorder.ledger.number_at(storage._cdata)
        if number is not None and number >= 0:
            self.take(COMMUNICATION, {"gathered_weight": [number + 1]})

    def buckets_begin(self) -> None:
        self.take(BUCKETS)

    def buckets_end(self) -> None:
        self.take(f"{BUCKETS} end")

    def repeat(self, micro_step: int, batch: Any) -> None:
        """Copy no micro-batch: a GPU executes every one, and notes are taken of all."""

    def loaded(self, model: Any) -> None:
        super().loaded(model)
        self.take("loaded", {"weight": self.places(model.parameters()), "buffer": self.places(model.buffers())})
        self.tracker = ModuleTracker(model, self.take)
        self.tracker.start()

    def optimizer_begin(self) -> None:
        super().optimizer_begin()
        assert self._model is not None
        self.take("optimizer", {"gradient": self.places(p.grad for p in self._model.parameters())})

    def optimizer_end(self) -> None:
        super().optimizer_end()
        state = getattr(self._optimizer, "state", {})
        self.take("optimizer end", {"optimizer_state": self.places(tensors_in(list(state.values())))})

    def repeat_evaluation(self, batch: Any) -> None:
        """Copy no batch, as ``repeat``."""
        super().repeat_evaluation({})
        self.take("evaluation forward", {"input": self.places(batch.values())})

    def evaluation_forward_begin(self) -> None:
        self._operations.stage = "forward"

    def evaluation_forward_end(self, outputs: Any) -> None:
        self._recorder.mark("evaluation forward end")
        self.take("evaluation forward end")

    def step_end(self, step: int) -> None:
        super().step_end(step)
        self.take("step end")
        if step + 1 == self.tracked:
            self.tracker.stop()


def noted(method: str, name: str) -> Callable[..., None]:
    """Return a method that passes the loop's event on and notes it as ``name``."""

    def signal(self: NoteTaker, *arguments: int) -> None:
        getattr(super(NoteTaker, self), method)(*arguments)
        self.take(name)

    return signal


SIGNALS = {
    "step_begin": "step",
    "micro_step_begin": "forward",
    "forward_end": "forward end",
    "micro_step_end": "backward end",
    "zero_grad_begin": "zero_grad",
    "zero_grad_end": "zero_grad end",
    "evaluation_begin": "evaluation",
    "evaluation_end": "evaluation end",
}
for method, name in SIGNALS.items():
    setattr(NoteTaker, method, noted(method, name))


def run(
    monkeypatch: pytest.MonkeyPatch, mapping: dict[str, Any], tracked: int = 2
) -> tuple[AllocationTrace, AllocationTrace]:
    """Return the simulated trace with its own labels, and the same events read as a real history.

    Module calls are noted in the first ``tracked`` steps.
    """
    watchers: list[NoteTaker] = []

    def watcher(recorder: Any, steps: int) -> NoteTaker:
        watchers.append(NoteTaker(recorder, steps, tracked))
        return watchers[-1]

    train = simulate.run

    def run_followed(*arguments: Any, observer: NoteTaker, **keywords: Any) -> None:
        with followed(observer):
            train(*arguments, observer=observer, **keywords)

    monkeypatch.setattr(simulate, "run", run_followed)
    workload = Workload.from_mapping({"gpu": "h200", **mapping})
    simulated = simulate.simulate(workload, workload.resolve_gpu(), watch=watcher).trace
    events = []
    for event in simulated.events:
        kind = "alloc" if event.action == "alloc" else "free_completed"
        events.append(HistoryEvent(kind, event.allocation + 1, event.bytes, 0))
    real = to_trace(AllocationHistory({}, events, watchers[0].notes))
    version = simulate.torch_version(workload)
    breakdown.label_remaining(real, workspaces(find_gpu("h200").capability, version), range(tracked))
    return simulated, real


def differences(simulated: AllocationTrace, real: AllocationTrace) -> Counter[tuple[str, str, str, int]]:
    """Count the allocations of two readings of one trace whose purposes differ: both, phase and step.

    Left out are scalars of the loop, whose phase differs, and states created on the CPU.
    """
    ours, theirs = (purposes(trace, lifetimes(trace)) for trace in (simulated, real))
    # Scalars, and the shapes that accelerate copies to the GPU before it gathers outputs.
    scalars = {event.allocation for event in simulated.events if event.action == "alloc" and event.bytes <= 16}
    return Counter(
        ("/".join(one), "/".join(other), simulated.origins[number].phase, simulated.origins[number].step)
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True))
        if one != other
        and (
            one.component != "functionality"
            or (one.line == "inputs" and simulated.origins[number].phase != "optimizer" and number not in scalars)
        )
    )
