"""Names of groups, the machine, and rows assembled from predictions and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from trainatomy.errors import DeviceError, SimulationError
from trainatomy.results.memory import Instant, OutOfMemoryPoint
from trainatomy.runs.comparison import gather
from trainatomy.runs.plan import Finished, Plan, group_name
from trainatomy.runs.single import Machine

PlanOf = Callable[..., Plan]


def test_a_group_is_named_after_what_is_compared(plan_of: PlanOf) -> None:
    workloads = plan_of().workloads
    name = group_name("my runs/x", workloads)
    assert name == group_name("my runs/x", plan_of().workloads)
    assert name.startswith("my-runs-x-") and len(name) == len("my-runs-x-") + 8
    assert name != group_name("my runs/x", workloads[::-1])
    assert name != group_name("my runs/x", workloads[:2])
    assert group_name("…", workloads).startswith("comparison-")


def test_a_fresh_group_is_one_of_its_own(plan_of: PlanOf) -> None:
    when = datetime(2026, 11, 21, 12, 20, 5, tzinfo=UTC)
    assert group_name("x", plan_of().workloads, fresh=when).endswith("-20261121T122005")


@pytest.mark.parametrize(
    ("gpus", "gpu"),
    [
        (("NVIDIA H200",), "h200"),
        (("NVIDIA H200",) * 8, "h200"),
        (("NVIDIA H200", "Tesla T4"), None),
        (("Imaginary 9000",), None),
        ((), None),
    ],
)
def test_the_gpu_of_this_machine(gpus: tuple[str, ...], gpu: str | None) -> None:
    found = Machine(gpus, "580").resolve_gpu()
    assert (found.id if found else None) == gpu


def test_rows_are_gathered(plan_of: PlanOf, gpu: Any) -> None:
    workloads = plan_of().workloads
    point = OutOfMemoryPoint(Instant(0, "forward", "h.0", "aten::mm"), 1, 2, 3)
    ran_out = replace(gpu(workloads[1]), status="out of memory", out_of_memory=point)
    finished = [
        Finished(0, 0, gpu(workloads[0])),
        Finished(1, 0, ran_out),
        Finished(2, 0, error=DeviceError("died")),
        Finished(0, 1, replace(gpu(workloads[0]), step_seconds=0.3, device_bytes=6 * 2**30)),
    ]
    first, second, third = gather(workloads, [SimulationError("cannot")] * 3, finished, repeats=2).rows
    assert [row.status for row in (first, second, third)] == ["completed", "out of memory", "failed"]
    assert first.prediction is None and first.prediction_error == "cannot"
    assert second.out_of_memory == point and second.spread("device_bytes") is None
    assert third.errors == ("died",)
    spread = first.spread("step_seconds")
    assert spread is not None
    assert (spread.median, spread.least, spread.most, spread.count) == (pytest.approx(0.2), 0.1, 0.3, 2)
    device = first.spread("device_bytes")
    assert device is not None and device.median == 11 * 2**29 and isinstance(device.median, int)
    assert first.typical is first.measurements[0]
    assert first.gap("device_bytes") is None


def test_a_figure_that_one_repeat_lacks_has_no_spread(plan_of: PlanOf, gpu: Any) -> None:
    (workload, *_) = plan_of().workloads
    finished = [Finished(0, 0, gpu(workload)), Finished(0, 1, replace(gpu(workload), device_bytes=None))]
    (row,) = gather([workload], [SimulationError("")], finished).rows
    assert row.spread("device_bytes") is None
    assert row.spread("peak_reserved_bytes") is not None
