"""The names that transformers 5.24 gave to the settings of gradient checkpointing."""

from __future__ import annotations

from typing import Any

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.workload import Workload
from trainatomy.workload.overrides import RawWorkload, merge

MODEL = {"id": "gpt2"}


def described(**train: Any) -> Workload:
    return Workload.from_mapping({"model": MODEL, "train": train})


def test_the_new_names_mean_the_old_ones() -> None:
    new = described(activation_checkpointing=True, activation_checkpointing_kwargs={"every_n_layers": 2})
    old = described(gradient_checkpointing=True, gradient_checkpointing_kwargs={"every_n_layers": 2})
    assert new == old
    assert new.train.gradient_checkpointing_every == 2


def test_both_names_may_say_the_same() -> None:
    assert described(activation_checkpointing=True, gradient_checkpointing=True).train.gradient_checkpointing


def test_none_leaves_a_setting_unsaid() -> None:
    given = described(activation_checkpointing=None, gradient_checkpointing=True, activation_checkpointing_kwargs=None)
    assert given == described(gradient_checkpointing=True)


def test_two_values_are_refused() -> None:
    with pytest.raises(WorkloadError, match=r"activation_checkpointing: is True, but gradient_checkpointing is False"):
        described(activation_checkpointing=True, gradient_checkpointing=False)


@pytest.mark.parametrize("flag", ["gradient_checkpointing", "activation_checkpointing"])
@pytest.mark.parametrize("key", ["gradient_checkpointing", "activation_checkpointing"])
def test_a_flag_of_either_name_overrides_a_file(key: str, flag: str) -> None:
    in_file = RawWorkload({"model": MODEL, "train": {key: True}})
    assert not in_file.with_flags({flag: False}).validate().train.gradient_checkpointing
    assert merge(described(), {flag: "true"}).train.gradient_checkpointing
