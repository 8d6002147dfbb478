"""Arguments that change nothing, whose values transformers would refuse."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from trainatomy.errors import WorkloadError
from trainatomy.workload import Workload
from trainatomy.workload.arguments import arguments

_GIVEN = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "kwargs"}


def workload(**train: Any) -> Workload:
    return Workload.from_mapping({"model": {"id": "gpt2"}, "train": train})


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"lr_scheduler_type": "cosin"}, "train.lr_scheduler_type: there is no schedule 'cosin'; did you mean cosine"),
        (
            {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"cycles": 2}},
            "train.lr_scheduler_kwargs: there is no argument 'cycles': cosine takes num_cycles",
        ),
        ({"lr_scheduler_kwargs": {"cycles": 2}}, "linear takes no arguments"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "reduce_lr_on_plateau needs an eval_strategy"),
        ({"logging_strategy": "step"}, "train.logging_strategy: has no value 'step'; did you mean steps?"),
        ({"report_to": ["wandb", "mlflw"]}, "train.report_to: has no value 'mlflw'; did you mean mlflow?"),
        ({"log_level": "loud"}, "train.log_level: has no value 'loud'; known: detail, debug"),
        ({"warmup_steps": -5}, "train.warmup_steps: must be at least 0, found -5"),
        ({"warmup_ratio": "three"}, "train.warmup_ratio: must be a number, found 'three'"),
        ({"num_train_epochs": "three"}, "train.num_train_epochs"),
        ({"max_steps": "many"}, "train.max_steps"),
        ({"optim": "AdamW"}, "unknown optimizer 'AdamW'; did you mean adamw_torch?"),
    ],
)
def test_a_value_that_does_not_exist_is_refused(train: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        workload(**train)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "train",
    [
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr": 1e-6}'},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "lr_scheduler_kwargs": {"factor": 0.5}},
        {"logging_strategy": False, "hub_strategy": "end", "report_to": "none", "log_level": 20, "warmup_steps": 0.1},
    ],
)
def test_a_value_that_exists_is_accepted(train: dict[str, Any]) -> None:
    assert set(train) - {"eval_strategy"} <= set(workload(**train).train.ignored)


def test_no_limit_of_steps_is_none() -> None:
    train = workload(num_train_epochs="3", max_steps=-1, eval_steps=0.5).train
    assert (train.num_train_epochs, train.max_steps, train.eval_steps) == (3.0, None, 0.5)


def test_the_schedules_are_those_of_transformers() -> None:
    known = arguments().schedules
    assert set(known) == {schedule.value for schedule in TYPE_TO_SCHEDULER_FUNCTION}
    for schedule, function in TYPE_TO_SCHEDULER_FUNCTION.items():
        keys = known[schedule.value]
        code = function.__code__
        takes_any = bool(code.co_flags & 0x08)
        names = set(code.co_varnames[: code.co_argcount]) - _GIVEN
        assert keys is None if takes_any else set(keys or ()) == names
