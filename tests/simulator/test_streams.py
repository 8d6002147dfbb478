"""Streams, events and the rank of a process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import trainatomy
from trainatomy.allocator import AllocatorSettings, CachingAllocator, replay
from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.operators.allocation.plan import Processor
from trainatomy.simulator.parallel.group import Topology
from trainatomy.simulator.process import SimulatedProcess

PROCESSOR = Processor((9, 0), 132, (2, 11))


def streams_of(process: SimulatedProcess) -> list[int]:
    return [event.stream for event in process.trace.events if event.action == "alloc"]


def test_an_allocation_goes_to_the_current_stream(process: SimulatedProcess) -> None:
    side, other = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    kept = [torch.empty(256, device="cuda")]
    with torch.cuda.stream(stream=side):
        kept.append(torch.empty(256, device="cuda"))
        with other:
            kept.append(torch.empty(256, device="cuda"))
            assert torch.cuda.current_stream() == other == torch.accelerator.current_stream()
        kept.append(torch.empty(256, device="cuda"))
    kept.append(torch.empty(256, device="cuda"))
    assert streams_of(process) == [0, 1, 2, 1, 0]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert (side.device, side.stream_id, torch.cuda.default_stream().stream_id) == (torch.device("cuda:0"), 1, 0)


def test_set_stream_and_an_external_stream(process: SimulatedProcess) -> None:
    torch.cuda.set_stream(torch.cuda.ExternalStream(0x7F00))
    first = torch.empty(256, device="cuda")
    with torch.cuda.stream(None):
        second = torch.empty(256, device="cuda")
    torch.cuda.set_stream(torch.cuda.default_stream())
    assert torch.cuda.ExternalStream(0x7F00) == torch.cuda.ExternalStream(0x7F00) != torch.cuda.Stream()
    assert torch.cuda.ExternalStream(0) == torch.cuda.default_stream()
    assert streams_of(process) == [1, 1] and first.shape == second.shape


def test_each_stream_has_its_own_pool(process: SimulatedProcess) -> None:
    kept = torch.empty(1 << 20, device="cuda")
    del kept
    with torch.cuda.stream(torch.cuda.Stream()):
        kept = torch.empty(1 << 20, device="cuda")  # the block is free on the default stream only
    found = replay(process.trace, AllocatorSettings())
    assert found.peak_allocated_bytes == 4 << 20
    assert found.peak_reserved_bytes == 40 << 20
    assert kept.shape == (1 << 20,)


def test_a_side_stream_s_segment_is_in_the_snapshot() -> None:
    allocator = CachingAllocator(AllocatorSettings())
    for stream in (0, 3):
        allocator.malloc(512, stream)
    assert {segment.stream for segment in allocator.snapshot()} == {0, 3}


def test_record_stream_is_noted(process: SimulatedProcess) -> None:
    side = torch.cuda.Stream()
    tensor = torch.empty(256, device="cuda")
    tensor.record_stream(side)
    (use,) = process.trace.stream_uses
    assert (use.event, use.allocation, use.stream) == (1, 0, side.stream_id)


def test_operations_carry_streams_and_what_they_wait_for(process: SimulatedProcess) -> None:
    process.recorder.operations.start(0)
    data, side, event = torch.empty(256, device="cuda"), torch.cuda.Stream(), torch.cuda.Event()
    doubled = data * 2
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        moved = doubled + 1
        event.record()
    apart = data - 1
    event.wait()
    result = moved * apart
    written = process.recorder.operations.operations
    assert [one.stream for one in written.operations] == [0, 0, 1, 0, 0]
    assert written.dependencies == {2: (1,), 4: (2,)}
    assert result.shape == (256,) and event.query() and event.elapsed_time(event) == 0.0


def test_backward_runs_on_the_stream_of_forward(process: SimulatedProcess) -> None:
    side, leaf = torch.cuda.Stream(), torch.ones(256, device="cuda", requires_grad=True)
    first = leaf * 2
    with torch.cuda.stream(side):
        torch.empty(256, device="cuda")  # makes no node, and must not be taken for the one before
        second = first * 3
    before = len(process.trace.events)
    second.backward(torch.ones(256, device="cuda"))
    allocated = [event.stream for event in process.trace.events[before:] if event.action == "alloc"]
    assert allocated == [0, 1, 0]  # the gradients of the result, of ``first`` and of ``leaf``


def test_a_hook_of_a_node_may_choose_another_stream(process: SimulatedProcess) -> None:
    side, other, seen = torch.cuda.Stream(), torch.cuda.Stream(), []
    leaf = torch.ones(256, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        result = leaf * 2

    def hook(*gradients: Any) -> None:
        with torch.cuda.stream(other):
            seen.append(torch.cuda.current_stream())
        seen.append(torch.cuda.current_stream())

    result.grad_fn.register_prehook(hook)
    result.sum().backward()
    assert seen == [other, side] and torch.cuda.current_stream() == torch.cuda.default_stream()


def test_gradients_are_added_on_the_stream_that_uses_them(process: SimulatedProcess) -> None:
    side, leaf = torch.cuda.Stream(), torch.ones(256, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        shared = leaf * 2
    left, right = shared * 3, shared + 4
    seeds = [torch.ones(256, device="cuda") for _ in range(2)]
    before = len(process.trace.events)
    torch.autograd.backward([left, right], seeds)  # the first gradient is a seed, so that nothing is added to it
    allocated = [event.stream for event in process.trace.events[before:] if event.action == "alloc"]
    assert allocated == [0, 1, 1]  # the product, the sum, the gradient of ``leaf``
    assert [use.stream for use in process.trace.stream_uses] == [
        side.stream_id
    ]  # the product's; seeds are the caller's


class Overlapped(nn.Module):
    """Module that computes one of its two branches on a side stream to overlap the work."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            right = self.right(x)
            right.record_stream(torch.cuda.current_stream())
        left = self.left(x)
        torch.cuda.current_stream().wait_stream(side)
        return (left + right).sum()


