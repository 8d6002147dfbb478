"""CPU speed: the trainings that measure it, the resulting factors, and their effect on predictions."""

from __future__ import annotations

from dataclasses import replace
from statistics import geometric_mean

import pytest

from trainatomy.catalog.calibrations import Calibration, from_text
from trainatomy.catalog.gpus import find_gpu, gpus
from trainatomy.catalog.machines import reference_host
from trainatomy.measurement.calibration import expected, host
from trainatomy.measurement.calibration import host as phases
from trainatomy.measurement.device.host import PROBE
from trainatomy.results.measurement import HostPace
from trainatomy.results.operations import Array, Call, Operation, Operations
from trainatomy.simulator.simulate import simulate
from trainatomy.timing.host_costs import PARTS, by_one_thread, cpu_costs, stacking_seconds
from trainatomy.timing.launch import (
    backward_share,
    batch_bytes,
    batch_seconds,
    cpu_seconds_by_phase,
    kind_of,
    launch_seconds,
    loop_seconds,
)
from trainatomy.timing.step import RankStep, predict_step_time


@pytest.fixture(scope="module")
def encoder() -> Operations:
    workload = expected.trainings()[0]
    return simulate(workload, find_gpu("h200")).operations


def calibration(factors: dict[str, float], reference: str) -> Calibration:
    environment = {"gpu": "NVIDIA H200", "date": "2026-11-21", "capability": [9, 0]}
    return Calibration(environment, (), {"host": {"reference": reference, "factors": factors}}, "by hand")


def seconds(operations: Operations, found: Calibration | None) -> float:
    rank_step = RankStep(operations, find_gpu("h200"), loop="trainer", tf32=False, samples=1, calibration=found)
    time = predict_step_time(rank_step, tokens_per_sample=16)
    assert time.bound_by == "host"
    return time.host_seconds


def test_factors_are_geometric_means_by_part() -> None:
    measured = [{"forward": 2000.0, "backward": 3000.0, "optimizer": 90.0}, {"forward": 8000.0, "backward": 3000.0}]
    reference = [{"forward": 1000.0, "backward": 3000.0, "optimizer": 90.0}, {"forward": 1000.0, "backward": 6000.0}]
    assert host.factors(measured, reference) == {"graph": 4.0, "backward": round(geometric_mean((1, 0.5)), 3)}


def test_a_slower_cpu_makes_a_slower_step(encoder: Operations) -> None:
    known = reference_host()
    same = seconds(encoder, calibration(dict.fromkeys(PARTS, 1.0), known.id))
    slow = seconds(encoder, calibration(dict.fromkeys(PARTS, 2.0), known.id))
    costs = cpu_costs(known.microseconds)
    waits = same - sum(cpu_seconds_by_phase(encoder, costs, "trainer").values()) - costs.sample["trainer"]
    assert slow - waits == pytest.approx(2 * (same - waits), rel=1e-6)


def test_without_factors_the_cpu_counts_as_idle(encoder: Operations) -> None:
    known = reference_host()
    quiet = calibration(dict.fromkeys(PARTS, known.quiet), known.id)
    assert seconds(encoder, None) == pytest.approx(seconds(encoder, quiet))
    assert replace(known, slowdowns=(1.0, 4.0)).quiet == 1.0


def test_parts_without_a_factor_are_as_on_an_idle_cpu(encoder: Operations) -> None:
    known = reference_host()
    some = calibration({"graph": known.quiet}, known.id)
    assert seconds(encoder, some) == pytest.approx(seconds(encoder, None))
    empty = replace(some, sections={"host": {"reference": known.id}})
    assert seconds(encoder, empty) == pytest.approx(seconds(encoder, None))


def test_factors_against_another_reference_are_ignored(encoder: Operations) -> None:
    other = calibration(dict.fromkeys(PARTS, 3.0), "another")
    assert seconds(encoder, other) == pytest.approx(seconds(encoder, None))


def test_trainings_run_and_every_phase_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "TIMED", 2)
    plain = [one for one in expected.trainings() if one.loop == "pytorch"]
    assert plain
    for found in phases.phases_of(plain, device="cpu"):
        assert all(found[phase] > 0 for phase in phases.PHASES)
    assert set(phases.PHASES) == set(host.PART_OF)


