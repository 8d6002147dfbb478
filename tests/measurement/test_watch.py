"""Watching a user's own loop: the order of its events and the memory breakdown, with a fake GPU."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_allocator import CONTEXT_BYTES, FakeAllocator
from fake_gpu import FakeNvml
from torch import nn
from torch.nn.modules import module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import dataloader

from trainatomy.integrations import utilization as utilization_module
from trainatomy.integrations import windows
from trainatomy.integrations.live_measurement import USERS_HISTORY, LiveMeasurement
from trainatomy.integrations.printing import print_gpu_utilization
from trainatomy.integrations.recorder import LoopHooks
from trainatomy.integrations.utilization import utilization
from trainatomy.integrations.watch import watch
from trainatomy.integrations.windows import BEFORE
from trainatomy.measurement.step.instruments import DataWaits, Stopwatch
from trainatomy.training.observer import Observer

MIB = 2**20
BACKWARD = torch.autograd.backward
MICRO = ["forward", "forward end", "backward end"]
STEP = ["optimizer", "optimizer end"]
ZERO = ["zero_grad", "zero_grad end"]


class Listener(Observer):
    """Records the events of a loop."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.ticks = 0

    def batch(self, arguments: Any, keywords: Any) -> None:
        self.shapes += [tuple(each.shape) for each in arguments]

    def tick(self) -> None:
        self.ticks += 1

    def step_begin(self, step: int) -> None:
        self.events.append(f"step {step}")

    def micro_step_begin(self, micro_step: int) -> None:
        self.events.append("forward")

    def forward_end(self) -> None:
        self.events.append("forward end")

    def micro_step_end(self, micro_step: int) -> None:
        self.events.append("backward end")

    def optimizer_begin(self) -> None:
        self.events.append("optimizer")

    def optimizer_end(self) -> None:
        self.events.append("optimizer end")

    def zero_grad_begin(self) -> None:
        self.events.append("zero_grad")

    def zero_grad_end(self) -> None:
        self.events.append("zero_grad end")

    def step_end(self, step: int) -> None:
        self.events.append(f"end {step}")


