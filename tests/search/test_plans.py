"""The search over plans of parallelism and numbers of GPUs, by a formula instead of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from pretender import GIB, TINY, Model, Pretender

from trainatomy.catalog.gpus import find_gpu
from trainatomy.errors import WorkloadError
from trainatomy.requests.fitting import FitRequest
from trainatomy.results.fit import Fit, Remedy
from trainatomy.results.prediction import Plan, Prediction
from trainatomy.search.across import search_across
from trainatomy.search.explore import Observer
from trainatomy.search.fitting import search
from trainatomy.search.plans import plan_axis, plan_of
from trainatomy.search.remedies import shortage_of
from trainatomy.search.run import run
from trainatomy.workload.schema import Workload
from trainatomy.workload.sweep import effective_batch_size_of

KEPT = ("optimizer_implementation", "torch_empty_cache_steps", "attention")


@dataclass
class Parallel(Model):
    """A training whose states are sharded by FSDP2, and whose gradients take time to reduce."""

    states: float = 4.0
    per_gpu: float = 0.001
    gather: float = 0.002

    def step(self, workload: Workload) -> tuple[float, float, float, float]:
        static, memory, cache, seconds = super().step(workload)
        plan = Plan.of(workload.to_mapping())
        ranks = plan.data_parallel_size
        sharded = plan.strategy == "fsdp2"
        states = self.states / (ranks // plan.replicas) if sharded else self.states
        communication = (self.per_gpu * ranks if ranks > 1 else 0.0) + self.gather * sharded
        return static + states, memory, cache, seconds + communication


def training(loop: str = "pytorch", train: dict[str, Any] | None = None, **parallel: Any) -> Workload:
    return Workload.from_mapping({**TINY, "loop": loop, "train": train or {}, "parallel": parallel})


@pytest.fixture
def found(some_prediction: Prediction) -> Callable[..., Fit]:
    def make(workload: Workload, memory: float = 24, model: Model | None = None, **options: Any) -> Fit:
        limited = workload.replace("gpu", {"base": "rtx-3090", "memory_bytes": round(memory * GIB)})
        chosen = FitRequest(**{"effective_batch_size": 64, "keep": KEPT, **options})
        return run(limited, "throughput", chosen, Pretender(some_prediction, model or Parallel()))

    return make


@pytest.mark.parametrize(
    ("workload", "given", "names"),
    [
        (training(gpus=4), "ddp", {"ddp", "ddp_bucket_view", "zero1", "zero1_bucket_view", "fsdp2", "fsdp2_keep"}),
        (
            training(gpus=4, nodes=2, strategy="fsdp2", mp_policy={"param_dtype": "bfloat16"}),
            "fsdp2",
            {"fsdp2", "fsdp2_keep", "hsdp_2", "hsdp_2_keep"},
        ),
        (training(gpus=4, strategy="fsdp2", tp_size=2), "fsdp2", {"fsdp2", "fsdp2_keep"}),
        (
            training(gpus=4, strategy="fsdp2", reshard_after_forward=2, tp_size=2),
            "fsdp2_reshard_2",
            {"fsdp2", "fsdp2_keep", "fsdp2_reshard_2"},
        ),
        (training("trainer", gpus=4), "ddp", {"ddp", "fsdp2", "fsdp2_keep"}),
        (
            training("trainer", {"fsdp": True, "fsdp_config": {"version": 1}}, gpus=4),
            "fsdp1",
            {"ddp", "fsdp1", "fsdp2", "fsdp2_keep"},
        ),
        (training("trainer", gpus=4, nodes=2), "ddp", {"ddp", "fsdp2", "fsdp2_keep", "hsdp_2", "hsdp_2_keep"}),
        (training(), "given", {"given"}),
        (training(gpus=4, tp_size=4), "given", {"given"}),
    ],
)
def test_the_plans_of_a_training(workload: Workload, given: str, names: set[str]) -> None:
    axis = plan_axis(workload)
    assert axis.given == given and {option.name for option in axis.options} == names and not axis.permission


@pytest.mark.parametrize(
    "workload",
    [
        training(gpus=4, nodes=2, strategy="fsdp2", reshard_after_forward=True, dp_replicate_size=4),
        training(gpus=4, nodes=2, bucket_cap_mb=50, static_graph=True),
        training(gpus=4, nodes=2, strategy="fsdp1"),
        training("trainer", {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, gpus=4, nodes=2),
    ],
)
def test_every_plan_is_valid_and_known_by_its_name(workload: Workload) -> None:
    for option in plan_axis(workload).options:
        assert plan_of(workload.replace(option.settings)) == option.name


def test_the_effective_batch_size_is_divided_among_the_ranks(found: Callable[..., Fit]) -> None:
    fit = found(training(gpus=4), exhaustive=True, prices=False, keep=(*KEPT, "allocator"))
    each = (*fit.candidates, *fit.too_large)
    assert fit.counts.executed == fit.counts.space > 200
    assert {effective_batch_size_of(Workload.from_mapping(one.workload)) for one in each} == {64}


def test_ranks_that_do_not_divide_it_are_named(found: Callable[..., Fit]) -> None:
    with pytest.raises(WorkloadError, match="batch size of 62 cannot be divided among 4 data-parallel ranks"):
        found(training(gpus=4), effective_batch_size=62)


def test_by_default_a_step_has_the_samples_of_all_ranks(found: Callable[..., Fit]) -> None:
    workload = training(train={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, gpus=4)
    assert found(workload, effective_batch_size=None, prices=False).effective_batch_size == 32


def test_the_plan_is_chosen_without_a_permission(found: Callable[..., Fit]) -> None:
    plenty, scarce = (found(training(gpus=4), memory) for memory in (40, 6))
    assert plenty.best is not None and plenty.best.plan.strategy == "ddp"
    assert scarce.best is not None and scarce.best.plan.strategy == "fsdp2"
    (change,) = (each for each in scarce.best.changes if each.axis == "plan")
    assert change.option.startswith("fsdp2") and not change.permission


@pytest.mark.parametrize(("per_gpu", "gpus"), [(0.001, 8), (0.03, 4), (0.1, 2), (2.0, 1)])
def test_more_gpus_are_left_where_they_do_not_pay(found: Callable[..., Fit], per_gpu: float, gpus: int) -> None:
    fit = found(training(gpus=8), 60, Parallel(per_gpu=per_gpu, recompute=0.5))
    assert [each.plan.world_size for each in fit.by_gpus] == [1, 2, 4, 8]
    assert fit.best is not None and fit.best.plan.world_size == gpus
    assert fit.best.samples_per_second >= max(each.samples_per_second for each in fit.by_gpus) * 0.99
    assert (f"fewer_gpus: {gpus}" in fit.notes) == (gpus < 8)
    assert [each.option for each in fit.best.changes if each.axis == "gpus"] == ([str(gpus)] if gpus < 8 else [])
    assert fit.prices and fit.given is not None and fit.given.plan.world_size == 8


def test_the_answer_is_among_the_best_of_each_number_of_gpus(found: Callable[..., Fit]) -> None:
    """What the search executes for its prices turns out to be the best one: attention as given."""
    fit = found(training(gpus=4), 8, Parallel(eager=-0.05), keep=())
    assert fit.best is not None and fit.best.workload in [each.workload for each in fit.by_gpus]


def test_each_number_of_gpus_has_the_best_of_a_search_of_its_own(
    found: Callable[..., Fit], some_prediction: Prediction
) -> None:
    fit = found(training(gpus=4), 14, prices=False)
    for each in fit.by_gpus:
        alone = training(gpus=each.plan.gpus).replace("gpu", {"base": "rtx-3090", "memory_bytes": 14 * GIB})
        options = FitRequest(64, prices=False, keep=KEPT, exhaustive=True)
        whole, _ = search(alone, options, Pretender(some_prediction, Parallel()), Observer())
        assert whole.best is not None and each.step_seconds <= whole.best.step_seconds * 1.011


def test_the_number_of_gpus_can_be_kept(found: Callable[..., Fit]) -> None:
    fit = found(training(gpus=8), 60, Parallel(per_gpu=2.0), keep=(*KEPT, "gpus"))
    assert fit.best is not None and fit.best.plan.world_size == 8 and not fit.by_gpus
    kept = found(training(gpus=4), 6, keep=(*KEPT, "plan"))
    assert kept.best is None or kept.best.plan.strategy != "fsdp2"


def test_machines_are_left_before_gpus(found: Callable[..., Fit]) -> None:
    fit = found(training(gpus=2, nodes=3, strategy="fsdp2", dp_replicate_size=3), effective_batch_size=48)
    assert [(each.plan.nodes, each.plan.gpus) for each in fit.by_gpus] == [(1, 1), (1, 2), (3, 2)]


def test_tensor_parallel_groups_stay_whole(found: Callable[..., Fit]) -> None:
    fit = found(training(gpus=8, strategy="fsdp2", tp_size=4))
    assert [each.plan.gpus for each in fit.by_gpus] == [4, 8]


def test_a_policy_of_fsdp_is_not_given_up(found: Callable[..., Fit]) -> None:
    fit = found(training(gpus=4, strategy="fsdp2", mp_policy={"reduce_dtype": "bfloat16"}))
    assert {each.plan.strategy for each in (*fit.candidates, *fit.too_large)} == {"fsdp2"}
    assert [each.plan.gpus for each in fit.by_gpus] == [2, 4]


def test_the_largest_batch_on_several_gpus(some_prediction: Prediction) -> None:
    limited = training(gpus=4).replace("gpu", {"base": "rtx-3090", "memory_bytes": 24 * GIB})
    options = FitRequest(64, keep=KEPT)
    fit = run(limited, "batch", options, Pretender(some_prediction, Parallel()))
    assert fit.best is not None and fit.best.per_device_train_batch_size == 16
    assert fit.best.gradient_accumulation_steps == 1 and fit.effective_batch_size == 64
    longest = run(limited, "sequence-length", options, Pretender(some_prediction, Parallel()))
    assert longest.best is not None and longest.best.gradient_accumulation_steps == 16


def test_gpus_are_compared_at_the_given_number(some_prediction: Prediction) -> None:
    gpus = [find_gpu(name) for name in ("rtx-3090", "a100-80gb")]
    options = FitRequest(64, keep=KEPT)
    found = search_across(training(gpus=4), gpus, options, Pretender(some_prediction, Parallel()), Observer())
    assert len(found.options) == 2
    assert {each.fit.best.plan.world_size for each in found.options if each.fit.best} == {4}


def test_gpus_that_share_executions_are_searched_one_after_the_other(some_prediction: Prediction) -> None:
    names = ("rtx-3090", "l4", "a100-80gb", "rtx-3060", "rtx-4090", "a100-40gb", "t4")
    executor = Pretender(some_prediction, Parallel())
    options = FitRequest(64, keep=KEPT)
    found = search_across(training(gpus=2), [find_gpu(name) for name in names], options, executor, Observer())
    asked = list(dict.fromkeys(workload.resolve_gpu().id for workload in executor.asked))
    assert asked == ["a100-80gb", "a100-40gb", "t4", "rtx-3060", "rtx-3090", "l4", "rtx-4090"]
    memory = [each.gpu.memory_bytes for each in found.options]
    assert sorted(memory) == sorted(find_gpu(name).memory_bytes for name in names)


def test_batch_norm_is_noted(some_prediction: Prediction) -> None:
    noted = replace(some_prediction, notes=("BatchNorm takes its statistics from each GPU",))
    limited = training(gpus=2).replace("gpu", "rtx-3090")
    fits = [
        run(limited, "throughput", FitRequest(64, keep=KEPT, prices=False), Pretender(each, Parallel()))
        for each in (some_prediction, noted)
    ]
    assert ["batch_norm" in fit.notes for fit in fits] == [False, True]


def test_an_interrupted_search_keeps_what_it_has(some_prediction: Prediction) -> None:
    executor = Pretender(some_prediction, Parallel(), interrupt_after=30)
    limited = training(gpus=8).replace("gpu", {"base": "rtx-3090", "memory_bytes": 24 * GIB})
    fit = run(limited, "throughput", FitRequest(64, keep=KEPT), executor)
    assert fit.interrupted and fit.best is not None and len(executor.asked) == 30


def remedies(some_prediction: Prediction, workload: Workload, memory: float, **options: Any) -> list[Remedy]:
    limited = workload.replace("gpu", {"base": "rtx-3090", "memory_bytes": round(memory * GIB)})
    shortage = shortage_of(limited, FitRequest(keep=KEPT, **options), Pretender(some_prediction, Parallel()))
    return [each for each in shortage.remedies if each.kind == "more GPUs"]


@pytest.mark.parametrize("loop", ["pytorch", "trainer"])
def test_more_gpus_are_a_remedy(some_prediction: Prediction, loop: str) -> None:
    workload = training(loop, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2})
    found = remedies(some_prediction, workload, 7)
    assert [each.candidate.plan.gpus for each in found] == [2, 4, 8]
    assert {each.candidate.plan.strategy for each in found} == {"fsdp2"}
    trained = [Workload.from_mapping(each.candidate.workload) for each in found]
    assert {effective_batch_size_of(each) for each in trained} == {8}
    assert [each.train.per_device_train_batch_size for each in trained] == [4, 2, 1]
    assert all(each.candidate.fits and each.device_bytes < 0 and (each.step_seconds or 0) < 0 for each in found)
    assert [each.device_bytes for each in found] == sorted((each.device_bytes for each in found), reverse=True)


def test_more_gpus_than_samples_are_none(some_prediction: Prediction) -> None:
    found = remedies(some_prediction, training(train={"per_device_train_batch_size": 4}), 6)
    assert [each.candidate.plan.gpus for each in found] == [2, 4]


def test_more_gpus_are_more_than_there_are(some_prediction: Prediction) -> None:
    train = {"per_device_train_batch_size": 8}
    found = remedies(some_prediction, training(train=train, gpus=4), 6)
    assert [each.candidate.plan.gpus for each in found] == [8]
    sharded = training(train=train, gpus=2, strategy="fsdp2", tp_size=2)
    assert remedies(some_prediction, sharded, 6) == []


def test_a_caller_who_cannot_spread_a_training_is_not_told_to(some_prediction: Prediction) -> None:
    workload = training(train={"per_device_train_batch_size": 8})

    def stays(settings: Mapping[str, object]) -> bool:
        return not any(key.startswith("parallel.") for key in settings)

    assert remedies(some_prediction, workload, 6, can_apply=stays) == []
