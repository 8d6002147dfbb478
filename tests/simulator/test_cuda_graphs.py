"""CUDA graphs of compiled steps: what PyTorch's graph trees do over the simulated allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from trainatomy.allocator.replay import RecordingPlayer
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.catalog.machines import reference_host
from trainatomy.errors import SimulationError
from trainatomy.operators.allocation.attention import efficient_forward
from trainatomy.operators.allocation.plan import KernelCall, Out, Processor
from trainatomy.operators.allocation.workspaces import WorkspaceTracker
from trainatomy.results.operations import GRAPH_LAUNCH, Call
from trainatomy.results.trace import AllocationTrace, pool_of
from trainatomy.simulator.compiled import preload_compiler, simulated_compiler
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.timing.host_costs import cpu_costs
from trainatomy.timing.launch import launch_seconds
from trainatomy.workload import Workload

Factory = Callable[..., Workload]
MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.first = nn.Linear(256, 1024)
        self.last = nn.Linear(1024, 256)

    def forward(self, x):
        LINE
        h = torch.nn.functional.gelu(self.first(x))
        return self.last(h).square().mean()

def model():
    return Net()

def batch(size):
    return {"x": torch.ones(size, 256)}
"""
BATCH = 512 * 256 * 4
"""Bytes of a batch in float32."""


def run(from_factory: Factory, mode: str, line: str = "", **train: Any) -> Simulation:
    pytest.importorskip("triton")
    settings = {
        "torch_compile": True,
        "torch_compile_mode": mode,
        "per_device_train_batch_size": 512,
        "max_grad_norm": 0,
    }
    workload = from_factory(MODEL.replace("LINE", line), train=settings | train, steps=None)
    return simulate(workload, workload.resolve_gpu())


def pooled(trace: AllocationTrace, step: int, begin: str = "step", end: str = "step end") -> list[int]:
    """Return the bytes of the requests to private pools between two marks of a step."""
    places = {mark.name: mark.event for mark in trace.marks if mark.step == step}
    events = trace.events[places[begin] : places[end]]
    return [event.bytes for event in events if event.action == "alloc" and pool_of(event.stream)]


def after_steps(trace: AllocationTrace) -> list[tuple[int, int, int]]:
    """Return what is allocated, reserved, and reserved by private pools after each step."""
    player = RecordingPlayer(trace, AllocatorSettings())
    found = []
    for mark in trace.marks:
        if mark.name == "step end":
            player.play(mark.event)
            allocator = player.allocator
            found.append((allocator.allocated_bytes, allocator.reserved_bytes, allocator.private_bytes()))
    return found


def test_functions_warm_up_are_recorded_and_replayed(from_factory: Factory) -> None:
    simulation = run(from_factory, "reduce-overhead")
    trace = simulation.trace
    warm_up, recording, *replays = (pooled(trace, step) for step in range(simulation.steps))
    assert simulation.steps == 4 and replays == [[], []]
    assert recording[0] == BATCH != warm_up[0]  # the batch is copied to where the graph expects it
    (_, _, first), (_, _, second), (allocated, reserved, private), last = after_steps(trace)
    assert first <= second == private > 0
    assert (allocated, reserved, private) == last
    assert any("CUDA graphs: 2 are recorded" in note for note in simulation.notes)


def test_results_of_a_replay_are_not_counted(from_factory: Factory) -> None:
    """Check for activations and gradients, which lie in the pool: allocated are weights, states and the batch."""
    trace = run(from_factory, "reduce-overhead").trace
    player = RecordingPlayer(trace, AllocatorSettings())
    last = {mark.name: mark.event for mark in trace.marks if mark.step == 3}
    player.play(last["forward"])
    before = player.allocator.allocated_bytes
    player.play(last["optimizer"])
    assert player.allocator.allocated_bytes - before < BATCH  # the loss and its gradient
    assert player.allocator.private_bytes() > 2 * BATCH


