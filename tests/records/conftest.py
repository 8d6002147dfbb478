"""Records for the tests: three trainings of BERT-large measured on an H200, each with its prediction.

They are files of the first version of the form, and every later trainatomy has to read them. What they say is that of
the rows of those names in lab/accuracy/records/h200-notebook.jsonl; samples per second follow from the time of a
step.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from trainatomy.records.store import Store
from trainatomy.results.memory import Instant, OutOfMemoryPoint
from trainatomy.results.record import Record

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def vanilla() -> Record:
    return Store(DATA).read("3da90a10")


@pytest.fixture(scope="session")
def checkpointed() -> Record:
    return Store(DATA).read("ae970a11")


@pytest.fixture(scope="session")
def fp16() -> Record:
    return Store(DATA).read("c6fa0a12")


@pytest.fixture(scope="session")
def failed(vanilla: Record) -> Record:
    """Return a record of the same training on a GPU that is too small for it."""
    point = OutOfMemoryPoint(Instant(0, "forward", "bert.encoder.layer.20", "aten::mm"), 2**27, 5 * 2**30, 6 * 2**30)
    measurement = replace(
        vanilla.measurement,
        name="too big",
        status="out of memory",
        gpu="NVIDIA GeForce RTX 2060",
        device_bytes=None,
        step_seconds=None,
        samples_per_second=None,
        message="CUDA out of memory. Tried to allocate 128.00 MiB.",
        out_of_memory=point,
    )
    return replace(vanilla, id="20261122-090000000-3da90a13", created="2026-11-22T09:00:00Z", measurement=measurement)


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Return an empty store on a local disk and one on another filesystem."""
    made = Store(tmp_path / "runs" if request.param == "disk" else f"memory://{uuid.uuid4().hex}/runs")
    yield made
    if request.param == "memory" and made.exists():
        made._folder.filesystem.rm(made._folder.root, recursive=True)
