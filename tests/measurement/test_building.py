"""Models that are measured: their random numbers, and building one for several processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trainatomy.measurement.process.job import Job
from trainatomy.measurement.step import building
from trainatomy.measurement.step.building import DRAWN, build_beforehand, built_model, repeated_random_values
from trainatomy.workload.schema import Workload


def test_large_tensors_repeat_a_few_random_numbers() -> None:
    with repeated_random_values():
        found = torch.nn.init.normal_(torch.empty(3, DRAWN), mean=1.0, std=0.5)
    assert torch.equal(found[0], found[2])
    assert found[0].mean().item() == pytest.approx(1.0, abs=0.01)
    assert found[0].std().item() == pytest.approx(0.5, abs=0.01)


def test_the_rest_that_fills_no_repetition_is_filled() -> None:
    with repeated_random_values():
        found = torch.empty(DRAWN + 7).fill_(9).uniform_(2, 3)
    assert 2 <= found.min().item() <= found.max().item() <= 3


def test_parameters_keep_their_identity_and_their_dtype() -> None:
    parameter = torch.nn.Parameter(torch.zeros(DRAWN + 1, dtype=torch.bfloat16))
    with repeated_random_values(), torch.no_grad():
        assert parameter.normal_() is parameter
    assert parameter.dtype == torch.bfloat16
    assert parameter.std().item() == pytest.approx(1.0, abs=0.05)


def test_small_tensors_are_drawn_as_always() -> None:
    expected = torch.empty(100).normal_(generator=torch.Generator().manual_seed(1))
    with repeated_random_values():
        assert torch.equal(torch.empty(100).normal_(generator=torch.Generator().manual_seed(1)), expected)


def test_pytorch_is_left_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), repeated_random_values():
        raise ZeroDivisionError
    assert "normal_" not in vars(torch.Tensor)
    assert "uniform_" not in vars(torch.Tensor)


def test_numbers_of_one_distribution_are_drawn_once() -> None:
    with repeated_random_values():
        first, second, other = (torch.empty(DRAWN + 1).normal_(0, std) for std in (1.0, 1.0, 2.0))
    assert torch.equal(first, second) and not torch.equal(first, other)


CONFIG = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16}


def workload(**more: Any) -> Workload:
    return Workload.from_mapping({"model": {"class": "GPT2LMHeadModel", "config": CONFIG}, "loop": "pytorch", **more})


def arguments(described: Workload) -> dict[str, Any]:
    return {"job": Job(described.to_mapping()).to_json()}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    found: list[Any] = []
    monkeypatch.setattr(building, "_built", found)
    yield found


def test_a_model_is_built_once_for_trainings_that_begin_with_the_same(built: list[Any]) -> None:
    build_beforehand(arguments(workload()))
    model = built[0].model
    other = workload(train={"per_device_train_batch_size": 2, "gradient_checkpointing": True}, parallel={"gpus": 2})
    build_beforehand(arguments(other))
    assert built[0].model is model
    assert built_model(other) is model


@pytest.mark.parametrize("more", [{"train": {"seed": 1}}, {"train": {"bf16": True}}, {"data": {"sequence_length": 4}}])
def test_another_training_has_a_model_of_its_own(built: list[Any], more: dict[str, Any]) -> None:
    build_beforehand(arguments(workload()))
    model = built[0].model
    assert built_model(workload(**more)) is not model


def test_random_numbers_go_on_as_if_the_model_had_been_built_now(built: list[Any]) -> None:
    weights = [parameter.clone() for parameter in built_model(workload()).parameters()]
    drawn = torch.rand(3)
    build_beforehand(arguments(workload()))
    torch.rand(100)
    shared = built_model(workload())
    assert all(map(torch.equal, weights, shared.parameters())) and torch.equal(drawn, torch.rand(3))


def test_code_of_the_users_does_not_run_beforehand(built: list[Any]) -> None:
    described = workload().replace({"model": {"factory": "no_such_module:build", "class": None, "config": {}}})
    build_beforehand(arguments(described))
    assert not built