def test_recording_empties_the_cache_and_releases_workspaces(from_factory: Factory) -> None:
    trace = run(from_factory, "reduce-overhead").trace
    emptied = [index for index, event in enumerate(trace.events) if event.action == "empty_cache"]
    steps = [max(mark.step for mark in trace.marks if mark.event <= index and mark.name == "step") for index in emptied]
    assert steps == [0, 1, 1]  # the graph that keeps the pool, the forward pass and the backward pass
    workspaces = {number for number, label in trace.labels.items() if label.startswith("cublas")}
    released = {event.allocation for event in trace.events if event.action == "free"}
    assert len(workspaces) == 4 and workspaces < released


def test_a_replay_launches_what_was_captured(from_factory: Factory) -> None:
    simulation, plain = run(from_factory, "max-autotune"), run(from_factory, "max-autotune-no-cudagraphs")

    def names(simulation: Simulation, *, captured: bool | None = None) -> list[str]:
        operations = simulation.operations
        calls = [operations.calls[one.call] for one in operations.operations if captured in (None, one.captured)]
        return sorted(call.name for call in calls if not call.is_view)

    inside = names(simulation, captured=True)
    assert inside and set(inside) <= {"inductor::fused", "aten::addmm", "aten::mm"}
    outside = names(simulation, captured=False)
    assert outside.count(GRAPH_LAUNCH) == 2
    copies = [name for name in outside if name == "aten::_foreach_copy_"]
    assert sorted([*inside, *outside]) == sorted([*names(plain), GRAPH_LAUNCH, GRAPH_LAUNCH, *copies]) and copies
    assert any("max-autotune measures Triton's products" in note for note in simulation.notes)


def test_captured_operations_cost_the_cpu_nothing(from_factory: Factory) -> None:
    operations = run(from_factory, "reduce-overhead").operations
    costs = cpu_costs(reference_host().microseconds)
    seconds = list(launch_seconds(operations, costs, "pytorch"))
    captured = [one.captured for one in operations.operations]
    assert all(time == 0 for time, inside in zip(seconds, captured, strict=True) if inside)
    assert all(time > 0 for time, inside in zip(seconds, captured, strict=True) if not inside)
    launches = [one.call for one in operations.operations if operations.calls[one.call].name == GRAPH_LAUNCH]
    assert len(launches) == 2
    backward = [
        (operations.calls[one.call].name, time)
        for one, time in zip(operations.operations, seconds, strict=True)
        if one.phase == "backward" and not one.captured
    ]
    assert sum(time for _, time in backward) > costs.python_call[GRAPH_LAUNCH]


def test_gradients_of_a_graph_cannot_be_accumulated(from_factory: Factory) -> None:
    with pytest.raises(
        SimulationError, match=r"aten::add_(.|\n)*overwritten by a subsequent run(.|\n)*torch_compile_mode"
    ):
        run(from_factory, "reduce-overhead", gradient_accumulation_steps=2)


def test_what_inductor_skips_is_named(from_factory: Factory) -> None:
    """Check for a number on the CPU, around which Inductor divides the graph, and a mutated input, which it refuses."""
    simulation = run(from_factory, "reduce-overhead", "x.add_(1)")
    assert any("skipping cudagraphs due to mutated inputs (1 instances)" in note for note in simulation.notes)


@pytest.fixture
def compiled(closed: SimulatedProcess) -> Iterator[Callable[[nn.Module], nn.Module]]:
    """Open a process in which modules are compiled with CUDA graphs."""
    pytest.importorskip("triton")
    preload_compiler()
    with closed.open(), simulated_compiler(closed):
        yield lambda module: torch.compile(module.cuda(), options={"triton.cudagraphs": True})  # type: ignore[return-value]


def numbers() -> torch.Tensor:
    return torch.ones(64, 1024, device="cuda")


