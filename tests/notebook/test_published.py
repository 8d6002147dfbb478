"""The notebook's own table, on its V100, with the software of its day: each row within 3 % of what was published."""

from __future__ import annotations

import pytest

from trainatomy.api import predict
from trainatomy.facts.published import notebook as published
from trainatomy.workload import Workload, notebook

TOLERANCE = 0.03
PROMPT = {"vanilla", "fp16", "8-bit Adam"}
"""Rows without accumulation: one forward and backward a step."""

PAIRS = [
    pytest.param(row, run.memory_bytes, id=row.name, marks=() if row.name in PROMPT else pytest.mark.slow)
    for row, run in zip(notebook("2022"), published().rows, strict=True)
]


@pytest.mark.parametrize(("row", "memory_bytes"), PAIRS)
def test_within_three_percent(row: Workload, memory_bytes: int) -> None:
    if "bitsandbytes" in row.train.optim:
        pytest.importorskip("bitsandbytes")
    assert predict(row).memory.device_bytes == pytest.approx(memory_bytes, rel=TOLERANCE)


def test_rows_and_published_rows_are_the_same_trainings() -> None:
    for row, run in zip(notebook("2022"), published().rows, strict=True):
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "fp16"):
            assert getattr(row.train, name) == run.train.get(name, type(row.train).model_fields[name].default)