class Checkpointed(nn.Module):
    """Two layers, the first recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, reentrant: bool = True) -> torch.Tensor:
        return self.second(checkpoint(self.first, x.requires_grad_(), use_reentrant=reentrant))


@pytest.fixture
def listener() -> Listener:
    return Listener()


def attach_hooks(listener: Listener, model: nn.Module, optimizer: Any) -> LoopHooks:
    hooks = LoopHooks(model, optimizer, listener)
    hooks.attach()
    return hooks


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return model, torch.optim.AdamW(model.parameters())


# The order of events.


def test_a_plain_loop(listener: Listener) -> None:
    model, optimizer = parts()
    hooks = attach_hooks(listener, model, optimizer)
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hooks.detach()
    assert listener.events == ["step 0", *MICRO, *STEP, *ZERO, "end 0", "step 1", *MICRO, *STEP, *ZERO, "end 1"]
    assert listener.shapes == [(3, 4)] * 2 and listener.ticks == 2


def test_gradients_may_be_zeroed_first(listener: Listener) -> None:
    model, optimizer = parts()
    hooks = attach_hooks(listener, model, optimizer)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    hooks.detach()
    first = ["step 0", *MICRO, *STEP, *ZERO, "end 0"]
    assert listener.events == [*ZERO, *first, "step 1", *MICRO, *STEP, "end 1"]
    assert listener.ticks == 2


def test_accumulation_and_clipping_are_one_step(listener: Listener) -> None:
    model, optimizer = parts()
    hooks = attach_hooks(listener, model, optimizer)
    for _ in range(3):
        (model(torch.ones(2, 4)).sum() / 3).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    hooks.detach()
    assert listener.events == ["step 0", *MICRO * 3, *STEP, *ZERO, "end 0"]
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_a_step_that_the_scaler_skips_is_a_step(listener: Listener) -> None:
    model, optimizer = parts()
    hooks = attach_hooks(listener, model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (float("inf"), 1.0):
        scaler.scale(model(torch.ones(2, 4)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    hooks.detach()
    assert listener.events == ["step 0", *MICRO, *ZERO, "end 0", "step 1", *MICRO, *STEP, *ZERO, "end 1"]
    assert listener.ticks == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_part_of_backward(listener: Listener, reentrant: bool) -> None:
    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = attach_hooks(listener, model, optimizer)
    model(torch.ones(2, 4), reentrant=reentrant).sum().backward()
    optimizer.step()
    hooks.detach()
    assert listener.events == ["step 0", *MICRO, *STEP, "end 0"]


def test_evaluation_between_steps_is_not_a_step(listener: Listener) -> None:
    model, optimizer = parts()
    hooks = attach_hooks(listener, model, optimizer)
    with torch.no_grad():
        model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(torch.ones(2, 4))
    hooks.detach()
    assert listener.events == ["step 0", *MICRO, *STEP, *ZERO, "end 0"]


def test_inference_is_a_step_for_each_forward(listener: Listener) -> None:
    model, _ = parts()
    hooks = attach_hooks(listener, model, None)
    with torch.no_grad():
        model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    hooks.detach()
    assert listener.events == ["step 0", *MICRO, "end 0", "step 1", *MICRO, "end 1"]
    assert listener.ticks == 2


def test_the_accelerate_loop_with_wrapped_model_and_optimizer(listener: Listener) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*parts())
    hooks = attach_hooks(listener, model, optimizer)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
    hooks.detach()
    one = [*MICRO * 2, *STEP, *ZERO]
    assert listener.events == ["step 0", *one, "end 0", "step 1", *one, "end 1"]


def test_everything_is_handed_back() -> None:
    model, optimizer = parts()
    functions = torch.autograd.backward, nn.Module.zero_grad, torch.optim.Optimizer.zero_grad
    hooks = attach_hooks(Listener(), model, optimizer)
    assert torch.autograd.backward is not functions[0]
    hooks.detach()
    assert (torch.autograd.backward, nn.Module.zero_grad, torch.optim.Optimizer.zero_grad) == functions
    assert not model._forward_pre_hooks and not model._forward_hooks and not model._forward_hooks_always_called
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_copies_and_pickles_of_a_watched_model_are_silent(listener: Listener) -> None:
    model, optimizer = parts()
    hooks = attach_hooks(listener, model, optimizer)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.ones(2, 4))
        other.zero_grad()
    hooks.detach()
    assert listener.events == []


def test_another_model_is_not_the_watched_one(listener: Listener) -> None:
    model, optimizer = parts()
    other, others = parts()
    hooks = attach_hooks(listener, model, optimizer)
    others.zero_grad()
    other.zero_grad()
    hooks.detach()
    assert listener.events == []


# The memory breakdown.


@pytest.fixture
def allocator() -> FakeAllocator:
    return FakeAllocator()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, allocator: FakeAllocator) -> FakeNvml:
    return allocator.install(monkeypatch)


@pytest.fixture
def gpu(allocator: FakeAllocator, library: FakeNvml) -> Iterator[FakeAllocator]:
    with allocator:
        yield allocator


class Wide(nn.Module):
    """Layer with 64 KiB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)).square().sum()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, samples: int = 64) -> None:
    for _ in range(steps):
        model(x=torch.ones(samples, 128)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_breakdown_names_the_tensors_of_the_loop(gpu: FakeAllocator) -> None:
    stranger = torch.ones(1000)
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer) as anatomy:
        train(model, optimizer, samples=16)
    found = anatomy.measurement
    assert found is not None and found.memory is not None
    assert (found.status, found.steps, found.name, found.gpu) == ("completed", 4, "Wide", "NVIDIA H200")
    lines = {line.name: line.bytes for line in found.memory.lines}
    assert lines["parameters"] == lines["gradients"] == lines["optimizer states"] == 128 * 128 * 4
    assert lines[BEFORE] == 4096 and lines["inputs"] == 16 * 128 * 4
    assert found.peak_allocated_bytes == gpu.peak
    parts = found.memory.components
    assert parts.total_bytes - parts.cache - parts.context == gpu.peak
    assert parts.context == found.context_bytes == CONTEXT_BYTES
    assert parts.total_bytes == found.device_bytes
    assert stranger.numel() == 1000


