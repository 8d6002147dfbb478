"""The time of steps on several GPUs: what is communicated, what waits for it, and what all GPUs do together."""

from __future__ import annotations

from typing import Any

import pytest

from trainatomy.api.predicting import predict
from trainatomy.catalog.calibrations import SCHEMA, parse
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.links import links_of
from trainatomy.operators.cost.communication import collective_seconds
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.prediction import Prediction
from trainatomy.results.time import Communication
from trainatomy.simulator.simulate import simulate
from trainatomy.timing import step
from trainatomy.timing.cost_model import cost_model_of, kernel_cost
from trainatomy.timing.launch import batch_bytes
from trainatomy.timing.timeline import blocks_cpu
from trainatomy.workload.schema import Workload

CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "vocab_size": 8000,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
PRODUCT = "aten::mm(f32[4096,4096],f32[4096,4096])->f32[4096,4096]"


def workload(**parallel: Any) -> Workload:
    return Workload.from_mapping(
        {
            "loop": "pytorch",
            "model": {"class": "LlamaForCausalLM", "config": CONFIG},
            "data": {"sequence_length": 512},
            "train": {"per_device_train_batch_size": 8},
            "gpu": "h200",
            "parallel": parallel,
        }
    )


def shared(prediction: Prediction) -> Communication:
    assert prediction.time is not None and prediction.time.communication is not None
    return prediction.time.communication


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp1"])
def test_a_slower_link_makes_the_step_longer(strategy: str) -> None:
    fast, slow = (predict(workload(gpus=2, strategy=strategy, link={"intra": link})) for link in ("nvlink4", "2 GB/s"))
    assert fast.time is not None and slow.time is not None
    assert shared(slow).seconds > 10 * shared(fast).seconds
    assert slow.time.step_seconds > fast.time.step_seconds
    assert slow.time.bound_by == "communication"
    assert shared(slow).scaling_efficiency < 0.5 < shared(fast).scaling_efficiency <= 1
    assert shared(slow).exposed_seconds <= shared(slow).seconds


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_kernels_beside_collectives_take_longer(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described = workload(gpus=2, strategy=strategy, link={"intra": "20 GB/s"})
    found = predict(described)
    with monkeypatch.context() as patch:
        patch.setattr(step, "contention_in", lambda *_: None)
        alone = predict(described)
    assert found.time is not None and alone.time is not None
    assert shared(found).slowed_seconds > 0 == shared(alone).slowed_seconds
    assert alone.time.step_seconds <= found.time.step_seconds
    assert sum(found.time.phases.values()) == pytest.approx(
        sum(alone.time.phases.values()) + shared(found).slowed_seconds
    )
    lost = shared(found).exposed_seconds + shared(found).slowed_seconds
    assert shared(found).scaling_efficiency == pytest.approx(1 - lost / found.time.step_seconds)
    assert "slows kernels by" in render(prediction_page(found))
    assert "slows kernels by" not in render(prediction_page(alone))


def test_totals_count_ranks_that_process_different_samples() -> None:
    found = predict(workload(gpus=4, nodes=2, tp_size=4, strategy="fsdp2"))
    assert found.time is not None
    assert (shared(found).gpus, shared(found).data_parallel_size) == (8, 2)
    assert shared(found).total_samples_per_second == 2 * found.time.samples_per_second
    assert shared(found).links_assumed and len(shared(found).links) == 2


def test_one_gpu_has_no_communication_and_no_memory_of_nccl() -> None:
    found = predict(workload())
    assert found.time is not None and found.time.communication is None
    assert "nccl" not in found.memory.components.others


def test_nccl_is_part_of_device_memory() -> None:
    memory = predict(workload(gpus=2), timed=False).memory
    assert memory.components["nccl"] == 840 * 2**20
    assert memory.device_bytes == memory.components.total_bytes
    assert memory.device_bytes == memory.peak_reserved_bytes + memory.components.context + memory.components["nccl"]


def test_without_multicast_large_reductions_take_longer_and_nccl_holds_less(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, without = predict(workload(gpus=4)), predict(workload(gpus=4, link={"nvls": False}))
    assert usual.memory.components["nccl"] - without.memory.components["nccl"] == 4 * 32 * 2**20
    with_nvls, ring = (links_of(find_gpu("h200"), 4, nvls=nvls) for nvls in (True, False))
    assert collective_seconds("all_reduce", 2**30, 4, 1, with_nvls) < collective_seconds(
        "all_reduce", 2**30, 4, 1, ring
    )
    assert shared(without).seconds != shared(usual).seconds
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    by_variable = predict(workload(gpus=4))
    assert by_variable.memory.components["nccl"] == without.memory.components["nccl"]
    assert shared(by_variable).links == shared(without).links != shared(usual).links
    assert predict(workload(gpus=4, link={"nvls": True})).memory.components["nccl"] == usual.memory.components["nccl"]


def test_memory_of_fsdp1_depends_on_timing() -> None:
    peaks = predict(workload(gpus=4, strategy="fsdp1"), timed=False).memory.range
    assert peaks is not None and peaks.reserved_bytes[0] < peaks.reserved_bytes[1]
    assert predict(workload(gpus=4, strategy="fsdp2"), timed=False).memory.range is None


def test_a_calibration_tells_when_memory_of_fsdp1_is_released() -> None:
    content = {
        "schema": SCHEMA,
        "environment": {"gpu": "NVIDIA H200", "capability": [9, 0], "date": "2026-11-29"},
        "sections": {"kernels": {"points": [{"call": PRODUCT, "us": 1e6, "kernels": 1}]}},
    }
    described = workload(gpus=4, strategy="fsdp1")
    usual, slow = predict(described), predict(described, calibration=parse(content, "a slow GPU"))
    assert usual.memory.range is not None and usual.memory.range == slow.memory.range
    assert usual.memory.peak_reserved_bytes < slow.memory.peak_reserved_bytes <= slow.memory.range.reserved_bytes[1]


def test_offloaded_shards_cross_the_bus_while_the_cpu_goes_on() -> None:
    described = workload(gpus=2, strategy="fsdp2", offload_policy="cpu")
    gpu = described.resolve_gpu()
    found = simulate(described, gpu)
    calls = [found.operations.calls[one.call] for one in found.operations.operations]
    copies = [call for call in calls if ("non_blocking", "True") in call.numbers]
    moved = sum(call.inputs[0].bytes for call in copies)
    # Shards come for forward and for all but the last layer's backward, gradients go: between 2 and 3 halves.
    assert found.parameters * 4 <= moved <= found.parameters * 6
    assert not any(blocks_cpu(call) or batch_bytes(call) for call in copies)
    cost_model = cost_model_of(gpu, links=described.parallel.links(gpu))
    seconds = sum(kernel_cost(call, cost_model).seconds for call in copies)
    assert moved / gpu.links["pcie"] < seconds < 3 * moved / gpu.links["pcie"]
    assert found.operations.cpu_waits  # the CPU's optimizer waits for the gradients


def test_an_optimizer_on_the_cpu_takes_its_time() -> None:
    times = [predict(workload(gpus=2, strategy="fsdp2", offload_policy=policy)).time for policy in (None, "cpu")]
    assert times[0] is not None and times[1] is not None
    assert times[1].step_seconds > times[0].step_seconds + 0.02
    assert times[1].bound_by == "host"
