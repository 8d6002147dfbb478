"""Activations that are kept in host memory: PyTorch's hooks, transformers' checkpoints, TRL's trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import checkpoint

import trainatomy
from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.plan import Processor
from trainatomy.operators.traffic import crosses, is_asynchronous
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload import Workload

MODEL = """
def model():
    return Network()

def batch(size):
    return {"x": torch.zeros(size, 64)}

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 64))

    def forward(self, x):
        return {"loss": self.layers(x).square().mean()}
"""
GPT2 = {"class": "GPT2LMHeadModel", "config": {"n_layer": 3, "n_embd": 64, "n_head": 2, "vocab_size": 4096}}
SEQUENCE, BATCH = 128, 4


def copied(simulation: Simulation, *, to_host: bool) -> list[int]:
    """Return the bytes of each copy of a step from the GPU to the host, or back."""
    found = simulation.operations
    calls = [found.calls[one.call] for one in found.operations for _ in range(one.repeats)]
    ends = [(call.outputs[0].on_host, call.inputs[0].bytes) for call in calls if crosses(call)]
    return sorted(size for on_host, size in ends if on_host == to_host)


def saved_on_a_cpu(source: str, size: int) -> list[int]:
    """Run a step with real numbers and return the bytes of each tensor that autograd saves."""
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(source, names)
    model, sizes = names["model"](), list[int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**names["batch"](size))["loss"]
    loss.backward()
    return sorted(sizes)


@pytest.mark.parametrize("kind", ["pinned", "pageable"])
def test_what_autograd_saves_is_copied_to_the_host_and_back(kind: str, from_factory: Callable[..., Workload]) -> None:
    train = {"per_device_train_batch_size": 32}
    workload = from_factory(MODEL, activation_offloading=kind, train=train)
    simulation = simulate(workload, workload.resolve_gpu())
    expected = saved_on_a_cpu(MODEL, 32)
    batch = [32 * 64 * 4]
    assert copied(simulation, to_host=True) == expected
    assert copied(simulation, to_host=False) == sorted(expected + batch)
    waits = [not is_asynchronous(call) for call in simulation.operations.calls if crosses(call)]
    assert sum(waits) == (1 if kind == "pinned" else len(waits))


def test_the_cpu_waits_for_copies_of_older_releases(from_factory: Callable[..., Workload]) -> None:
    """Since 2.12 ``save_on_cpu`` does not wait for its copies to pinned memory."""

    def predicted(torch_version: str) -> trainatomy.Prediction:
        train, software = {"per_device_train_batch_size": 32}, {"torch": torch_version}
        workload = from_factory(MODEL, activation_offloading="pinned", train=train, software=software)
        return trainatomy.predict(workload)

    before, since = predicted("2.11"), predicted("2.13")
    assert before.time is not None and since.time is not None
    assert before.time.step_seconds > since.time.step_seconds


@pytest.mark.parametrize("blocks", [True, False])
def test_a_blocking_copy_of_pinned_memory_is_a_copy_and_a_wait(process: SimulatedProcess, blocks: bool) -> None:
    on_gpu, on_host = torch.ones(4, 8, device="cuda"), torch.empty(4, 8, pin_memory=True)
    before = len(process.trace.cpu_waits)
    on_host.copy_(on_gpu, non_blocking=not blocks)
    on_host.to("cuda", non_blocking=not blocks)
    assert len(process.trace.cpu_waits) - before == (2 if blocks else 0)


def test_activations_leave_the_gpu(from_factory: Callable[..., Workload]) -> None:
    def predicted(kind: str | None) -> trainatomy.Prediction:
        train = {"per_device_train_batch_size": 16384}
        return trainatomy.predict(from_factory(MODEL, activation_offloading=kind, train=train))

    found = {kind: predicted(kind) for kind in (None, "pinned", "pageable")}
    kept = found[None].memory.components.activations
    assert kept > 16384 * (512 + 512) * 4
    assert max(found[kind].memory.components.activations for kind in ("pinned", "pageable")) < kept / 100
    assert found["pinned"].memory.peak_allocated_bytes < found[None].memory.peak_allocated_bytes
    pinned, pageable = (found[kind].time for kind in ("pinned", "pageable"))
    assert pinned is not None and pageable is not None
    assert pinned.bound_by == pageable.bound_by == "transfers" and pinned.step_seconds < pageable.step_seconds / 2
    assert not any("host memory" in note for note in found[None].notes)
    (note,) = [note for note in found["pageable"].notes if "host memory" in note]
    assert note.startswith(trainatomy.units.human_bytes(sum(saved_on_a_cpu(MODEL, 16384))))


def test_checkpoints_keep_the_inputs_of_layers_in_pinned_memory() -> None:
    def predicted(**kwargs: bool) -> trainatomy.Prediction:
        checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs or None}
        described = {
            "model": GPT2,
            "data": {"sequence_length": SEQUENCE},
            "train": {"per_device_train_batch_size": BATCH, **checkpointing},
        }
        return trainatomy.predict(Workload.from_mapping(described))

    on_gpu, on_host = predicted(), predicted(offload=True)
    inputs = 3 * BATCH * SEQUENCE * 64 * 4
    assert on_gpu.memory.components.activations - on_host.memory.components.activations == inputs
    (note,) = [note for note in on_host.notes if "pinned" in note]
    assert note.startswith(trainatomy.units.human_bytes(inputs))  # each is a power of two


@pytest.mark.parametrize("loop", ["sft", "dpo", "reward"])
def test_trl_keeps_activations_in_host_memory_on_a_stream_of_its_own(loop: str) -> None:
    pytest.importorskip("trl")

    def simulated(*, offloads: bool) -> Simulation:
        scores = {"class": "GPT2ForSequenceClassification", "config": {**GPT2["config"], "num_labels": 1}}
        described = {
            "model": scores if loop == "reward" else GPT2,
            "loop": loop,
            "data": {"sequence_length": SEQUENCE, **({"prompt_length": 32} if loop in ("dpo",) else {})},
            "train": {"per_device_train_batch_size": BATCH, "gradient_checkpointing": False},
            "trl": {"activation_offloading": offloads},
        }
        workload = Workload.from_mapping(described)
        return simulate(workload, workload.resolve_gpu())

    offloading = simulated(offloads=True)
    assert loop != "sft" or not copied(simulated(offloads=False), to_host=True)
    sizes = copied(offloading, to_host=True)
    assert sizes and min(sizes) >= 1024  # TRL leaves smaller ones where they are
    found = offloading.operations
    streams = {crosses(found.calls[one.call]): set[int]() for one in found.operations}
    for one in found.operations:
        if one.phase in ("forward", "backward") and found.calls[one.call].flop:
            streams[False].add(one.stream)
        elif crosses(found.calls[one.call]) and one.phase in ("forward", "backward"):
            streams[True].add(one.stream)
    assert streams == {True: {1}, False: {0}}


@pytest.mark.parametrize(("release", "saved"), [((2, 11), [0, 4096]), ((2, 13), [4096])])
def test_hooks_see_what_checkpoints_of_a_release_save(release: tuple[int, int], saved: list[int]) -> None:
    """Up to PyTorch 2.11 ``_NoopSaveInputs`` saves an empty tensor first (torch/utils/checkpoint.py)."""
    if not hasattr(checkpoint._CheckpointFrame, "save_inputs"):
        pytest.skip("the installed release of PyTorch saves the empty tensor itself")
    found = {"packed": list[tuple[str, int]](), "unpacked": list[tuple[str, int]]()}

    def note(kind: str, tensor: torch.Tensor) -> torch.Tensor:
        found[kind].append((tensor.device.type, tensor.nbytes))
        return tensor

    process = SimulatedProcess("NVIDIA H200", 150 << 30, Processor((9, 0), 132, release), allocation_rules())
    with process.open():
        x = torch.zeros(1024, device="cuda", requires_grad=True)
        with saved_tensors_hooks(lambda tensor: note("packed", tensor), lambda tensor: note("unpacked", tensor)):
            result = checkpoint.checkpoint(lambda tensor: tensor.square().sum(), x, use_reentrant=False)
        result.backward()
    assert x.grad is not None and x.grad.shape == (1024,)
    assert found["packed"] == found["unpacked"] == [("cuda" if size else "cpu", size) for size in saved]
    assert "save_inputs" in vars(checkpoint._CheckpointFrame)


def test_tensors_that_are_laid_out_otherwise_take_a_copy_on_the_gpu(process: SimulatedProcess) -> None:
    x = torch.rand(64, 32, device="cuda")
    event = len(process.trace.events)
    torch.empty(32, 64, pin_memory=True).copy_(x.t(), non_blocking=True)
    assert [(each.action, each.bytes) for each in process.trace.events[event:]] == [("alloc", x.nbytes), ("free", 0)]
    event = len(process.trace.events)
    assert x.t().cpu().stride() == (1, 32) and x[:, :8].cpu().is_contiguous()
    assert [each.bytes for each in process.trace.events[event:] if each.action == "alloc"] == [64 * 8 * 4]


def test_values_come_back_with_their_tensors(process: SimulatedProcess) -> None:
    mask = torch.ones(4, 8, dtype=torch.bool).to("cuda")
    for pinned in (False, True):
        target = torch.empty(4, 8, dtype=torch.bool, pin_memory=True) if pinned else None
        on_host = mask.cpu() if target is None else target.copy_(mask)
        assert bool(on_host.to("cuda", non_blocking=pinned).all())


def test_pinned_buffers_take_no_memory_and_are_counted_while_hooks_pack(process: SimulatedProcess) -> None:
    apart = torch.empty(1 << 40, dtype=torch.uint8, pin_memory=True)
    assert not apart.is_cuda and process.storages.host_memory.pinned == 0
    weight = torch.zeros(1000, device="cuda", requires_grad=True)
    with save_on_cpu(pin_memory=True):
        results = [weight * weight for _ in range(3)]
    assert process.storages.host_memory.pinned == 6 * 4096
    del results
    with save_on_cpu(pin_memory=True):
        assert (weight * weight).requires_grad
    assert process.storages.host_memory.pinned == 6 * 4096  # blocks are used again
    first, *others = process.trace.pinned
    assert [each.bytes for each in (first, *others)] == [4096] * 6
    assert first.allocation < others[-1].allocation <= len(process.trace.origins)


def test_a_node_keeps_its_stream_where_a_hook_chooses_another(process: SimulatedProcess) -> None:
    side = torch.cuda.Stream()
    weight = torch.zeros(1000, device="cuda", requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(side):
            return tensor.cpu()

    with saved_tensors_hooks(pack, lambda tensor: tensor.to("cuda")):
        result = (weight * weight).sum()
    event = len(process.trace.events)
    result.backward()
    assert {each.stream for each in process.trace.events[event:] if each.action == "alloc"} == {0}


def test_storages_have_addresses_of_their_own(process: SimulatedProcess) -> None:
    tensors = [torch.zeros(16, device="cuda") for _ in range(100)]
    found = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(found) == 100 and 0 not in found
    assert tensors[0][4:].untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr()


def test_a_module_that_offloads_by_itself_is_predicted() -> None:
    class Offloading(nn.Module):
        def __init__(self, *, offloads: bool) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
            self.offloads = offloads

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.offloads:
                return self.layers(x).sum()
            with save_on_cpu():
                return self.layers(x).sum()

    batch = {"x": torch.zeros(8192, 64)}
    without, found = (trainatomy.predict(Offloading(offloads=each), batch=batch, gpu="h200") for each in (False, True))
    saved = without.memory.peak_allocated_bytes - found.memory.peak_allocated_bytes
    assert saved >= 2 * 6 * 8192 * 64 * 4  # at least six of eight layers, whose linear layer and GELU save their inputs
    with save_on_cpu():
        pass  # what is patched is put back
    assert torch.autograd.graph.save_on_cpu is save_on_cpu
