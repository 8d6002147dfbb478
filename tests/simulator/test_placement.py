"""Devices of meta tensors, and the memory that moving them takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainatomy.simulator.placement import names_cuda
from trainatomy.simulator.process import SimulatedProcess

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")


def taken(process: SimulatedProcess) -> list[int]:
    return [event.bytes for event in process.trace.events if event.action == "alloc"]


@pytest.mark.parametrize(
    ("device", "is_cuda"),
    [("cuda", True), ("cuda:0", True), (0, True), (CUDA, True), ("cpu", False), (CPU, False), (None, False)],
)
def test_device_arguments_that_name_the_gpu(device: Any, is_cuda: bool) -> None:
    assert names_cuda(device) is is_cuda


def test_a_tensor_made_on_the_gpu_reports_its_device(process: SimulatedProcess) -> None:
    made = torch.empty(4, 5, device="cuda")
    assert (made.device, made.is_cuda, made.is_cpu, made.is_meta, made.get_device()) == (CUDA, True, False, False, 0)
    assert made.type() == "torch.cuda.FloatTensor"
    assert taken(process) == [80]


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor])
def test_a_tensor_from_data(process: SimulatedProcess, make: Any) -> None:
    made = make([1.0, 2.0, 3.0], device="cuda")
    assert (made.device, made.shape, made.dtype) == (CUDA, (3,), torch.float32)
    assert taken(process) == [12]


def test_new_tensors_are_made_where_their_source_is(process: SimulatedProcess) -> None:
    source = torch.empty(2, device="cuda")
    made = source.new_tensor([1, 2, 3], device="cuda")
    assert (made.device, made.dtype) == (CUDA, torch.float32)  # as for a CPU tensor: its source's
    assert torch.empty_like(source).device == source.new_zeros(3).device == CUDA
    assert source.new_tensor([7]).device == CUDA
    assert source.new_tensor([7], device="cpu").tolist() == [7.0]
    assert taken(process) == [8, 12, 8, 12, 4]


def test_a_tensor_is_made_from_the_numbers_of_others(process: SimulatedProcess) -> None:
    numbers = torch.tensor([3, 4], device="cuda")
    made = torch.tensor([[numbers[0], numbers.max() + 1]], device="cuda")
    assert made.device == CUDA and made.dtype == torch.int64
    assert made.tolist() == torch.tensor([[numbers[0], 5]]).tolist() == [[3, 5]]
    assert torch.tensor([torch.empty(2, device="cuda").sum(), 1.0]).tolist() == [0.0, 1.0]


def test_a_list_index_is_copied_to_the_gpu(process: SimulatedProcess) -> None:
    source = torch.tensor([[5, 6, 7]], device="cuda")
    assert source[:, [-1, 0]].tolist() == [[7, 5]]
    source[0, [True, False, True]] = 1
    assert torch.tensor([1, 2])[[0]].tolist() == [1]
    assert taken(process)[:3] == [24, 16, 16]  # the tensor, the two indices, the result


@pytest.mark.parametrize(
    "move",
    [
        lambda t: t.to("cuda"),
        lambda t: t.to(0),
        lambda t: t.to(device="cuda"),
        lambda t: t.to("cuda", non_blocking=True),
        lambda t: t.to("cuda", torch.float32),
        lambda t: t.cuda(),
        lambda t: t.pin_memory().to("cuda"),
        lambda t: t.to(torch.empty(0, device="cuda")),
    ],
)
def test_a_move_takes_memory_once(process: SimulatedProcess, move: Any) -> None:
    moved = move(torch.ones(256))
    assert moved.device == CUDA
    assert moved.to("cuda") is moved
    assert taken(process) == [1024]


def test_a_move_can_change_the_type(process: SimulatedProcess) -> None:
    assert torch.ones(256).to("cuda", torch.float16).dtype == torch.float16
    assert torch.ones(256).to("cuda", dtype=torch.bfloat16).dtype == torch.bfloat16
    assert taken(process) == [512, 512]


def test_a_type_alone_moves_nothing(process: SimulatedProcess) -> None:
    here, there = torch.ones(4).to(torch.float16), torch.empty(4, device="cuda").to(torch.float16)
    assert (here.device, there.device) == (CPU, CUDA)
    assert taken(process) == [16, 8]


def test_a_cpu_copy_stays_on_the_cpu(process: SimulatedProcess) -> None:
    back = torch.empty(256, device="cuda").cpu()
    assert back.device == CPU
    assert (back + 1).device == CPU
    assert taken(process) == [1024]
    assert (back.to("cuda") * 2).device == CUDA
    assert taken(process) == [1024, 1024, 1024]


def test_the_meta_device_takes_no_memory_and_releases_that_of_the_gpu(process: SimulatedProcess) -> None:
    model = nn.Linear(8, 8).to("cuda")
    model.to("meta", dtype=torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16 and not model.weight.is_cuda
    assert not torch.ones(4).to("meta").is_cuda
    assert [event.action for event in process.recorder.trace.events] == ["alloc", "alloc", "free", "free"]


def test_a_release_is_in_the_trace(process: SimulatedProcess) -> None:
    first = torch.empty(256, device="cuda")
    view = first.view(16, 16)
    del first
    assert [event.action for event in process.trace.events] == ["alloc"]
    del view
    assert [event.action for event in process.trace.events] == ["alloc", "free"]


def test_a_model_moves_as_a_whole(process: SimulatedProcess) -> None:
    with process.on_host():
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    assert {p.device for p in model.parameters()} == {CPU}
    assert taken(process) == []
    parameters = list(model.parameters())
    model.to("cuda")
    assert {t.device for t in (*model.parameters(), *model.buffers())} == {CUDA}
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert taken(process) == [256, 32, 32, 32, 32, 32, 8]


@pytest.mark.parametrize(
    "to",
    [
        lambda m: m.to(device="cuda", dtype=torch.bfloat16),
        lambda m: m.to(device=torch.device("cuda"), dtype=torch.bfloat16),
        lambda m: m.to(torch.device(0), torch.bfloat16),
        lambda m: m.to(0, torch.bfloat16),
        lambda m: m.to(device=0, dtype=torch.bfloat16),
        lambda m: m.to(torch.bfloat16).to(device="cuda"),
    ],
)
def test_a_module_moves_by_keyword(process: SimulatedProcess, to: Any) -> None:
    with process.on_host():
        model = nn.Linear(8, 8)
    moved = to(model)
    assert (moved.weight.device, moved.weight.dtype) == (CUDA, torch.bfloat16)
    assert taken(process) == [128, 16]


def test_buffers_without_a_shape_get_theirs_on_the_gpu(process: SimulatedProcess) -> None:
    with process.on_host():
        model = nn.LazyBatchNorm1d()
    assert model.to("cuda")(torch.empty(4, 8, device="cuda")).shape == (4, 8)
    assert isinstance(model, nn.BatchNorm1d) and model.running_mean is not None
    assert (model.running_mean.shape, model.running_mean.device) == ((8,), CUDA)


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (1.0, 2.0)])
def test_truncated_normal_values_are_drawn_a_few_times(process: SimulatedProcess, bounds: tuple[float, float]) -> None:
    weight = torch.empty(256, device="cuda")
    assert nn.init.trunc_normal_(weight, 0.0, 1.0, *bounds) is weight
    assert 0 < len(taken(process)) < 60


def test_an_empty_tensor_takes_no_memory(process: SimulatedProcess) -> None:
    torch.empty(0, 5, device="cuda")
    assert process.trace.events == []


def test_emptying_the_cache_is_in_the_trace(process: SimulatedProcess) -> None:
    torch.cuda.empty_cache()
    assert [event.action for event in process.trace.events] == ["empty_cache"]


def test_lengths_are_copied_back_to_the_cpu_with_their_values(process: SimulatedProcess) -> None:
    lengths = torch.tensor([3, 1, 2]).to("cuda")
    assert lengths.cpu().tolist() == [3, 1, 2]
    packed = nn.utils.rnn.pack_padded_sequence(
        torch.randn(3, 4, 8, device="cuda"), lengths.cpu(), batch_first=True, enforce_sorted=False
    )
    assert packed.data.shape == (6, 8) and packed.batch_sizes.tolist() == [3, 2, 1]
