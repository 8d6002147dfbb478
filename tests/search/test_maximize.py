"""The search for the largest size, by a pretended executor."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from pretender import Model, Pretender

from trainatomy import bisection
from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.reporters.text.fit import fit_page
from trainatomy.reporters.text.rendering import render
from trainatomy.requests.fitting import FitRequest
from trainatomy.results.prediction import Prediction
from trainatomy.search.explore import Observer
from trainatomy.search.maximize import maximize
from trainatomy.workload.schema import Workload


@dataclass
class _Layers(Model):
    """Every layer weighs 0.1 GiB with its states and 0.02 GiB of activations, the embedding 0.5 GiB."""

    def step(self, workload: Workload) -> tuple[float, float, float, float]:
        config = workload.model.config or {}
        layers = int(config["n_layer"])
        return 0.5 + 0.1 * layers, 0.02 * layers, 0.0, 0.01 * layers


def test_layers_are_guessed_by_all_that_they_hold(some_prediction: Prediction, workload: Workload) -> None:
    """A guess far beyond the limit executes a model many times as large as the GPU."""
    executor = Pretender(some_prediction, _Layers())
    found = maximize(workload, "model-size", FitRequest(), executor, Observer())
    assert found.maximum is not None
    asked = [int((one.model.config or {})["n_layer"]) for one in executor.asked]
    assert max(asked) <= found.maximum.value + 2
    assert len(asked) <= 6 * len({(one.allocator, one.train.gradient_checkpointing) for one in executor.asked})


@dataclass
class _Images(Model):
    """Activations grow with the square of the image; sides that 14 does not divide fail."""

    def step(self, workload: Workload) -> tuple[float, float, float, float]:
        side = int((workload.model.config or {})["image_size"])
        if side % 14:
            raise SimulationError(f"patches do not divide images of {side}")
        return 1.0, 4 * (side / 224) ** 2, 0.0, 0.01


KEPT = FitRequest(keep=("gradient_checkpointing", "allocator"))


def images(size: object) -> Workload:
    config = {"model_type": "vit", "image_size": size, "patch_size": 14}
    model = {"class": "ViTForImageClassification", "config": config, "dtype": "float32"}
    return Workload.from_mapping({"model": model, "gpu": "rtx-3090"})


@pytest.mark.parametrize(("step", "largest"), [(":14", 518), (":28", 504), ("", 448)])
def test_any_whole_number_of_the_workload_can_be_as_large_as_fits(
    some_prediction: Prediction, step: str, largest: int
) -> None:
    executor = Pretender(some_prediction, _Images())
    found = maximize(images(224), f"model.config.image_size{step}", KEPT, executor, Observer())
    assert found.maximum is not None and found.best is not None
    assert (found.maximum.value, found.best.workload["model"]["config"]["image_size"]) == (largest, largest)  # type: ignore[index]
    assert found.maximum.beyond == (largest + int(step[1:]) if step else 560)
    assert bool(found.maximum.failed) == (not step)
    assert all(value % 14 for value in found.maximum.failed)
    assert all("patches do not divide" in reason for reason in found.maximum.failed.values())
    page = render(fit_page(found, "fit"), 200)
    assert f"The largest that fits: model.config.image_size {largest:,}; {found.maximum.beyond:,} would need" in page
    assert ("Passed over: " in page) == (not step)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("model.config.patches", "not given; give a whole number to begin with"),
        ("model.config.hidden_act", "its value is gelu"),
        ("data.imagesize", "did you mean image_size"),
        ("model.config.image_size:0", "must be a whole number of at least 1"),
    ],
)
def test_what_is_no_whole_number_is_refused(some_prediction: Prediction, key: str, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        maximize(images(224), key, KEPT, Pretender(some_prediction, _Images()), Observer())


class _Patches(Model):
    """Activations grow with the cube of a patch that the model and the batch are made for."""

    def step(self, workload: Workload) -> tuple[float, float, float, float]:
        side = workload.model.factory_arguments["patch"]
        assert side == workload.data.factory_arguments["size"]
        return 1.0, 4 * (side / 64) ** 3, 0.0, 0.01


def patches(patch: int, size: int) -> Workload:
    model = {"factory": "mine:build", "factory_arguments": {"patch": patch}}
    return Workload.from_mapping(
        {"model": model, "data": {"factory": "mine:batch", "factory_arguments": {"size": size}}, "gpu": "rtx-3090"}
    )


def test_an_argument_of_several_factories_can_be_as_large_as_fits(some_prediction: Prediction) -> None:
    keys = "model.factory_arguments.patch,data.factory_arguments.size"
    executor = Pretender(some_prediction, _Patches())
    found = maximize(patches(64, 64), f"{keys}:16", KEPT, executor, Observer())
    assert found.maximum is not None and found.best is not None
    assert found.maximum.value == found.best.workload["model"]["factory_arguments"]["patch"] == 112  # type: ignore[index]
    assert found.maximum.beyond == 128
    with pytest.raises(WorkloadError, match=r"need one value: model.* is 64, data\.factory_arguments\.size is 32"):
        maximize(patches(64, 32), keys, KEPT, executor, Observer())


def test_a_value_to_begin_with_that_fails_ends_the_search(some_prediction: Prediction) -> None:
    with pytest.raises(SimulationError, match="images of 225"):
        maximize(images(225), "model.config.image_size", KEPT, Pretender(some_prediction, _Images()), Observer())


@pytest.mark.parametrize("limit", [0, 1, 31, 32, 33, 100, 999])
@pytest.mark.parametrize("failing", [1, 2, 5])
def test_the_largest_value_is_found_whatever_is_guessed(limit: int, failing: int) -> None:
    values, tried = range(1, 201), list[int]()

    def holds(value: int) -> bool | None:
        return None if value % failing else value <= limit

    def middle() -> int:
        low = max((value for value in tried if holds(value)), default=0)
        high = min((value for value in tried if holds(value) is False), default=200)
        return (low + high) // 2

    for value in bisection.largest(values, 40, holds, middle):
        tried.append(value)
    expected = max((value for value in values if not value % failing and value <= limit), default=None)
    assert max((value for value in tried if holds(value)), default=None) == expected
    assert len(tried) == len(set(tried)) <= 30


def test_a_search_in_which_most_values_fail_asks_for_the_step() -> None:
    with pytest.raises(WorkloadError, match="25 values failed"):
        list(bisection.largest(range(1, 1000), 500, lambda value: None if value % 500 else True, lambda: 900))


@pytest.mark.parametrize(("start", "step"), [(224, 16), (512, 64), (12, 1), (640, 64), (7, 1)])
def test_values_to_try_are_in_steps_of_a_power_of_two(start: int, step: int) -> None:
    found = bisection.multiples(start, None)
    assert found.step == step and start in found and found[0] > 0  # type: ignore[attr-defined]
    assert 100 in bisection.multiples(100, 30) and bisection.multiples(100, 30)[0] == 10
