"""Optimizers that evaluate the loss themselves (LBFGS), and a moving average of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.simulator.simulate import simulate, steps_needed
from trainatomy.simulator.simulation import Simulation
from trainatomy.training.model import build_model
from trainatomy.training.observer import Observer
from trainatomy.training.run import run
from trainatomy.workload import Workload

GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 100, "n_positions": 16}
LBFGS = {"optim": "torch.optim.LBFGS", "optim_args": "max_iter=3,history_size=4"}


def describe(train: dict[str, Any], loop: str = "pytorch", **sections: Any) -> Workload:
    return Workload.from_mapping(
        {
            "model": {"class": "GPT2LMHeadModel", "config": GPT2},
            "loop": loop,
            "data": {"sequence_length": 8},
            "train": {"per_device_train_batch_size": 2, **train},
            **sections,
        }
    )


def labelled(simulation: Simulation, label: str) -> list[int]:
    """Return the sizes of what has a label and is held when the last step ends."""
    trace = simulation.trace
    end = next(mark.event for mark in reversed(trace.marks) if mark.name == "step end")
    held: dict[int, int] = {}
    for event in trace.events[:end]:
        if event.action == "alloc":
            held[event.allocation] = event.bytes
        else:
            held.pop(event.allocation, None)
    return sorted(size for one, size in held.items() if trace.labels.get(one) == label)


class Evaluations(Observer):
    """Counts the evaluations."""

    def __init__(self) -> None:
        self.count = 0

    def micro_step_begin(self, micro_step: int) -> None:
        self.count += 1


def test_lbfgs_makes_all_its_iterations_on_the_cpu() -> None:
    workload, evaluations = describe({**LBFGS, "gradient_accumulation_steps": 2, "max_grad_norm": 0}), Evaluations()
    torch.manual_seed(0)
    run(workload, build_model(workload), device="cpu", steps=3, observer=evaluations)
    assert evaluations.count == 3 * 3 * 2


def test_the_history_is_full_in_the_last_step() -> None:
    workload = describe(LBFGS)
    simulation = simulate(workload, workload.resolve_gpu())
    assert simulation.steps == steps_needed(workload) == 3
    whole = simulation.parameters * 4
    vectors = [size for size in labelled(simulation, "optimizer_state") if size == whole]
    assert len(vectors) == 2 * 4 + 2  # differences of gradients, steps; the direction and the last gradient
    assert any("LBFGS is assumed to make all its iterations" in note for note in simulation.notes)
    marks = [mark.name for mark in simulation.trace.marks]
    assert marks.count("forward") == marks.count("optimizer") == marks.count("optimizer end") == 3 * 3


@pytest.mark.parametrize(
    ("train", "loop", "reason"),
    [
        ({}, "trainer", "the Trainer calls optimizer.step.. without one: use loop: pytorch"),
        ({"optim_args": "line_search_fn=strong_wolfe"}, "pytorch", "leave line_search_fn out"),
        ({"fp16": True}, "pytorch", "PyTorch's gradient scaling takes none"),
    ],
)
def test_closures_that_are_not_simulated_are_refused(train: dict[str, Any], loop: str, reason: str) -> None:
    workload = describe({"optim": "torch.optim.LBFGS", **train}, loop)
    with pytest.raises(SimulationError, match=rf"train\.optim: torch\.optim\.LBFGS needs a closure .*{reason}"):
        simulate(workload, workload.resolve_gpu())


def test_a_moving_average_holds_the_weights_again() -> None:
    plain, averaged = describe({}), describe({}, ema_decay=0.99)
    without, simulation = (simulate(each, each.resolve_gpu()) for each in (plain, averaged))
    assert labelled(simulation, "average_weight") == sorted(labelled(without, "weight") + labelled(without, "buffer"))
    assert labelled(simulation, "weight") == labelled(without, "weight")
    assert simulation.trainable_parameters == without.trainable_parameters


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"loop": "trainer"}, "ema_decay: is kept by loop: pytorch"),
        ({"loop": "pytorch", "parallel": {"gpus": 2}}, "ema_decay: is simulated on one GPU"),
    ],
)
def test_an_average_that_no_loop_keeps_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        describe({}, ema_decay=0.99, **sections)
