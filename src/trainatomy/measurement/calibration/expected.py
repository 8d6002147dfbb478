"""Predict the CPU time of the reference CPU for the small trainings that calibrate others.

Runs as ``python -m trainatomy.measurement.calibration.expected GPU``, a process of its own, because it simulates steps.
Prints a line of JSON: for each training, in order, microseconds by phase.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.machines import reference_host
from trainatomy.processes import end_with_parent
from trainatomy.simulator.simulate import simulate
from trainatomy.timing.host_costs import cpu_costs
from trainatomy.timing.launch import cpu_seconds_by_phase
from trainatomy.workload.loops import loop_of
from trainatomy.workload.schema import Workload


def trainings() -> list[Workload]:
    """Return the trainings of ``catalog/host_trainings.yaml``."""
    return [Workload.from_mapping(one) for one in read_yaml("host_trainings.yaml")["trainings"]]


def expected_microseconds(gpu_id: str) -> list[dict[str, float]]:
    """Return for each training, on the GPU with this id, microseconds of forward, backward, optimizer, other, batch."""
    costs = cpu_costs(reference_host().microseconds)
    found = []
    for workload in trainings():
        operations = simulate(workload, find_gpu(gpu_id)).operations
        seconds = cpu_seconds_by_phase(operations, costs, loop_of(workload).cpu_costs)
        found.append({phase: round(value * 1e6, 1) for phase, value in seconds.items()})
    return found


def main(arguments: list[str]) -> int:
    answer: list[Any] = expected_microseconds(arguments[0])
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