def test_activations_are_those_of_the_peak_by_module(gpu: FakeAllocator) -> None:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as anatomy:
        train(model, optimizer, samples=4096)
    assert anatomy.measurement is not None and anatomy.measurement.memory is not None
    activations = anatomy.measurement.memory.components.activations
    assert activations >= 4096 * 128 * 4  # tanh keeps its result
    assert sum(module.activation_bytes for module in anatomy.measurement.modules) == activations


def test_times_and_samples(gpu: FakeAllocator) -> None:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as anatomy:
        train(model, optimizer, steps=6, samples=32)
    found = anatomy.measurement
    assert found is not None
    assert (found.step_seconds, found.samples_per_second, found.tokens_per_second) == (0.5, 64.0, None)
    assert found.timed_step_seconds == (0.5,) * 4


def test_out_of_memory_propagates_and_is_analyzed(gpu: FakeAllocator) -> None:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gpu.limit = gpu.held + 3 * 2**20
    with pytest.raises(torch.OutOfMemoryError), watch(model, optimizer) as anatomy:
        train(model, optimizer, steps=1)
        train(model, optimizer, samples=8192)
    found = anatomy.measurement
    assert found is not None and found.memory is not None
    assert (found.status, found.steps) == ("out of memory", 1)
    assert found.message == f"CUDA out of memory. Tried to allocate {8192 * 128 * 4} B."
    assert found.out_of_memory is not None
    assert not gpu.recording and torch.autograd.backward is BACKWARD


