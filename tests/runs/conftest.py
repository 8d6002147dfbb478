"""A scripted GPU and a plan of three trainings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import pytest

from trainatomy.records.store import Store
from trainatomy.results.measurement import Measurement
from trainatomy.runs.plan import Plan
from trainatomy.runs.single import Machine
from trainatomy.workload.schema import Workload

GPU, DRIVER = "NVIDIA H200", "580.159.04"
GIB = 2**30


def measurement_of(workload: Workload, **changes: object) -> Measurement:
    """Return a plausible measurement of a completed run of ``workload``."""
    measurement = Measurement(
        name=workload.name or "",
        workload=workload.to_mapping(),
        status="completed",
        gpu=GPU,
        driver=DRIVER,
        versions={"torch": metadata.version("torch")},
        date="2026-11-21",
        peak_allocated_bytes=3 * GIB,
        peak_reserved_bytes=4 * GIB,
        device_bytes=5 * GIB,
        process_bytes=None,
        nvml_used_bytes=None,
        idle_bytes=None,
        context_bytes=None,
        model_bytes=1 * GIB,
        num_alloc_retries=0,
        step_seconds=0.1,
        steps=4,
        message="",
        tape_file=None,
        samples_per_second=40.0,
    )
    return replace(measurement, **changes)


@dataclass
class FakeGpu:
    """Lists the runs in ``started``; ``answers`` maps a name to a measurement or exception that is used once."""

    started: list[str] = field(default_factory=list)
    answers: dict[str, Measurement | BaseException] = field(default_factory=dict)

    def __call__(self, workload: Workload) -> Measurement:
        name = workload.name or ""
        self.started.append(name)
        answer = self.answers.pop(name, None)
        if isinstance(answer, BaseException):
            raise answer
        return answer or measurement_of(workload)


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def machine() -> Machine:
    return Machine((GPU,), DRIVER)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def plan_of() -> Callable[..., Plan]:
    def make(*names: str, repeats: int = 1) -> Plan:
        rows = [
            {"name": name, "model": {"class": "GPT2LMHeadModel"}, "train": {"per_device_train_batch_size": size}}
            for size, name in enumerate(names or ("a", "b", "c"), 1)
        ]
        return Plan(tuple(Workload.from_mapping(row) for row in rows), "a-group", repeats)

    return make
