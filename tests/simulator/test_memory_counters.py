"""What a training hears when it asks how much memory it holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainatomy.allocator.replay import replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.api import predict
from trainatomy.simulator.process import SimulatedProcess

HEARD: list[tuple[int, int]] = []


class Listening(nn.Linear):
    """A layer that notes how much memory the process says it held."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x).square().mean()
        HEARD.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        return loss


def test_counters_are_those_of_the_replayed_trace(process: SimulatedProcess) -> None:
    kept = torch.zeros(3 << 20, device="cuda")
    gone = torch.zeros(5 << 20, device="cuda")
    del gone
    expected = replay(process.trace, AllocatorSettings())
    assert torch.cuda.memory_allocated() == torch.cuda.memory.memory_allocated() == kept.nbytes
    assert torch.cuda.max_memory_allocated() == expected.peak_allocated_bytes == (8 << 20) * 4
    assert torch.accelerator.memory_reserved() == expected.reserved_bytes[-1]
    assert torch.cuda.mem_get_info() == ((150 << 30) - expected.reserved_bytes[-1], 150 << 30)
    assert torch.cuda.memory_stats()["reserved_bytes.all.peak"] == expected.peak_reserved_bytes
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    assert torch.cuda.max_memory_allocated() == kept.nbytes
    assert torch.cuda.memory_reserved() < expected.reserved_bytes[-1]
    assert "memory summary" in torch.cuda.memory_summary()


@pytest.mark.parametrize("allocator", ["", "roundup_power2_divisions:2"])
def test_a_training_hears_what_is_predicted(allocator: str) -> None:
    batch = {"x": torch.zeros(3, 5000)}
    memory = predict(Listening(5000, 5000), batch=batch, steps=5, allocator=allocator).memory
    assert HEARD[-1] == (memory.peak_allocated_bytes, memory.peak_reserved_bytes)


def test_recording_the_history_of_memory_does_nothing(process: SimulatedProcess) -> None:
    torch.cuda.memory._record_memory_history(max_entries=1000)
    torch.zeros(4, device="cuda")
    torch.cuda.memory._dump_snapshot("/nowhere/snapshot.pickle")
    torch.cuda.memory._record_memory_history(enabled=None)
    assert torch.cuda.memory._snapshot()["segments"] == []


def test_a_generator_of_the_gpu_draws_on_the_gpu(process: SimulatedProcess) -> None:
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert generator.device == torch.device("cuda", 0)
    drawn = torch.randn(1 << 10, generator=generator, device="cuda")
    drawn.normal_(generator=generator)
    assert drawn.is_cuda and torch.randperm(4, generator=generator, device="cuda").is_cuda
    assert torch.rand(3, generator=torch.Generator().manual_seed(0)).device.type == "cpu"
    assert isinstance(torch.default_generator, torch.Generator)
