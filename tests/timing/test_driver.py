"""CPU time of cudaMalloc and cudaFree within a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainatomy.catalog.calibrations import shipped
from trainatomy.catalog.gpus import find_gpu
from trainatomy.results.operations import Operation, Operations
from trainatomy.results.trace import DriverCall
from trainatomy.timing.host_costs import DriverCosts, driver_costs, driver_work

MIB = 2**20
COSTS = DriverCosts(allocate=((2 * MIB, 10e-6), (20 * MIB, 28e-6)), free=((2 * MIB, 5e-6), (10 * MIB, 45e-6)))


def step(*events: int) -> Operations:
    return Operations([], [Operation(event, 0, "forward", "", 0, 1) for event in events])


@pytest.mark.parametrize(
    ("size", "microseconds"), [(MIB, 10), (2 * MIB, 10), (11 * MIB, 19), (20 * MIB, 28), (30 * MIB, 38)]
)
def test_costs_are_interpolated_linearly(size: int, microseconds: float) -> None:
    assert COSTS.seconds("malloc", size) == COSTS.seconds("map", size) == pytest.approx(microseconds * 1e-6)


def test_freeing_has_its_own_cost_and_a_refusal_is_cheap() -> None:
    assert COSTS.seconds("free", 4 * MIB) == COSTS.seconds("unmap", 4 * MIB) == pytest.approx(15e-6)
    assert COSTS.seconds("refused", 4096 * MIB) == 10e-6


def test_work_belongs_to_the_operation_that_causes_it() -> None:
    operations = step(100, 100, 103, 110)  # the first one makes no event
    calls = [DriverCall(99, "free", 2 * MIB), DriverCall(101, "free", 2 * MIB), DriverCall(110, "malloc", 20 * MIB)]
    assert driver_work(operations, calls, COSTS) == {1: (5e-6, True), 3: (pytest.approx(28e-6), False)}


def test_a_step_that_frees_nothing_has_no_driver_work() -> None:
    assert driver_work(step(4), [DriverCall(2, "free", 2 * MIB), DriverCall(5, "malloc", 2 * MIB)], COSTS) == {}


def test_freeing_the_cache_waits_for_the_gpu() -> None:
    calls = [DriverCall(5, "refused", 20 * MIB), DriverCall(5, "free", 2 * MIB), DriverCall(5, "free", 10 * MIB)]
    calls.append(DriverCall(5, "malloc", 20 * MIB))
    work = driver_work(step(4), calls, COSTS)[0]
    assert work.waits
    assert work.seconds == pytest.approx((10 + 5 + 45 + 28) * 1e-6)


def test_the_shipped_calibration_applies_to_its_gpu_and_others() -> None:
    measured = shipped()["h200"].sections["device"]["memory"]
    own, other = driver_costs(find_gpu("h200")), driver_costs(find_gpu("a100-80gb"))
    assert own == other
    for row in measured:
        assert own.seconds("malloc", row["bytes"]) == pytest.approx(row["malloc_us"] * 1e-6)
        assert own.seconds("free", row["bytes"]) == pytest.approx(row["free_us"] * 1e-6)


def test_a_users_calibration_takes_precedence_if_it_measured_memory() -> None:
    rows = [{"bytes": 2 * MIB, "malloc_us": 100.0, "free_us": 200.0, "cached_us": 3.0}]
    mine = replace(shipped()["h200"], sections={"device": {"memory": rows}})
    assert driver_costs(find_gpu("h200"), mine).seconds("malloc", 2**30) == pytest.approx(100e-6)
    without = replace(mine, sections={"device": {}})
    assert driver_costs(find_gpu("h200"), without) == driver_costs(find_gpu("h200"))