@pytest.mark.parametrize(
    ("owner", "name"), [(LoopHooks, "attach"), (DataWaits, "attach"), (DataWaits, "begin"), (Stopwatch, "tick")]
)
def test_a_watch_that_cannot_begin_leaves_nothing_behind(
    gpu: FakeAllocator, library: FakeNvml, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    original = getattr(owner, name)

    def fail(*arguments: Any) -> None:
        original(*arguments)
        raise RuntimeError("a part does not begin")

    model, fetch = Wide(), dataloader._BaseDataLoaderIter.__next__
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(RuntimeError, match="a part does not begin"), watch(model, optimizer):
        pytest.fail("it began")
    assert not gpu.recording and library.opened == 0
    assert torch.autograd.backward is BACKWARD and dataloader._BaseDataLoaderIter.__next__ is fetch
    assert not model._forward_pre_hooks and not optimizer._optimizer_step_pre_hooks
    assert not module._global_forward_pre_hooks and not module._global_forward_hooks


def test_another_exception_passes_through(gpu: FakeAllocator) -> None:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(KeyError), watch(model, optimizer) as anatomy:
        train(model, optimizer, steps=3)
        raise KeyError("mine")
    assert anatomy.measurement is not None and anatomy.measurement.steps == 3
    assert any("mine" in note for note in anatomy.measurement.notes)


def test_a_history_that_the_user_records_is_left_alone(gpu: FakeAllocator) -> None:
    gpu.record(enabled="all", context="all")
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    before = len(gpu.trace)
    with watch(model, optimizer) as anatomy:
        train(model, optimizer)
    assert gpu.recording and len(gpu.recordings) == 1 and len(gpu.trace) > before > 0
    assert anatomy.measurement is not None and anatomy.measurement.memory is not None
    assert USERS_HISTORY in anatomy.measurement.notes
    assert {line.name: line.bytes for line in anatomy.measurement.memory.lines}["parameters"] == 128 * 128 * 4


def test_a_long_training_keeps_the_window_of_the_peak(gpu: FakeAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_EVENTS", 60)
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer) as anatomy:
        train(model, optimizer, steps=20)
        train(model, optimizer, steps=1, samples=2048)
        train(model, optimizer, steps=20)
    assert len(gpu.recordings) > 5 and len(gpu.trace) == 0
    found = anatomy.measurement
    assert found is not None and found.memory is not None
    assert found.memory.peak.step == 20
    lines = {line.name: line.bytes for line in found.memory.lines}
    assert lines["parameters"] == lines["optimizer states"] == 128 * 128 * 4
    assert found.memory.components.total_bytes == found.device_bytes
    assert not any("replay" in note and "allocated:" in note for note in found.notes)


def test_intermediate_and_final_results_agree(gpu: FakeAllocator) -> None:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as anatomy:
        train(model, optimizer)
        sofar = anatomy.result()
    assert sofar is not None and anatomy.measurement is not None
    assert sofar.memory == anatomy.measurement.memory


def test_watching_allocates_nothing_and_changes_no_result(gpu: FakeAllocator) -> None:
    def trained(watched: bool) -> tuple[torch.Tensor, int]:
        torch.manual_seed(0)
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = gpu.allocations
        if watched:
            with watch(model, optimizer):
                train(model, optimizer)
        else:
            train(model, optimizer)
        return model.inner.weight.detach(), gpu.allocations - before

    plain, watched = trained(watched=False), trained(watched=True)
    assert torch.equal(plain[0], watched[0]) and plain[1] == watched[1]


def test_memory_on_the_gpu_is_listed_by_process(gpu: FakeAllocator, library: FakeNvml) -> None:
    alone = utilization()
    assert (alone.others, alone.other_bytes, alone.unlisted_bytes) == (0, 0, 0)
    library.unlisted = 9_240_576
    piece = utilization()
    assert (piece.others, piece.other_bytes, piece.unlisted_bytes) == (0, 0, 9_240_576)
    assert piece.process_bytes == alone.process_bytes and piece.context_bytes == CONTEXT_BYTES
    library.others = {4711: 3 * MIB, 4712: 4 * MIB}
    shared = utilization()
    assert (shared.others, shared.other_bytes, shared.unlisted_bytes) == (2, 7 * MIB, 9_240_576)
    library.others = {4711: 3 * MIB, 4712: None}
    untold = utilization()
    assert (untold.others, untold.other_bytes, untold.unlisted_bytes) == (2, 3 * MIB + 9_240_576, None)


def test_a_page_does_not_list_unknown_processes(
    gpu: FakeAllocator, library: FakeNvml, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library.unlisted = 9_240_576
    for inside in (False, True):
        monkeypatch.setattr(utilization_module, "is_in_container", lambda inside=inside: inside)
        print_gpu_utilization()
        printed = capsys.readouterr().out
        assert "other processes" not in printed and "not listed for any process" in printed and "9,240,576" in printed
        assert ("container" in printed) == inside
    library.others = {4711: 3 * MIB}
    print_gpu_utilization()
    assert "other processes (1)" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "text"), [(9_240_576, "belong to the context"), (3 * 2**30, "not listed")])
def test_a_watch_notes_what_its_breakdown_lacks(
    gpu: FakeAllocator, library: FakeNvml, monkeypatch: pytest.MonkeyPatch, size: int, text: str
) -> None:
    monkeypatch.setattr(utilization_module, "is_in_container", lambda: True)
    library.unlisted = size
    model = Wide()
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1)) as anatomy:
        pass
    assert anatomy.measurement is not None
    assert any(text in note for note in anatomy.measurement.notes)
    assert anatomy.measurement.context_bytes == CONTEXT_BYTES


def test_a_model_that_moves_is_looked_for_again(gpu: FakeAllocator) -> None:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as anatomy:
        model.inner.weight.data = model.inner.weight.data.clone()
        train(model, optimizer)
    assert anatomy.measurement is not None and anatomy.measurement.memory is not None
    lines = {line.name: line.bytes for line in anatomy.measurement.memory.lines}
    assert lines["parameters"] == 128 * 128 * 4


def test_counters_are_read_once_per_point_in_time(gpu: FakeAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        train(model, optimizer, steps=4)
        reads: list[int] = []
        monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda device: reads.append(device) or gpu.statistics())
        train(model, optimizer, steps=10)
    assert len(reads) <= 10 * 8 + 2, "eight instants of a step, and the end of the watch"


def test_a_live_measurement_has_the_specified_name() -> None:
    model, optimizer = parts()
    assert LiveMeasurement(model, optimizer, "mine").name == "mine"
