"""Optimizers that a function of the user's makes: one, and several in a plain loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from trainatomy.api import predict
from trainatomy.errors import WorkloadError
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.training.optimizer import create_custom
from trainatomy.workload import TrainSpec, Workload

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
CODE = """
import torch

def split(model):
    matrices = [each for each in model.parameters() if each.ndim == 2]
    rest = [each for each in model.parameters() if each.ndim != 2]
    return matrices, rest

def both(model):
    matrices, rest = split(model)
    return [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(rest, lr=0.1)]

def muon(model):
    matrices, rest = split(model)
    return torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(rest, lr=0.1)

def single(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)

def none(model):
    return []

def closure(model):
    return torch.optim.LBFGS(model.parameters())
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    path = tmp_path / "several.py"
    path.write_text(CODE)
    return str(path)


def describe(optim: str, loop: str = "pytorch", **train: Any) -> Workload:
    return Workload.from_mapping(
        {
            "model": {"class": "LlamaForCausalLM", "config": CONFIG},
            "loop": loop,
            "data": {"sequence_length": 16},
            "train": {"optim": optim, "per_device_train_batch_size": 2, **train},
        }
    )


def run(optim: str, loop: str = "pytorch", **train: Any) -> Simulation:
    workload = describe(optim, loop, **train)
    return simulate(workload, workload.resolve_gpu())


def bytes_of_states(simulation: Simulation) -> int:
    size = {event.allocation: event.bytes for event in simulation.trace.events if event.action == "alloc"}
    return sum(size[number] for number, found in simulation.trace.labels.items() if found == "optimizer_state")


def parameters(place: str, *, of_matrices: bool) -> int:
    from trainatomy.training.model import build_model

    with torch.device("meta"):
        model = build_model(describe(f"{place}:both"))
    return sum(each.numel() for each in model.parameters() if (each.ndim == 2) is of_matrices)


def test_each_optimizer_holds_states_of_its_parameters(place: str) -> None:
    rest, matrices = parameters(place, of_matrices=False), parameters(place, of_matrices=True)
    assert bytes_of_states(run(f"{place}:both")) == 2 * 4 * rest  # SGD without momentum holds none
    assert bytes_of_states(run(f"{place}:muon")) == 4 * matrices + 2 * 4 * rest


@pytest.mark.parametrize("loop", ["pytorch", "trainer"])
def test_a_function_with_one_optimizer_is_that_optimizer(place: str, loop: str) -> None:
    own, by_class = (run(optim, loop) for optim in (f"{place}:single", "torch.optim.AdamW"))
    assert bytes_of_states(own) == bytes_of_states(by_class) > 0


def test_gradient_scaling_unscales_each(place: str) -> None:
    simulation = run(f"{place}:both", fp16=True)
    scalings = [call for call in simulation.operations.calls if "_amp_foreach_non_finite" in call.name]
    assert scalings


def test_a_trainer_takes_no_several_optimizers(place: str) -> None:
    with pytest.raises(WorkloadError, match=r"returned 2 optimizers, and loop: trainer steps one: use loop: pytorch"):
        run(f"{place}:both", "trainer")


@pytest.mark.parametrize(
    ("name", "message"), [("none", "not an empty list"), ("closure", "needs a closure"), ("absent", "has no 'absent'")]
)
def test_what_a_function_may_not_return(place: str, name: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        create_custom(TrainSpec(optim=f"{place}:{name}"), nn.Linear(2, 2))


def test_arguments_of_a_function_are_refused(place: str) -> None:
    with pytest.raises(WorkloadError, match="is not passed to a function"):
        describe(f"{place}:both", optim_args="lr=1")


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.second(self.first(input)).mean()
        return mean


def make_both(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, second = model.children()
    return [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(second.parameters(), lr=0.1)]


def test_a_function_is_passed_with_a_live_model() -> None:
    model = Twice()
    batch = {"input": torch.ones(4, 64)}
    found = predict(model, batch=batch, optimizer=make_both, loop="pytorch", gpu="h200")
    second = sum(each.numel() for each in model.second.parameters())
    assert found.memory.components["optimizer_states"] >= 2 * 4 * second
    with pytest.raises(WorkloadError, match="cannot be imported by its name"):
        predict(model, batch=batch, optimizer=lambda model: make_both(model), gpu="h200")


def test_muon_alone_says_what_to_do() -> None:
    with pytest.raises(WorkloadError, match="name a function of the model that returns both"):
        create_custom(TrainSpec(optim="torch.optim.Muon"), nn.Linear(2, 2))
