"""``torch.nn.DataParallel``: one process with several GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from executed import simulated
from spread import HIDDEN, VOCABULARY, labelled, weight_bytes, workload
from torch import nn
from torch.nn.parallel import comm
from torch.nn.parallel._functions import Broadcast

from trainatomy import api
from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.measurement.device.nvml import show_first_gpus
from trainatomy.measurement.step.group import place_of
from trainatomy.reporters.export_python import plain_loop
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.prediction import GroupUse, Plan
from trainatomy.simulator.modules import ModuleTracker
from trainatomy.simulator.parallel.data_parallel import take_tensors
from trainatomy.simulator.simulate import simulate, topology_of
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload.reading import read_all
from trainatomy.workload.schema import Workload

LENGTH, SAMPLES = 64, 2


def on_gpu(described: Workload, gpu: int) -> Simulation:
    return simulate(described, described.resolve_gpu(), topology=topology_of(described, gpu))


def transfers(simulation: Simulation, name: str) -> list[int]:
    calls = [simulation.operations.calls[one.call] for one in simulation.operations.operations]
    return [int(dict(call.numbers)["bytes"]) for call in calls if call.name == name]


def held(simulation: Simulation, label: str) -> int:
    """Bytes of allocations with a label, at most at once."""
    now = most = 0
    sizes: dict[int, int] = {}
    for event in simulation.trace.events:
        if event.action == "alloc" and simulation.trace.labels.get(event.allocation) == label:
            sizes[event.allocation] = event.bytes
            now += event.bytes
            most = max(most, now)
        elif event.action == "free":
            now -= sizes.pop(event.allocation, 0)
    return most


def test_other_gpus_hold_a_replica_and_its_gradients_and_no_optimizer_states() -> None:
    described = workload(strategy="dp", gpus=2)
    first, second = on_gpu(described, 0), on_gpu(described, 1)
    weights = weight_bytes(first)
    assert held(first, "weight") == weights
    assert held(first, "replica_weight") == held(second, "weight") == held(second, "optimizer_state") == 0
    assert weights <= held(second, "replica_weight") < weights * 1.001  # and the buffers
    assert held(second, "gradient") == weights
    assert held(first, "gradient") == 2 * weights  # its own share's, and the sum of all
    assert labelled(first.trace, "optimizer_state") == pytest.approx(2 * weights, rel=0.001)
    assert second.trace.rank == 1


def test_weights_are_broadcast_and_gradients_reduced_once_in_each_step() -> None:
    found = simulated(workload(strategy="dp", gpus=2))
    buffers = 32 * 4  # inv_freq of the rotary embedding, in a broadcast of its own
    assert sum(transfers(found, "nccl::broadcast")) == pytest.approx(weight_bytes(found) + buffers, abs=buffers)
    assert sum(transfers(found, "nccl::reduce")) == weight_bytes(found)
    assert found.communicators == {(0, 1): {GroupUse("broadcast"), GroupUse("reduce")}}


def test_logits_of_the_other_gpus_are_gathered_on_the_first() -> None:
    found = simulated(workload(strategy="dp", gpus=3))
    logits = SAMPLES * LENGTH * VOCABULARY * 4
    assert transfers(found, "peer::copy").count(logits) == 2
    whole = [event.bytes for event in found.trace.events if event.action == "alloc"]
    assert 3 * logits in whole


def test_each_gpu_trains_on_its_chunk() -> None:
    for gpu in (0, 1):
        found = on_gpu(workload(strategy="dp", gpus=2), gpu)
        shapes = {call.outputs[0].shape for call in found.operations.calls if call.name == "aten::embedding"}
        assert shapes == {(SAMPLES, LENGTH, HIDDEN)}


def test_groups_are_full_when_they_reach_the_limit() -> None:
    sizes = {"a": 3, "b": 1, "c": 5, "d": 1}
    tensors = [torch.empty(size, dtype=torch.float32) for size in sizes.values()]
    halves = [torch.empty(2, dtype=torch.float16)]
    groups = list(take_tensors([*tensors[:2], *halves, *tensors[2:]], 16))
    assert [[one.numel() for one in group] for group in groups] == [[3, 1], [5], [2], [1]]


def test_frozen_weights_get_zeros_as_gradients_on_every_gpu() -> None:
    mapping = workload(strategy="dp", gpus=2).to_mapping()
    mapping["model"]["freeze"] = "model.layers.*"
    described = Workload.from_mapping(mapping)
    first, second = on_gpu(described, 0), on_gpu(described, 1)
    assert held(second, "gradient") == weight_bytes(first)
    assert sum(transfers(first, "nccl::reduce")) == weight_bytes(first)


@pytest.mark.parametrize("train", [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}])
def test_the_trainer_wraps_the_model_without_a_launcher(train: dict[str, Any]) -> None:
    described = workload("trainer", train, strategy="dp", gpus=2)
    found = simulated(described)
    accumulation = train.get("gradient_accumulation_steps", 1)
    assert sum(transfers(found, "nccl::reduce")) == weight_bytes(found) * accumulation
    threads = {(one.phase, one.threads) for one in found.operations.operations}
    assert ("forward", 2) in threads and ("backward", 2) not in threads
    assert (("recompute", 2) in threads) == bool(train.get("gradient_checkpointing"))


@pytest.mark.parametrize(("loop", "computed"), [("trainer", "float32"), ("pytorch", "float16")])
def test_bfloat16_does_not_reach_the_threads(loop: str, computed: str) -> None:
    found = simulated(workload(loop, {"bf16": True}, strategy="dp", gpus=2))
    products = {call.outputs[0].dtype for call in found.operations.calls if call.name == "aten::mm"}
    assert products == {computed}
    assert any("bf16" in note for note in found.notes)


def test_replicas_and_threads_take_time_of_the_cpu() -> None:
    times = {strategy: api.predict(workload(strategy=strategy, gpus=2)).time for strategy in ("dp", "ddp")}
    assert times["dp"] is not None and times["ddp"] is not None
    assert times["dp"].host_seconds > 1.3 * times["ddp"].host_seconds
    assert times["dp"].communication is not None
    assert times["dp"].communication.exposed_seconds > times["ddp"].communication.exposed_seconds  # type: ignore[union-attr]
    assert times["dp"].communication.total_samples_per_second == pytest.approx(2 * times["dp"].samples_per_second)


def test_the_page_shows_the_bill_of_another_gpu() -> None:
    prediction = api.predict(workload(strategy="dp", gpus=2), ranks=(1,))
    text = render(prediction_page(prediction), width=120)
    assert "GPU 1: GPU memory at the peak" in text and "replica of this step" in text
    own, other = prediction.ranks[0].memory, prediction.ranks[1].memory
    assert other.peak_allocated_bytes < own.peak_allocated_bytes
    assert other.components.optimizer_states == 0


@pytest.mark.parametrize(
    ("loop", "train", "parallel", "key"),
    [
        ("pytorch", {}, {"nodes": 2}, "nodes"),
        ("pytorch", {}, {"tp_size": 2}, "tp_size"),
        ("pytorch", {}, {"static_graph": True}, "static_graph"),
        ("pytorch", {}, {"dp_shard_size": 2}, "dp_shard_size"),
        ("trainer", {"ddp_bucket_cap_mb": 5}, {}, "ddp_bucket_cap_mb"),
        ("trainer", {"fsdp": True}, {}, "fsdp"),
    ],
)
def test_settings_of_other_strategies_are_refused(loop: str, train: Any, parallel: Any, key: str) -> None:
    with pytest.raises(WorkloadError, match=key):
        workload(loop, train, strategy="dp", gpus=2, **parallel)


def test_a_gpu_that_does_not_exist_is_refused() -> None:
    with pytest.raises(WorkloadError, match="GPU 2"):
        topology_of(workload(strategy="dp", gpus=2), 2)


def test_everything_is_put_back() -> None:
    def patched() -> tuple[Any, ...]:
        names = ("_scatter", "_gather", "_broadcast_coalesced", "_nccl_reduce")
        inside = (comm.reduce_add_coalesced, comm.nccl.is_available, Broadcast.forward, Broadcast.backward)
        return (*(getattr(torch._C, name, None) for name in names), *inside)

    before = patched()
    simulated(workload(strategy="dp", gpus=2))
    assert patched() == before


def test_the_plan_and_its_code_name_data_parallel() -> None:
    described = workload(strategy="dp", gpus=4)
    assert Plan.of(described.to_mapping()) == Plan("dp", 4)
    assert Plan.of(workload("trainer", strategy="dp", gpus=4).to_mapping()).strategy == "dp"
    code = plain_loop(described)
    assert "torch.nn.DataParallel(model)" in code and "batch_size=8, shuffle=True" in code
    assert "model(**batch).loss.mean()" in code and "DistributedSampler" not in code


def test_a_measurement_is_one_process_that_sees_its_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_of(workload(strategy="dp", gpus=2).parallel).size == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    show_first_gpus(2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    show_first_gpus(2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_model_on_a_gpu_of_another_process_is_refused() -> None:
    from trainatomy.simulator.driver import CurrentDevice
    from trainatomy.simulator.parallel.group import Topology

    with pytest.raises(SimulationError, match="cuda:1 is not simulated"):
        CurrentDevice(Topology(gpus_per_node=2)).check("cuda:1")
    assert CurrentDevice(Topology(gpus_per_node=2, devices=2)).check("cuda:1") == 1


def test_the_cases_that_wait_for_a_measurement_are_valid() -> None:
    rows = read_all(Path(__file__).parents[2] / "lab/parallel/data_parallel.yaml")
    assert len({row.name for row in rows}) == 7
    assert {row.parallel.devices for row in rows} == {2} and {row.loop for row in rows} == {"pytorch", "trainer"}


def test_an_error_in_a_thread_names_its_cause() -> None:
    described = Workload.from_mapping(
        {
            "model": {
                "class": "SwitchTransformersForConditionalGeneration",
                "config": {"d_model": 64, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100},
                "dtype": "bfloat16",
            },
            "data": {"sequence_length": 16},
            "gpu": "h200",
            "parallel": {"gpus": 2, "strategy": "dp"},
        }
    )
    with pytest.raises(SimulationError, match=r"mm: self \(float32\) and mat2 \(bfloat16\) must have the same type"):
        simulate(described, described.resolve_gpu())


def test_no_later_module_takes_the_name_of_a_replica() -> None:
    tracker = ModuleTracker(lambda again: None)
    tracker.learn_copy(nn.Linear(1, 1), nn.Dropout())  # the replica dies here; Python gives its id to a later object
    assert {tracker.path(nn.Linear(1, 1)) for _ in range(100)} == {"Linear"}
