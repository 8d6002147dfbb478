"""How long a whole training takes, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from executed import predicted, simulated

from trainatomy.reporters import sentences
from trainatomy.reporters.json import cost_to_json, to_json
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.prediction import Prediction
from trainatomy.results.tasks import Checkpoint, Evaluation
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
        ({"max_steps": 210, "eval_strategy": "steps", "eval_steps": 50}, True, 210, 5, 261),
        ({"max_steps": 10, "do_eval": True}, True, 10, 1, 21),
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
    said = "the whole training, 3,600 steps, takes 1 h 00 min (90 % interval: 48 min 00 s to 1 h 30 min); not "
    assert said in render(prediction_page(found), 200)
    assert found.duration is not None
    assert "; at the given price it costs 2.90 (2.32 to 4.35)" in sentences.duration(found.duration, 2.9)
    assert cost_to_json(found, 2.9) == {
        "cost": {"per_hour": 2.9, "total": pytest.approx(2.9), "interval": [pytest.approx(2.32), pytest.approx(4.35)]}
    }
    assert cost_to_json(found, None) == cost_to_json(second, 2.9) == {}
    assert to_json(found)["duration"]["steps"] == 3600


@pytest.mark.parametrize(
    ("train", "gpus", "epochs", "steps"),
    [
        ({}, 1, 3.0, 39),  # transformers' default; 100 samples are 12 batches of 8 and one of 4
        ({"num_train_epochs": 1.5}, 1, 1.5, 20),
        ({"num_train_epochs": 1, "gradient_accumulation_steps": 4}, 1, 1.0, 4),
        ({"num_train_epochs": 1, "per_device_train_batch_size": 2}, 4, 1.0, 13),
        ({"max_steps": 5}, 1, None, 5),
    ],
)
def test_the_samples_of_the_data_set_say_how_many_steps_there_are(
    second: Prediction, train: dict[str, Any], gpus: int, epochs: float | None, steps: int
) -> None:
    described = {"train": train, "data": {"train_samples": 100}, "parallel": {"gpus": gpus}}
    found = replace(second, workload=described).duration
    assert found is not None and (found.samples, found.epochs, found.steps) == (100, epochs, steps)


@pytest.mark.parametrize(("epochs", "batch", "accumulation"), [(1.5, 3, 4), (3, 8, 1), (1, 7, 3)])
def test_steps_are_those_that_the_trainer_counts(
    second: Prediction, tmp_path: Path, epochs: float, batch: int, accumulation: int
) -> None:
    train = {"num_train_epochs": epochs, "per_device_train_batch_size": batch}
    train["gradient_accumulation_steps"] = accumulation
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **train)
    trainer = transformers.Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=[{"x": 0}] * 100)
    steps = trainer.set_initial_training_values(arguments, trainer.get_train_dataloader())[-1]
    found = replace(second, workload={"train": train, "data": {"train_samples": 100}}).duration
    assert found is not None and found.steps == steps


@pytest.mark.parametrize(
    ("train", "count"),
    [
        ({"save_strategy": "steps"}, 3),
        ({"save_strategy": "steps", "save_steps": 0.5}, 2),
        ({"save_strategy": "epoch"}, 13),
        ({"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 100}, 13),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, 13),
        ({}, 0),
    ],
)
def test_checkpoints_are_counted(second: Prediction, train: dict[str, Any], count: int) -> None:
    described = {"train": {"max_steps": 1300, **train}, "data": {"train_samples": 800}}
    saved = Checkpoint({}, None, 0, 0) if train else None
    found = replace(second, workload=described, checkpoint=saved).duration
    assert found is not None and found.checkpoints == count
    assert ("writing checkpoints" in found.left_out) == bool(train)


def test_evaluations_whose_samples_nobody_said_do_not_pass_for_whole_ones(second: Prediction) -> None:
    train = {"max_steps": 10, "eval_strategy": "steps", "eval_steps": 5}
    unsaid = with_train(second, EVALUATION, **train)
    said = replace(unsaid, workload={**unsaid.workload, "data": {"eval_samples": 1000}})
    assert "with 2 evaluations of a few batches (21.0 s; data.eval_samples says" in render(prediction_page(unsaid), 200)
    assert "with 2 evaluations of 1,000 samples (21.0 s)" in render(prediction_page(said), 200)


def test_a_first_step_with_convolutions_takes_longer() -> None:
    model: dict[str, Any] = {"class": "ResNetForImageClassification", "dtype": "float32"}
    model["config"] = {"depths": [1], "hidden_sizes": [8], "embedding_size": 8}
    train = {"max_steps": 7, "per_device_train_batch_size": 1}
    workload = Workload.from_mapping({"model": model, "gpu": "t4", "train": train})
    found = predicted(workload)
    assert found.time is not None and found.duration is not None
    assert found.duration.first_steps_seconds == found.time.first_step_extra_seconds > 0
    assert found.duration.seconds == pytest.approx(7 * found.time.step_seconds + found.time.first_step_extra_seconds)


def test_epochs_without_samples_are_noted() -> None:
    described = {"model": {**GPT2, "dtype": "float32"}, "data": {"sequence_length": 4}, "gpu": "t4"}
    epochs, steps = (
        Workload.from_mapping({**described, "train": {name: 3}}) for name in ("num_train_epochs", "max_steps")
    )
    assert any("num_train_epochs has no effect" in note for note in simulated(epochs).notes)
    known = epochs.replace("data.train_samples", 64)
    assert not any("no effect" in note for note in simulated(known).notes)
    assert not any("no effect" in note for note in simulated(steps).notes)