def test_a_module_that_uses_a_side_stream_is_predicted() -> None:
    found = trainatomy.predict(Overlapped(), batch={"x": torch.ones(32, 64)}, gpu="h200")
    assert found.memory.peak_allocated_bytes > 0 and found.time is not None


def place(**of: Any) -> SimulatedProcess:
    return SimulatedProcess("NVIDIA H200", 150 << 30, PROCESSOR, topology=Topology(**of))


def test_a_process_has_a_rank_and_a_device() -> None:
    topology = Topology(rank=11, world_size=16, gpus_per_node=8, mesh=(("replicate", 2), ("shard", 8)))
    assert (topology.local_rank, topology.node) == (3, 1)
    before = dict(os.environ)
    process = place(rank=11, world_size=16, gpus_per_node=8)
    with process.open():
        assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == ("11", "3", "16")
        assert (torch.cuda.device_count(), torch.cuda.current_device(), torch.accelerator.device_count()) == (8, 3, 8)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        made = torch.empty(4, device="cuda")
        assert (made.device, made.get_device(), torch.device(3)) == (torch.device("cuda:3"), 3, torch.device("cuda", 3))
        assert nn.Linear(2, 2).to("cuda:3").weight.device == torch.device("cuda:3")
        assert torch.cuda.get_device_properties(7).name == "NVIDIA H200"
        with torch.cuda.device(3), torch.cuda._DeviceGuard(3):
            assert torch.cuda.Stream().device == torch.device("cuda:3")
        assert "device='cuda:3'" in repr(made)
    assert process.trace.rank == 11
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.empty(1, device="cuda:1"),
        lambda: torch.ones(1).to("cuda:1"),
        lambda: torch.ones(1).cuda(1),
        lambda: torch.cuda.set_device(1),
        lambda: torch.cuda.device("cuda:1"),
    ],
)
def test_only_the_gpu_of_the_process_is_simulated(use: Any) -> None:
    with (
        place().open(),
        pytest.raises(SimulationError, match=r"cuda:1 does not exist: the simulated machine has 1 GPU"),
    ):
        use()
    with place(world_size=2, gpus_per_node=2).open(), pytest.raises(SimulationError, match="cuda:1 is not simulated"):
        use()


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 is not one of 2"),
        ({"gpus_per_node": 0}, "at least one GPU"),
        ({"world_size": 8, "mesh": (("shard", 4),)}, "holds 4 processes, not 8"),
    ],
)
def test_an_impossible_place_is_refused(of: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        Topology(**of)


def test_a_batch_can_be_scattered_to_the_only_gpu(process: SimulatedProcess) -> None:
    model = nn.DataParallel(nn.Linear(8, 8).to("cuda"))
    assert model(torch.ones(4, 8)).shape == (4, 8)


class TwoBranches(nn.Module):
    """Two branches of which one runs on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))
        self.side = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))
        self.head = nn.Linear(2048, 10)
        self.stream: Any = None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            side = self.side(x)
        main = self.main(x)
        torch.cuda.current_stream().wait_stream(self.stream)
        return nn.functional.cross_entropy(self.head(main + side), y)


def test_a_training_on_two_streams_takes_what_an_h200_measured() -> None:
    """Measured with torch 2.11 on 2026-11-22.  Each stream has cuBLAS workspaces of its own, also in backward."""
    batch = {"x": torch.zeros(64, 2048), "y": torch.zeros(64, dtype=torch.long)}
    with torch.device("meta"):
        module = TwoBranches()
    memory = trainatomy.predict(module, batch=batch, gpu="h200", software={"torch": "2.11"}).memory
    assert (memory.peak_allocated_bytes, memory.peak_reserved_bytes) == (1_213_342_720, 1_256_194_048)


def test_the_first_stream_makes_pytorchs_pools(process: SimulatedProcess) -> None:
    """Sources: c10/cuda/CUDAStream.cpp (``initDeviceStreamState``); ``ExternalStream`` takes none from the pools."""
    torch.cuda.default_stream().synchronize()
    torch.cuda.ExternalStream(4096)
    assert "streams" not in process.recorder.loaded
    torch.cuda.Stream()
    assert "streams" in process.recorder.loaded
