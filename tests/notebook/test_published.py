"""The guide's table on its V100, with the software of January 2022.

Each row is within 3 % of the published memory, and its time within the interval of an uncalibrated GPU.
"""

from __future__ import annotations

import pytest

from trainatomy.api import predict
from trainatomy.catalog.published import PublishedRun
from trainatomy.catalog.published import notebook as published
from trainatomy.workload import Workload, notebook

TOLERANCE = 0.03
TIME_TOLERANCE = 0.2
"""Relative tolerance of a time that is predicted from a data sheet for an unknown CPU."""
PROMPT = {"vanilla", "fp16", "8-bit Adam"}
"""Rows without accumulation: one forward and backward a step."""

PAIRS = [
    pytest.param(row, run, id=row.name, marks=() if row.name in PROMPT else pytest.mark.slow)
    for row, run in zip(notebook("2022"), published().rows, strict=True)
]


@pytest.mark.parametrize(("row", "run"), PAIRS)
def test_memory_within_three_percent_and_time_within_its_interval(row: Workload, run: PublishedRun) -> None:
    if "bitsandbytes" in row.train.optim:
        pytest.importorskip("bitsandbytes")
    found = predict(row)
    assert found.memory.device_bytes == pytest.approx(run.memory_bytes, rel=TOLERANCE)
    assert found.time is not None
    steps = published().samples / found.time.samples_per_second / found.time.step_seconds
    least, most = (steps * seconds for seconds in found.time.interval_seconds)
    assert least < run.seconds < most
    assert steps * found.time.step_seconds == pytest.approx(run.seconds, rel=TIME_TOLERANCE)


def test_rows_and_published_rows_are_the_same_trainings() -> None:
    for row, run in zip(notebook("2022"), published().rows, strict=True):
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "fp16"):
            assert getattr(row.train, name) == run.train.get(name, type(row.train).model_fields[name].default)
