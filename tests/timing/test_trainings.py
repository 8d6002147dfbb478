"""The trainings for the accuracy of time: they are workloads, and each has a prediction of what is written."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from trainatomy.workload.schema import Workload

FOLDER = Path(__file__).parents[2] / "lab" / "timing"


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("trainings")


def test_every_training_is_predicted_as_it_is_written(trainings: Any) -> None:
    predicted = {
        line["name"]: line["workload"] for line in trainings.lines(FOLDER / "predictions/trainings-h200.jsonl")
    }
    rows = trainings.rows()
    assert len(rows) >= 60
    for row in rows:
        assert isinstance(row.workload(FOLDER), Workload)
        assert predicted[row.name] == dict(row.mapping), row.name
