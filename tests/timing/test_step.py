"""The time of a step, where several parts of the timing model interact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainatomy.catalog.calibrations import from_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.machines import reference_host
from trainatomy.prediction.assemble import step_of
from trainatomy.results.operations import Array, Call, Operation, Operations
from trainatomy.results.time import Time
from trainatomy.results.trace import DriverCall
from trainatomy.simulator.simulate import simulate
from trainatomy.timing.extrapolation import attainable_share
from trainatomy.timing.host_costs import CPUCosts, cpu_costs
from trainatomy.timing.launch import batch_seconds, cpu_seconds_by_phase, kind_of, launch_seconds, loop_seconds
from trainatomy.timing.step import RankStep, predict_step_time
from trainatomy.timing.timeline import LaunchCosts, blocks_cpu, replay_step
from trainatomy.workload.schema import Workload

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 64}
MODEL = {"class": "BertForSequenceClassification", "config": TINY}
H200 = find_gpu("h200")


@pytest.fixture(scope="module")
def step() -> Operations:
    workload = {"model": MODEL, "data": {"sequence_length": 8}, "train": {"per_device_train_batch_size": 1}}
    return simulate(Workload.from_mapping(workload), H200).operations


def seconds(step: Operations, *calls: DriverCall) -> float:
    rank_step = RankStep(step, H200, loop="trainer", tf32=False, samples=1, driver_calls=calls)
    return predict_step_time(rank_step, tokens_per_sample=8).step_seconds


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_the_loop_costs_time_for_every_micro_batch(micro_batches: int) -> None:
    train = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": micro_batches}
    workload = Workload.from_mapping({"model": MODEL, "data": {"sequence_length": 8}, "train": train})
    operations = simulate(workload, H200).operations
    costs = cpu_costs(reference_host().microseconds)
    free = replace(costs, micro_step={"trainer": 0.0}, module_micro_step={"trainer": 0.0})
    dear = replace(free, micro_step={"trainer": 1.0})
    host = [sum(cpu_seconds_by_phase(operations, one, "trainer").values()) for one in (free, dear)]
    assert host[1] - host[0] == pytest.approx(micro_batches)
    course = [course_of(operations, one) for one in (free, dear)]
    assert course[1] - course[0] == pytest.approx(micro_batches)


@pytest.mark.parametrize("tokens", [2, 5])
def test_generated_tokens_are_no_micro_batches_of_a_training(tokens: int) -> None:
    array = Array((1024,), (1,), "float32", 4, 0)
    phases = ("forward", "forward", "forward", "backward", "optimizer")
    rows = [(phase, tokens - 1 if place == 1 else 1, place == 1) for place, phase in enumerate(phases)]
    operations = Operations(
        calls=[Call("aten::add", (array, array), (array,))],
        operations=[Operation(0, 0, phase, "", 0, repeats, generated=token) for phase, repeats, token in rows],
        modules=10,
    )
    costs = cpu_costs(reference_host().microseconds)
    free = replace(costs, micro_step={"trainer": 0.0}, module_micro_step={"trainer": 0.0}, token=0.0)
    each = replace(free, micro_step={"trainer": 1.0}, token=10.0)
    host = [sum(cpu_seconds_by_phase(operations, one, "trainer").values()) for one in (free, each)]
    assert host[1] - host[0] == pytest.approx(1 + 10 * (tokens - 1))
    course = [course_of(operations, one) for one in (free, each)]
    assert course[1] - course[0] == pytest.approx(1 + 10 * (tokens - 1))
    launches = list(launch_seconds(operations, replace(costs, forward_pass=0.0), "trainer"))
    assert launches[1] == pytest.approx(costs.without_graph["other"] * launches[0])
    called = replace(free, step={**free.step, "generation": free.step["generation"] + 100.0})
    assert course_of(operations, called) - course[0] == pytest.approx(100)


def course_of(operations: Operations, costs: CPUCosts) -> float:
    launches = list(launch_seconds(operations, costs, "trainer"))
    kernels = [(0.0, 0)] * len(operations.calls)
    launch = LaunchCosts(launches, costs, loop_seconds(operations, costs, "trainer"))
    return replay_step(operations, kernels, launch).cpu_seconds


def test_memory_freed_to_the_driver_costs_time(step: Operations) -> None:
    event = step.operations[len(step.operations) // 2].event
    gives_back = DriverCall(event, "free", 2**30)
    takes = DriverCall(event, "malloc", 2**30)
    assert seconds(step, takes) == seconds(step), "the next step finds it in the cache"
    assert seconds(step, gives_back, takes) > seconds(step, gives_back) > seconds(step)


def test_driver_calls_before_the_step_do_not_count(step: Operations) -> None:
    before = DriverCall(step.operations[0].event - 1, "free", 2**30)
    assert seconds(step, before) == seconds(step)


def test_utilisation_counts_model_flop_by_precision() -> None:
    def time(precision: dict[str, bool], checkpointing: bool) -> Time:
        train = {"per_device_train_batch_size": 8, "gradient_checkpointing": checkpointing, **precision}
        mapping = {"model": MODEL, "data": {"sequence_length": 64}, "train": train}
        found = simulate(Workload.from_mapping(mapping), H200).operations
        rank_step = RankStep(found, H200, loop="trainer", tf32=bool(precision.get("tf32")), samples=8)
        return predict_step_time(rank_step, tokens_per_sample=64)

    def ideal(found: Time) -> float:
        assert found.model_flop_utilisation is not None
        return found.model_flop_utilisation * found.step_seconds

    plain, again = time({}, False), time({}, True)
    assert ideal(plain) == pytest.approx(plain.flop / H200.rates["fp32"])
    assert again.flop > plain.flop and ideal(again) == pytest.approx(ideal(plain))
    half = time({"bf16": True}, False)
    assert ideal(half) == pytest.approx(half.flop / H200.rates["bf16"], rel=0.02)  # the loss stays in fp32
    assert half.attainable_utilisation and half.model_flop_utilisation
    assert half.attainable_utilisation / half.model_flop_utilisation == pytest.approx(
        1 / attainable_share(H200, "bf16"), rel=0.02
    )


def test_the_cpu_waits_after_each_bitsandbytes_update() -> None:
    tensor = Array((16,), (1,), "float32", 4, 0)
    update = Call("bitsandbytes::optimizer_update_8bit_blockwise", (tensor,), ())
    assert blocks_cpu(update) and kind_of(update) == "library"
    assert not blocks_cpu(Call("aten::_fused_adamw_", (tensor,), ()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aten::_to_copy(hf32[4,10])->f32[4,10]", True),
        ("aten::_to_copy(hf32[])->f32[]", True),
        ("aten::index(f32[64,8],hi64[4])->f32[4,8]", True),
        ("aten::mul(f32[4,10],hf32[])->f32[4,10]", False),  # a CPU scalar is an argument of the kernel
        ("aten::index(f32[64,8],b8[64])->f32[32,8]", True),
        ("aten::index(f32[64,8],i64[4])->f32[4,8]", False),
        ("aten::_unique2(i64[64])->i64[8],i64[64],i64[8]", True),
    ],
)
def test_the_cpu_waits_for_values_and_batches_but_not_for_cpu_scalars(text: str, expected: bool) -> None:
    assert blocks_cpu(from_text(text)) is expected


def test_unpublished_shares_are_unknown() -> None:
    v100 = find_gpu("v100-16gb")
    assert attainable_share(H200, "fp64") is None and attainable_share(H200, "fp8") is None
    assert attainable_share(v100, "bf16") == attainable_share(v100, "fp32") != attainable_share(v100, "fp16")


def test_a_slower_host_takes_longer_to_copy_a_batch() -> None:
    copy = from_text("aten::_to_copy(hf32[250000000])->f32[250000000]")
    assert copy.inputs[0].on_host and not copy.outputs[0].on_host
    alone = Operations(calls=(copy,), operations=(Operation(0, 0, "forward", "", 0, 1),))
    rank_step = RankStep(alone, H200, loop="inference", tf32=None, samples=1, collated=False)
    found = predict_step_time(rank_step, tokens_per_sample=None, paces=(2.0,))
    (beside,) = found.at_paces
    quick = 1e9 / 9e9
    assert beside.step_seconds - found.step_seconds == pytest.approx((2**0.46 - 1) * quick, rel=0.05)


def test_a_function_that_returns_batches_saves_what_collating_costs(step: Operations) -> None:
    with_batches = RankStep(step, H200, loop="trainer", tf32=False, samples=1)
    made, returned = (
        predict_step_time(one, tokens_per_sample=8) for one in (with_batches, replace(with_batches, collated=False))
    )
    costs = cpu_costs(reference_host().microseconds)
    batches = sum(batch_seconds(one, step.calls[one.call], costs, "trainer") for one in step.operations)
    saved = (costs.collate["trainer"] + batches) * reference_host().quiet
    assert made.step_seconds - returned.step_seconds == pytest.approx(saved, rel=1e-3) and saved > 1e-4


def test_each_sample_of_a_step_is_fetched(step: Operations) -> None:
    few, many = (
        predict_step_time(RankStep(step, H200, loop="trainer", tf32=False, samples=samples), tokens_per_sample=8)
        for samples in (1, 10001)
    )
    each = cpu_costs(reference_host().microseconds).sample["trainer"] * reference_host().quiet
    assert many.step_seconds - few.step_seconds == pytest.approx(10000 * each) and each > 1e-7


@pytest.mark.parametrize(
    ("parallel", "slow"), [({}, False), ({"gpus": 2, "strategy": "dp"}, False), ({"gpus": 2}, True)]
)
def test_large_tensors_of_the_cpu_are_worked_on_by_one_thread_where_several_processes_are(
    parallel: dict[str, Any], *, slow: bool
) -> None:
    added = from_text("aten::add(hf32[5000000],hf32[5000000])->hf32[5000000]")
    alone = Operations(calls=(added,), operations=(Operation(0, 0, "forward", "", 0, 1),))
    workload = Workload.from_mapping({"gpu": "h200", "model": MODEL, "parallel": parallel})
    simulation = simulate(Workload.from_mapping({"gpu": "h200", "model": MODEL}), H200)
    rank_step = step_of(workload, simulation, alone, None, ())
    found, threads = (
        predict_step_time(one, tokens_per_sample=None) for one in (rank_step, replace(rank_step, one_thread=False))
    )
    costs, moved = cpu_costs(reference_host().microseconds), 60e6
    more = moved * (costs.one_thread_byte - costs.host_byte) if slow else 0.0
    assert found.step_seconds - threads.step_seconds == pytest.approx(more, abs=1e-6)
