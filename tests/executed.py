"""Simulations and predictions of workloads that tests only read: equal ones are executed once in a row of tests."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from trainatomy.api import predict
from trainatomy.results.prediction import Prediction
from trainatomy.simulator.simulate import simulate, topology_of
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload import Workload

Result = TypeVar("Result")
_KEPT = 40
"""Results that are kept, about those of one file: each of them holds a trace."""
_simulations: OrderedDict[tuple[str, int], Simulation] = OrderedDict()
_predictions: OrderedDict[tuple[str, int], Prediction] = OrderedDict()


def simulated(workload: Workload, rank: int = 0) -> Simulation:
    """Simulate a rank of a workload's training."""

    def made() -> Simulation:
        return simulate(workload, workload.resolve_gpu(), topology=topology_of(workload, rank))

    return _once(_simulations, (_key(workload), rank), made)


def predicted(workload: Workload) -> Prediction:
    """Predict a workload's training, with its time."""
    return _once(_predictions, (_key(workload), 0), lambda: predict(workload))


def _key(workload: Workload) -> str:
    """Return what a workload says, and what its defaults are: a script that says a default may run otherwise."""
    return json.dumps(workload.to_mapping()) + workload.model_dump_json()


def _once(kept: OrderedDict[tuple[str, int], Result], key: tuple[str, int], make: Callable[[], Result]) -> Result:
    """Return what is kept under a key, or make and keep it in place of what was asked for longest ago."""
    if key not in kept:
        kept[key] = make()
    kept.move_to_end(key)
    if len(kept) > _KEPT:
        kept.popitem(last=False)
    return kept[key]
