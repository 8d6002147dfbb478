"""Names and defaults match the installed transformers and peft."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trainatomy.workload import LoraSpec, TrainSpec
from trainatomy.workload.arguments import arguments


def defaults(options: Any) -> dict[str, Any]:
    """Return the names and defaults of a dataclass of options."""
    return {
        field.name: field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        for field in dataclasses.fields(options)
    }


@pytest.fixture(scope="module")
def training_arguments() -> dict[str, Any]:
    return defaults(pytest.importorskip("transformers.training_args").TrainingArguments)


def test_keys_of_train_have_the_defaults_of_training_arguments(training_arguments: dict[str, Any]) -> None:
    ours = {name: field.default for name, field in TrainSpec.model_fields.items()}
    ours["per_device_eval_batch_size"] = ours[
        "per_device_train_batch_size"
    ]  # trainatomy's default: the same as in training
    assert ours.pop("gradient_checkpointing_every") == 1  # in transformers a key of gradient_checkpointing_kwargs
    ours["include_for_metrics"] = list(ours["include_for_metrics"])
    ours["save_strategy"] = training_arguments["save_strategy"]  # trainatomy's default: None, nothing is counted
    ours["use_cache"] = False  # trainatomy's default: None, the Trainer's default with loop trainer
    theirs = {name: training_arguments[name] for name in ours}
    assert {**theirs, "optim": str(getattr(theirs["optim"], "value", theirs["optim"]))} == ours


def test_every_training_argument_is_known_in_one_way(training_arguments: dict[str, Any]) -> None:
    known = arguments()
    keys = set(TrainSpec.model_fields)
    assert set(training_arguments) <= keys | set(known.names())
    assert not keys & set(known.names())
    assert len(known.names()) == len(set(known.names()))


def test_training_arguments_at_their_defaults_are_accepted(training_arguments: dict[str, Any]) -> None:
    TrainSpec.model_validate({name: getattr(value, "value", value) for name, value in training_arguments.items()})


def test_every_optimizer_of_transformers_is_known() -> None:
    names = {each.value for each in pytest.importorskip("transformers.training_args").OptimizerNames}
    known = arguments()
    assert names <= set(known.optimizers) | set(known.refused_optimizers)
    assert not set(known.optimizers) & set(known.refused_optimizers)


def test_keys_of_lora_have_the_defaults_of_peft() -> None:
    theirs = defaults(pytest.importorskip("peft").LoraConfig)
    for name, value in LoraSpec().model_dump().items():
        assert theirs[name] == value, name
