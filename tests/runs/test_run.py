"""Runs in sequence: in order, recorded as they end, not repeated, and not stopped by a failure."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trainatomy.errors import DeviceError, TrainatomyError
from trainatomy.records.store import Store
from trainatomy.results.record import Record
from trainatomy.runs.plan import Finished, Plan, run
from trainatomy.runs.single import Machine

PlanOf = Callable[..., Plan]


def everything(plan: Plan, store: Any, machine: Machine, gpu: Any) -> list[Finished]:
    return list(run(plan, [None] * len(plan.workloads), store, machine, gpu, command="trainatomy compare …"))


def test_every_row_once_then_every_row_again(plan_of: PlanOf, store: Store, machine: Machine, gpu: Any) -> None:
    done = everything(plan_of("a", "b", repeats=2), store, machine, gpu)
    assert gpu.started == ["a", "b", "a", "b"]
    assert [(each.row, each.repeat) for each in done] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_each_run_is_on_record_before_it_is_handed_out(
    plan_of: PlanOf, store: Store, machine: Machine, gpu: Any
) -> None:
    runs = run(plan_of(), [None] * 3, store, machine, gpu, command="how")
    next(runs)
    (only,) = store.list()
    assert (only.group, only.name) == ("a-group", "a")
    assert store.read(only.id).command == "how"


@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_comparison_resumes(
    plan_of: PlanOf, store: Store, machine: Machine, gpu: Any, stopped_by: BaseException
) -> None:
    gpu.answers["b"] = stopped_by
    with pytest.raises(type(stopped_by)):
        everything(plan_of(), store, machine, gpu)
    assert [each.name for each in store.list()] == ["a"]
    gpu.started.clear()
    done = everything(plan_of(), store, machine, gpu)
    assert gpu.started == ["b", "c"]
    assert [each.from_record for each in done] == [True, False, False]
    assert done[0].measurement is not None and done[0].measurement.name == "a"


def test_more_repeats_continue_from_existing_runs(plan_of: PlanOf, store: Store, machine: Machine, gpu: Any) -> None:
    everything(plan_of("a"), store, machine, gpu)
    done = everything(plan_of("a", repeats=3), store, machine, gpu)
    assert gpu.started == ["a"] * 3
    assert [each.from_record for each in done] == [True, False, False]


@pytest.mark.parametrize(
    "other",
    [Machine(("NVIDIA H100 80GB HBM3",), "580.159.04"), Machine(("NVIDIA H200",), "590.1")],
    ids=["other GPU", "other driver"],
)
def test_a_record_of_another_machine_is_not_reused(
    plan_of: PlanOf, store: Store, machine: Machine, gpu: Any, other: Machine
) -> None:
    everything(plan_of("a"), store, machine, gpu)
    everything(plan_of("a"), store, other, gpu)
    assert gpu.started == ["a", "a"]


def test_a_record_of_other_software_is_not_reused(plan_of: PlanOf, store: Store, machine: Machine, gpu: Any) -> None:
    plan = plan_of("a")
    gpu.answers["a"] = replace(gpu(plan.workloads[0]), versions={"torch": "2.9.1"})
    everything(plan, store, machine, gpu)
    gpu.started.clear()
    everything(plan, store, machine, gpu)
    assert gpu.started == ["a"]


def test_another_group_is_a_separate_comparison(plan_of: PlanOf, store: Store, machine: Machine, gpu: Any) -> None:
    everything(plan_of("a"), store, machine, gpu)
    everything(replace(plan_of("a"), group="another"), store, machine, gpu)
    assert gpu.started == ["a", "a"]


def test_out_of_memory_is_a_saved_result(plan_of: PlanOf, store: Store, machine: Machine, gpu: Any) -> None:
    plan = plan_of()
    gpu.answers["b"] = replace(gpu(plan.workloads[1]), status="out of memory", message="CUDA out of memory.")
    everything(plan, store, machine, gpu)
    gpu.started.clear()
    done = everything(plan, store, machine, gpu)
    assert gpu.started == []
    assert done[1].measurement is not None and done[1].measurement.status == "out of memory"


def test_a_failure_stops_nothing_and_is_tried_again(plan_of: PlanOf, store: Store, machine: Machine, gpu: Any) -> None:
    gpu.answers["a"] = DeviceError("the worker died")
    done = everything(plan_of(), store, machine, gpu)
    assert gpu.started == ["a", "b", "c"]
    assert [str(each.error) for each in done] == ["the worker died", "None", "None"]
    gpu.started.clear()
    assert everything(plan_of(), store, machine, gpu)[0].measurement is not None
    assert gpu.started == ["a"]


def test_a_bug_is_not_reported_as_a_failed_run(plan_of: PlanOf, store: Store, machine: Machine, gpu: Any) -> None:
    gpu.answers["b"] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        everything(plan_of(), store, machine, gpu)
    assert [each.name for each in store.list()] == ["a"]


def test_a_full_disk_costs_the_record_and_not_the_measurement(plan_of: PlanOf, machine: Machine, gpu: Any) -> None:
    class Full:
        def find(self, key: str, group: str = "", repeat: int = 0) -> Record | None:
            return None

        def write(self, record: Record) -> str:
            raise TrainatomyError(f"no space ({errno.ENOSPC})")

    done = everything(plan_of(), Full(), machine, gpu)
    assert all(each.measurement is not None and "no space" in str(each.unsaved) for each in done)


def test_runs_are_announced(plan_of: PlanOf, store: Store, machine: Machine, gpu: Any) -> None:
    everything(plan_of("a"), store, machine, gpu)
    begun: list[tuple[int, int]] = []
    rest = run(plan_of(), [None] * 3, store, machine, gpu, starting=lambda row, repeat: begun.append((row, repeat)))
    assert len(list(rest)) == 3
    assert begun == [(1, 0), (2, 0)]
