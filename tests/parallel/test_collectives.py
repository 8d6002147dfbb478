"""The section ``collectives`` of a calibration."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from trainatomy.catalog.calibrations import CollectivePoint, parse
from trainatomy.errors import WorkloadError
from trainatomy.measurement.calibration import device

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def calibration(*points: dict[str, Any]) -> str:
    environment = {"gpu": "NVIDIA H200", "capability": [9, 0], "date": "2026-11-22"}
    section = {"points": points, "left_out": ["send: out of time"]}
    return json.dumps(
        {"schema": "trainatomy/calibration/1", "environment": environment, "sections": {"collectives": section}}
    )


POINT = {"kind": "all_reduce", "ranks": 2, "nodes": 1, "bytes": 1024, "seconds": 2.5e-05}


def test_collectives_are_read_as_rows() -> None:
    found = parse(calibration(POINT), "x.json")
    assert found.collectives == (CollectivePoint("all_reduce", 2, 1, 1024, 2.5e-05),)
    assert (dict(found.sections), found.left_out) == ({}, ("send: out of time",))


@pytest.mark.parametrize("wrong", [{"ranks": 1}, {"seconds": 0}, {"seconds": -1}, {"bytes": "many"}])
def test_rows_that_cannot_have_been_measured_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match=r"x\.json: not a file that"):
        parse(calibration(POINT | wrong), "x.json")


def test_the_slowest_rank_counts() -> None:
    rows = [[{**POINT, "seconds": seconds}] for seconds in (1e-5, 3e-5)]
    assert device.slowest(rows) == [{**POINT, "seconds": 3e-5}]


def test_every_kind_is_measured_at_every_size(
    monkeypatch: pytest.MonkeyPatch, same_processes: Callable[[ModuleType], None]
) -> None:
    same_processes(device)
    monkeypatch.setattr(device, "TASK", "rank_tasks:collectives_on_cpu")
    lines: list[str] = []
    found = device.collectives_section(2, time_limit=60.0, report=lines.append)
    assert [(row["kind"], row["bytes"]) for row in found["points"]] == [
        (kind, size) for kind in KINDS for size in (1024, 4096)
    ]
    assert {(row["ranks"], row["nodes"], row["seconds"]) for row in found["points"]} == {(2, 1, 0.5 / 20)}
    assert any("all_to_all" in line for line in lines)