def test_each_phase_takes_the_median_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([[5.0, 9.0], [7.0, 3.0], [6.0, 4.0]])

    def played(workload: object, device: str, probes: list[float]) -> phases.Round:
        forward, rest = next(rounds)
        probes.append(1e-4)
        found = {"forward": forward, "backward": rest, "optimizer": rest, "other": rest}
        return phases.Round(found, HostPace(PROBE, during_seconds=(1e-4,)))

    monkeypatch.setattr(phases, "_round", played)
    (found,) = phases.phases_of(expected.trainings()[:1])
    assert found == {"forward": 6.0, "backward": 4.0, "optimizer": 4.0, "other": 4.0}


@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ("aten::_to_copy(hf32[100])->f32[100]", 400),
        ("aten::copy_(f32[100,100],hf32[])->f32[100,100]", 40_000),
        ("aten::mul(f32[100],hf32[])->f32[100]", 0),
        ("aten::index(f32[3,640,640],hi64[21])->f32[21,640,640]", 168),
        ("aten::index(f32[3,640,640],i64[21])->f32[21,640,640]", 0),
    ],
)
def test_what_a_call_copies_to_the_gpu(text: str, copied: int) -> None:
    assert batch_bytes(from_text(text)) == copied


def test_copying_samples_grows_less_than_the_pace_and_padding_them_in_python_as_much() -> None:
    known = reference_host()
    quiet, slow = (cpu_costs(known.microseconds, None, pace, 1.0, known.copy_exponent) for pace in (1.0, 2.0))
    ratios = {loop: slow.batch_byte[loop] / quiet.batch_byte[loop] for loop in ("inference", "trl")}
    assert ratios == pytest.approx({"inference": 2**0.46, "trl": 2.0})
    batch = from_text(IMAGES.format(20)).outputs[0]
    assert stacking_seconds(batch, slow) / stacking_seconds(batch, quiet) == pytest.approx(2**0.46)


IMAGES = "aten::_to_copy(hf32[{0},3,224,224])->f32[{0},3,224,224];dtype=float32;device=cuda"


@pytest.mark.parametrize(
    ("batch", "nanoseconds"),
    [
        ("hf32[244,30720]", 0.226),
        ("hf32[488,30720]", 0.637),
        ("hf32[152,49152]", 0.172),
        ("hf32[305,49152]", 0.405),
        ("hf32[49,3,224,224]", 0.106),
        ("hf32[149,3,224,224]", 0.191),
    ],
)
def test_stacking_takes_as_long_as_on_the_machine_of_an_h200_but_for_its_caches(batch: str, nanoseconds: float) -> None:
    """At a pace of about 2.2, and 1.63 times as long in trainings; below and beyond 32 MiB."""
    array = from_text(f"aten::clone({batch})->{batch}").outputs[0]
    known = reference_host()
    costs = cpu_costs(known.microseconds, None, 2.2, 1.0, known.copy_exponent)
    assert stacking_seconds(array, costs) / array.bytes * 1e9 == pytest.approx(1.63 * nanoseconds, rel=0.15)


def test_one_thread_stacks_samples_as_quickly_whatever_their_size() -> None:
    costs = by_one_thread(cpu_costs(reference_host().microseconds))
    small, large = (
        from_text(f"aten::clone(hf32[{shape}])->f32[{shape}]").outputs[0] for shape in ("64,8192", "8,65536")
    )
    assert stacking_seconds(small, costs) == stacking_seconds(large, costs) == pytest.approx(2**21 * 0.15e-9, rel=0.01)


@pytest.mark.parametrize(("phase", "stacked"), [("other", True), ("forward", False), ("backward", False)])
def test_only_batches_of_the_loop_are_stacked(phase: str, *, stacked: bool) -> None:
    call, costs = from_text(IMAGES.format(8)), cpu_costs(reference_host().microseconds)
    operation = Operation(0, 0, phase, "", 0, 1)
    assert (batch_seconds(operation, call, costs, "trainer") > 0) is stacked


def test_indices_of_tensors_cost_less_than_the_embedding_of_a_models_beginning() -> None:
    picked = kind_of(from_text("aten::index(f32[48,16],i64[5])->f32[5,16]"))
    embedded = kind_of(from_text("aten::embedding(f32[48,16],i64[5])->f32[5,16]"))
    costs = cpu_costs(reference_host().microseconds)
    assert costs.graph[picked] < 0.4 * costs.graph[embedded]


