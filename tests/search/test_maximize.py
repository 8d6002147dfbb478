"""The search for the largest size, by a pretended executor."""

from __future__ import annotations

from dataclasses import dataclass

from pretender import Model, Pretender

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
