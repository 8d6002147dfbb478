"""A watch assigns the labels of a prediction: its recorder runs in a simulation where every label is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.memory import analyze_memory
from trainatomy.catalog.versions import workspaces
from trainatomy.integrations.recorder import LiveRecorder, LoopHooks
from trainatomy.measurement.step import recorder as recorders
from trainatomy.measurement.step.recorder import AllocatorCounters
from trainatomy.measurement.traces.breakdown import label_remaining
from trainatomy.measurement.traces.history import AllocationHistory, HistoryEvent, Note
from trainatomy.measurement.traces.trace import to_trace
from trainatomy.simulator import simulate
from trainatomy.simulator.watcher import Watcher
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from trainatomy.results.memory import Memory
    from trainatomy.results.trace import AllocationTrace

GRAIN = 512
SCALARS = 8 * GRAIN
"""Tolerance for a few scalars of the loss: a watch cannot see exactly where the loop ends and backward begins."""
BERT = {
    "class": "BertForSequenceClassification",
    "config": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 256,
        "vocab_size": 500,
    },
}
CHECKPOINTED = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {"train": {"bf16": True}},
    "bf16, checkpointed, by the Trainer": {"train": {"bf16": True, **CHECKPOINTED}},
    "fp16, checkpointed, in a loop": {"train": {"fp16": True, **CHECKPOINTED}, "loop": "pytorch"},
}


class NoStopwatch:
    """Stopwatch without effect."""

    def tick(self) -> None: ...


class Watched(Watcher):
    """Attaches a watch's hooks and recorder to a simulated run; addresses are allocation numbers from 1."""

    def repeat(self, micro_step: int, batch: Any) -> None:
        """Copy no micro-batch: a watch sees those that are executed."""

    def ready(self, model: Any, optimizer: Any) -> None:
        super().ready(model, optimizer)
        self._held = self._peak = self._seen = 0
        self._rounded_sizes: dict[int, int] = {}
        self.live = LiveRecorder(model, optimizer, NoStopwatch(), self._read, lambda now: None)  # type: ignore[arg-type]
        self.hooks = LoopHooks(model, optimizer, self.live)
        self.begin = Note(self._read().events, "loaded", -1, self.live.known_addresses())
        self.live.track_modules()
        self.hooks.attach()

    def places(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        numbers = [self._recorder.number_of(tensor) for tensor in tensors]
        return [number + 1 for number in numbers if number is not None and number >= 0]

    def _read(self) -> AllocatorCounters:
        events = self._recorder.trace.events
        for event in events[self._seen :]:
            if event.action == "alloc":
                self._rounded_sizes[event.allocation] = -(-event.bytes // GRAIN) * GRAIN
                self._held += self._rounded_sizes[event.allocation]
                self._peak = max(self._peak, self._held)
            elif event.action == "free":
                self._held -= self._rounded_sizes[event.allocation]
        self._seen = len(events)
        return AllocatorCounters(self._seen, self._peak)


def watched(monkeypatch: pytest.MonkeyPatch, mapping: dict[str, Any]) -> tuple[AllocationTrace, AllocationTrace]:
    """Return the simulated trace with its own labels, and the same events as a watch would read them."""
    watchers: list[Watched] = []

    def watcher(recorder: Any, steps: int) -> Watched:
        watchers.append(Watched(recorder, steps))
        monkeypatch.setattr(recorders, "addresses", watchers[-1].places)
        return watchers[-1]

    workload = Workload.from_mapping({"gpu": "h200", "model": BERT, "data": {"sequence_length": 32}, **mapping})
    try:
        simulated = simulate.simulate(workload, workload.resolve_gpu(), watch=watcher).trace
    finally:
        for watch in watchers:
            watch.hooks.detach()
            watch.live.stop_tracking()
    (watch,) = watchers
    kinds = {"alloc": "alloc", "free": "free_completed", "empty_cache": "segment_free"}
    events = [HistoryEvent(kinds[event.action], event.allocation + 1, event.bytes, 0) for event in simulated.events]
    real = to_trace(AllocationHistory({}, events, [watch.begin, *watch.live.notes]))
    sizes = workspaces(workload.resolve_gpu().capability, simulate.torch_version(workload))
    assert watch.live.tracked_steps == [0, 1] and watch.live.steps == 3
    assert label_remaining(real, sizes, watch.live.tracked_steps) == ()
    return simulated, real


def memory(trace: AllocationTrace) -> Memory:
    return analyze_memory(trace, AllocatorSettings(), 2**40, 0).memory


@pytest.mark.parametrize("case", CASES)
def test_a_watch_names_what_a_prediction_names(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    mapping = {**CASES[case], "train": {"per_device_train_batch_size": 2, **CASES[case]["train"]}}
    simulated, real = watched(monkeypatch, mapping)
    copies = [
        sorted(number for number, label in trace.labels.items() if label == "weight_copy")
        for trace in (simulated, real)
    ]
    assert copies[0] == copies[1] and copies[0], "also in the step whose modules were not followed"
    ours, theirs = memory(simulated), memory(real)
    assert (ours.peak.step, ours.peak.phase) == (theirs.peak.step, theirs.peak.phase)
    one, other = ours.components, theirs.components
    assert (one.weights, one.gradients, one.optimizer_states) == (
        other.weights,
        other.gradients,
        other.optimizer_states,
    )
    for name, size in one.as_dict().items():
        assert abs(size - other.as_dict()[name]) <= SCALARS, name