def test_large_batches_have_their_own_factor() -> None:
    small = {"forward": 1000.0, "other": 2000.0, "batch": 10.0}
    large = {"forward": 1000.0, "other": 1000.0, "batch": 20_000.0}
    found = host.factors([small | {"other": 4000.0}, {"forward": 9000.0, "other": 12_000.0}], [small, large])
    assert found == {"graph": 1.0, "loop": 2.0, "batch": 0.5}
    assert "batch" not in host.factors([small, {"other": 900.0}], [small, large])


def test_the_reference_is_predicted_in_a_separate_process() -> None:
    late = r"`expected` did not end within 0"
    with host.JsonProcess("expected", "h200") as slow, pytest.raises(RuntimeError, match=late):
        slow.get(0.01)
    assert slow._process.poll() is not None
    unknown = r"failed: .*no-such-gpu"
    with host.JsonProcess("expected", "no-such-gpu") as wrong, pytest.raises(RuntimeError, match=unknown):
        wrong.get(60)


def test_the_reference_is_predicted_for_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []
    monkeypatch.setattr(host, "JsonProcess", lambda module, known: requested.append(known))
    host.expected_for("NVIDIA H200")
    host.expected_for("an unknown GPU")
    assert requested == ["h200", gpus()[0].id]


def test_fsdp_and_sharded_tensors_cost_python_of_their_own() -> None:
    array = Array((1024,), (1,), "float32", 4, 0)
    gather = Call("nccl::all_gather", (array,), (array,), numbers=(("bytes", "4096"), ("ranks", "2"), ("nodes", "1")))
    base = {"calls": [gather], "module_calls": {}}
    waited = Operations(**base, operations=[Operation(0, 0, "forward", "", 0, 1)])
    beside = Operations(**base, operations=[Operation(0, 0, "forward", "", 0, 1, (), -1)])
    counted = Operations(
        **base, operations=waited.operations, sharded_calls={"forward": 2}, resized_storages={"forward": 3}
    )
    costs = cpu_costs(reference_host().microseconds)
    of = [sum(launch_seconds(one, costs, "pytorch")) for one in (waited, beside, counted)]
    assert of[0] - of[1] == pytest.approx(costs.sharded_collective)
    assert of[2] - of[0] == pytest.approx(2 * costs.sharded_call + 3 * costs.resized_storage)


def test_hooks_of_saved_tensors_cost_python_by_who_has_them() -> None:
    array = Array((1024,), (1,), "float32", 4, 0)
    call, rows = Call("aten::add", (array, array), (array,)), ("forward", "backward")
    base = {"calls": [call], "operations": [Operation(0, 0, phase, "", 0, 1) for phase in rows]}
    costs = cpu_costs(reference_host().microseconds)
    counts = {"OffloadActivations.forward": 3, "OffloadActivations.backward": 2, "mine.forward": 5}
    plain, hooked = (
        sum(launch_seconds(Operations(**base, python_calls=found), costs, "trainer")) for found in ({}, counts)
    )
    forward, backward, other = (costs.python_call[name] for name in (*list(counts)[:2], "other"))
    assert hooked - plain == pytest.approx(3 * forward + 2 * backward + 5 * other)


def test_adding_up_gradients_costs_less_than_a_node_of_backward() -> None:
    array = Array((1024,), (1,), "float32", 4, 0)
    costs = replace(cpu_costs(reference_host().microseconds), forward_pass=0.0, backward_pass=0.0)

    def cost(name: str, phase: str) -> float:
        operations = [Operation(0, 0, phase, "", 0, 1), Operation(1, 0, "backward", "", 0, 1)]
        calls = [Call(name, (array, array), (array,)), Call("aten::mul", (array, array), (array,))]
        return next(launch_seconds(Operations(calls=calls, operations=operations), costs, "trainer"))

    assert cost("aten::add_", "backward") == cost("aten::add", "backward") == costs.backward["accumulation"]
    assert cost("aten::mul", "backward") == costs.backward["pointwise"] > costs.backward["accumulation"]
    assert cost("aten::add", "forward") == costs.graph["pointwise"]