def test_a_graph_after_a_replay_respects_what_lives(compiled: Callable[[nn.Module], nn.Module], closed: Any) -> None:
    first, second = compiled(nn.Linear(1024, 1024)), compiled(nn.Linear(1024, 1024))
    for _ in range(3):
        first(numbers()).sum().backward()
        first.zero_grad()
    held = first(numbers())  # a replay, whose result the pool does not know
    trace: AllocationTrace = closed.trace
    assert not trace.places
    second(held).sum().backward()
    assert trace.places  # the pool's state after the recording was put back before the second module ran
    player = RecordingPlayer(trace, AllocatorSettings())
    seen: dict[int, tuple[int, int]] = {}
    for index, event in enumerate(trace.events):
        player.play(index + 1)
        if event.action == "alloc" and (handle := player.handles[event.allocation]):
            size = player.allocator.block_bytes(handle)
            if event.allocation in trace.places:
                assert seen[trace.places[event.allocation]] == (handle, size)
            seen[event.allocation] = handle, size
    assert held.untyped_storage().nbytes() == 64 * 1024 * 4


def test_what_the_next_run_overwrites_cannot_be_read(compiled: Callable[[nn.Module], nn.Module]) -> None:
    first = compiled(nn.Linear(1024, 1024))
    with torch.no_grad():
        result = first(numbers())
        view = result[0]
        first(numbers())
        assert result.view(-1).shape == (64 * 1024,)  # which reads nothing
        with pytest.raises(SimulationError, match="accessing tensor output of CUDAGraphs that has been overwritten"):
            result + 1
        with pytest.raises(SimulationError, match="overwritten"):
            view.sum()


def test_a_graph_that_draws_keeps_a_seed_and_an_offset(compiled: Callable[[nn.Module], nn.Module], closed: Any) -> None:
    plain, drops = compiled(nn.Linear(1024, 1024)), compiled(nn.Sequential(nn.Linear(1024, 1024), nn.Dropout(0.1)))

    def made_in(module: nn.Module) -> int:
        """Return the pairs of numbers of 8 bytes outside of the pool that three steps with a module leave."""
        begin = len(closed.trace.events)
        for _ in range(3):
            module(numbers()).sum().backward()
            module.zero_grad()
        events = closed.trace.events[begin:]
        freed = {event.allocation for event in events if event.action == "free"}
        kept = [e for e in events if e.action == "alloc" and e.allocation not in freed and not pool_of(e.stream)]
        return len([event for event in kept if event.bytes == 8])

    lazily = closed.processor.torch_version >= (2, 12)
    assert made_in(plain) == (0 if lazily else 2)
    assert made_in(drops) == (2 if lazily else 0)


def test_attention_keeps_its_seed_on_the_gpu_only_in_a_graph() -> None:
    query = torch.empty(2, 4, 64, 32, dtype=torch.float16, device="meta")
    func = torch.ops.aten._scaled_dot_product_efficient_attention.default
    outputs = tuple(func(query, query, query, None, True))
    call = KernelCall(func, (query, query, query, None, True), {}, outputs, Processor((9, 0), 132, (2, 11)))
    assert Out(2, 0) in efficient_forward(call)
    captured = KernelCall(
        *[getattr(call, name) for name in ("func", "args", "kwargs", "outputs", "processor")], (), True
    )
    assert list(efficient_forward(captured))[:2] == [Out(2), Out(3)]


def test_workspaces_that_were_cleared_are_taken_again() -> None:
    tracker = WorkspaceTracker(Processor((9, 0), 132, (2, 11)))
    taken = tracker.before("aten::mm", "forward")
    assert taken and not tracker.before("aten::mm", "forward")
    tracker.clear()
    assert tracker.before("aten::mm", "forward") == taken


def test_the_launch_of_a_graph_is_no_kernel() -> None:
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.timing.cost_model import cost_model_of, kernel_cost

    model = cost_model_of(find_gpu("h200"), None, tf32=False)
    assert kernel_cost(Call(GRAPH_LAUNCH, (), ()), model).launches == 0


def test_what_pytorch_warns_of_is_a_note(closed: SimulatedProcess) -> None:
    """Check for passes whose backward never comes, so that PyTorch cannot tell where a step begins."""
    pytest.importorskip("triton")
    preload_compiler()
    with closed.open(), simulated_compiler(closed):
        first = torch.compile(nn.Linear(1024, 1024).cuda(), mode="reduce-overhead")
        kept = [first(numbers()) for _ in range(4)]
        assert len(kept) == 4
    assert any("PyTorch warns: Unable to hit fast path of CUDAGraphs" in note for note in closed.notes)
