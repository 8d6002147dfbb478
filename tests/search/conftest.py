"""Fixtures: an executor that answers by a formula, and the workload that it pretends to train."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pretender import TINY, Model, Pretender

import trainatomy
from trainatomy.results.prediction import Prediction
from trainatomy.workload.schema import Workload

MakePretender = Callable[..., Pretender]


@pytest.fixture(scope="session")
def some_prediction() -> Prediction:
    return trainatomy.predict(Workload.from_mapping(TINY))


@pytest.fixture
def pretender(some_prediction: Prediction) -> MakePretender:
    def make(**changes: float) -> Pretender:
        return Pretender(some_prediction, Model(**changes))

    return make


@pytest.fixture
def workload() -> Workload:
    return Workload.from_mapping(TINY)
