"""How long a whole training takes, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from executed import simulated

from trainatomy.reporters import sentences
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.prediction import Prediction
from trainatomy.results.tasks import Evaluation
from trainatomy.workload.schema import Workload

EVALUATION = Evaluation(8, 2, 16, 0, 0, 0, 0, seconds=10.0, first_extra_seconds=1.0)
GPT2 = {"class": "GPT2LMHeadModel", "config": {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50}}


@pytest.fixture
def second(prediction: Prediction, timed: Any) -> Prediction:
    """Return a prediction whose step takes a second."""
    return timed(prediction, 1.0)  # type: ignore[no-any-return]


def with_train(prediction: Prediction, evaluation: Evaluation | None = None, **train: Any) -> Prediction:
    return replace(prediction, workload={**prediction.workload, "train": train}, evaluation=evaluation)


@pytest.mark.parametrize(
    ("train", "evaluates", "steps", "evaluations", "seconds"),
    [
        ({"max_steps": 200}, False, 200, 0, 200),
        ({"max_steps": 200, "num_train_epochs": 3.0}, False, 200, 0, 200),
        ({"max_steps": 200, "eval_strategy": "steps", "eval_steps": 50}, True, 200, 4, 241),
        ({"max_steps": 200, "eval_strategy": "steps", "eval_steps": 0.5}, True, 200, 2, 221),
        ({"max_steps": 1000, "eval_strategy": "steps"}, True, 1000, 2, 1021),
        ({"max_steps": 10, "eval_on_start": True}, True, 10, 1, 21),
        ({"max_steps": 200, "eval_strategy": "epoch"}, True, 200, None, 200),
    ],
)
def test_steps_and_evaluations_add_up(
    second: Prediction, train: dict[str, Any], evaluates: bool, steps: int, evaluations: int | None, seconds: float
) -> None:
    found = with_train(second, EVALUATION if evaluates else None, **train).duration
    assert found is not None and (found.steps, found.evaluations) == (steps, evaluations)
    assert found.seconds == pytest.approx(seconds)
    assert found.interval_seconds[0] < found.seconds < found.interval_seconds[1]


@pytest.mark.parametrize("train", [{}, {"num_train_epochs": 3.0}])
def test_without_steps_nothing_is_said(second: Prediction, train: dict[str, Any]) -> None:
    found = with_train(second, **train)
    assert found.duration is None and to_json(found)["duration"] is None
    assert with_train(replace(second, time=None), max_steps=3).duration is None


def test_the_page_says_it_with_its_price(second: Prediction) -> None:
    found = with_train(second, max_steps=3600)
    assert "3,600 steps take 1 h 00 min (90 % interval: " in render(prediction_page(found), 200)
    assert found.duration is not None
    assert "; at the given price it costs 2.90 (" in sentences.duration(found.duration, 2.9)
    assert to_json(found)["duration"]["steps"] == 3600


def test_epochs_without_samples_are_noted() -> None:
    described = {"model": {**GPT2, "dtype": "float32"}, "data": {"sequence_length": 4}, "gpu": "t4"}
    epochs, steps = (
        Workload.from_mapping({**described, "train": {name: 3}}) for name in ("num_train_epochs", "max_steps")
    )
    assert any("num_train_epochs has no effect" in note for note in simulated(epochs).notes)
    assert not any("no effect" in note for note in simulated(steps).notes)