def test_each_pass_of_a_micro_batch_costs_time_besides_its_operations() -> None:
    array = Array((1024,), (1,), "float32", 4, 0)
    one = [("forward", False), ("forward", True), ("backward", False)]
    operations = Operations(
        calls=[Call("aten::mul", (array, array), (array,))],
        operations=[Operation(0, 0, phase, "", 0, 4, generated=token) for phase, token in one],
    )
    free = replace(cpu_costs(reference_host().microseconds), forward_pass=0.0, backward_pass=0.0)
    dear = replace(free, forward_pass=1.0, backward_pass=10.0)
    before, after = (cpu_seconds_by_phase(operations, costs, "trainer") for costs in (free, dear))
    added = {phase: after[phase] - before[phase] for phase in ("forward", "backward")}
    assert added == pytest.approx({"forward": 4.0, "backward": 40.0})
    inference = Operations(calls=operations.calls, operations=operations.operations[:1])
    assert cpu_seconds_by_phase(inference, free, "inference") == cpu_seconds_by_phase(inference, dear, "inference")


def test_recomputation_costs_a_share_of_a_forward_pass() -> None:
    array = Array((1024,), (1,), "float32", 4, 0)
    phases = ("forward", "recompute", "backward")
    operations = Operations(
        calls=[Call("aten::mul", (array, array), (array,))],
        operations=[Operation(0, 0, phase, "", 0, 1) for phase in phases],
        module_calls={"forward": 3, "recompute": 3},
    )
    known = cpu_costs(reference_host().microseconds)
    costs = replace(known, forward_pass=0.0, checkpoint={"forward": 0.0, "backward": 0.0}, recomputed=0.5)
    launches = list(launch_seconds(operations, costs, "trainer"))
    assert launches[1] == pytest.approx(launches[0] / 2)


def test_large_tensors_of_the_cpu_take_longer_by_one_thread_and_where_they_are_new() -> None:
    costs = replace(cpu_costs(reference_host().microseconds), forward_pass=0.0)

    def launch(size: int, name: str = "aten::add", written: tuple[int, ...] = (), *, threads: bool = True) -> float:
        array = Array((size,), (1,), "uint8", 1, 0, on_host=True)
        calls = [Call(name, (array, array), (array,), written=written)]
        operations = Operations(calls=calls, operations=[Operation(0, 0, "forward", "", 0, 1)])
        return next(launch_seconds(operations, costs if threads else by_one_thread(costs), "trainer"))

    large, huge, small = 2**24, 2**26, launch(8)
    assert launch(large) - small == pytest.approx(3 * large * costs.host_byte)
    assert launch(huge) - small == pytest.approx(huge * (3 * costs.host_byte + costs.new_host_byte))
    assert launch(huge, "aten::add_", (0,)) - small == pytest.approx(4 * huge * costs.host_byte), "its memory was there"
    assert launch(huge, threads=False) - small == pytest.approx(3 * huge * costs.one_thread_byte)


def test_the_share_of_autograds_thread_is_that_of_the_backward_pass(encoder: Operations) -> None:
    costs = cpu_costs(reference_host().microseconds)
    found = cpu_seconds_by_phase(encoder, costs, "trainer")
    assert backward_share(encoder, costs, "trainer") == pytest.approx(found["backward"] / sum(found.values()))
    assert 0.3 < backward_share(encoder, costs, "trainer") < 0.7


def test_a_loop_walks_over_the_modules_and_parameters_of_the_model_that_is_trained() -> None:
    costs = cpu_costs(reference_host().microseconds)
    called, known = Operations(module_calls={"forward": 40}), Operations(module_calls={"forward": 40}, modules=10)
    assert loop_seconds(called, costs, "trl")["micro_step"] - loop_seconds(known, costs, "trl")["micro_step"] == (
        pytest.approx(30 * costs.module_micro_step["trl"])
    )
    tensors = Operations(modules=10, parameters=7)
    steps = [loop_seconds(one, costs, "trainer")["step"] for one in (known, tensors)]
    assert steps[1] - steps[0] == pytest.approx(7 * costs.parameter_step["trainer"])


def test_the_engine_of_deepspeed_costs_python_of_its_own() -> None:
    array = Array((1024,), (1,), "float32", 4, 0)
    base = {
        "calls": [Call("aten::add", (array, array), (array,))],
        "module_calls": {},
        "operations": [Operation(0, 0, "forward", "", 0, 1), Operation(0, 0, "backward", "", 0, 1)],
    }
    plain = Operations(**base)
    counted = Operations(**base, engine_modules={"forward": 3, "backward": 2}, engine_gradients={"backward": 4})
    costs = cpu_costs(reference_host().microseconds)
    of = [sum(launch_seconds(one, costs, "trainer")) for one in (plain, counted)]
    assert of[1] - of[0] == pytest.approx(5 * costs.engine_module + 4 * costs.engine_gradient)
    assert costs.engine_module > 0 and costs.engine_gradient > 0
