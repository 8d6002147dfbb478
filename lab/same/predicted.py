"""What is compared of a prediction: its figures, and hashes of its details, its trace and its operations."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from grid import Row, rows

from trainatomy import predict
from trainatomy.errors import TrainatomyError
from trainatomy.prediction.assemble import keep_executed
from trainatomy.reporters.json import to_json
from trainatomy.simulator.simulation import Simulation

HERE = Path(__file__).resolve().parent
UNSTABLE = {"seconds_taken", "versions", "timeline", "schema", "name", "workload", "card", "trainer_state.json"}
"""Keys of a prediction that say how it was made or what was asked, and the size of a file with a random loss."""

LISTED = 2
"""Candidates, rows and the like of a command whose figures are kept; the others are compared by a hash."""

DURATIONS = {"counts.seconds", "shortage.seconds"}
"""How long a search took."""

DETAILS = {"subject", "facts", "bytes_per_parameter"}
"""Keys of a prediction that are compared by a hash, as its lists are."""

Allocations = Mapping[tuple[str, str, str], tuple[int, int]]
"""By phase, module and operation: number of allocations, and their bytes."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """A prediction, or the error in place of one.

    Attributes:
        name: Name of the case.
        figures: Numbers and single words, by their path in the JSON.
        details: Hash of everything else: sentences, and the lists of a training's prediction.
        trace: Hash of the allocations and releases; "" for a command.
        operations: Hash of the operations of a step; "" for a command.
        error: Message of the error in place of a prediction.
        cudnn: Version of cuDNN's library that chose the plans of convolutions; "" where rules did.
        allocations: What was allocated, for a report of differences; not recorded.
    """

    name: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    details: str = ""
    trace: str = ""
    operations: str = ""
    error: str = ""
    cudnn: str = ""
    allocations: Allocations = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return what is kept in the repository."""
        keys = ("name", "figures", "details", "trace", "operations", "error", "cudnn")
        kept = {key: getattr(self, key) for key in keys}
        return {key: value for key, value in kept.items() if value}


def grid_rows() -> list[Row]:
    """Return the trainings of the accuracy grid."""
    return rows()


def feature_rows() -> list[Row]:
    """Return the trainings of ``features.yaml``."""
    return rows(HERE / "features.yaml")


def training_cases() -> list[Row]:
    return [*grid_rows(), *feature_rows()]


def cases_with_torchvision() -> frozenset[str]:
    """Return the names of the trainings that load torchvision, beside whose CUDA build transformers' imports fail."""
    networks = tuple(f"factories.py:{name}" for name in ("resnet18", "resnet50"))
    return frozenset(row.name for row in training_cases() if row.mapping["model"].get("factory") in networks)


def command_cases() -> dict[str, list[str]]:
    written = yaml.safe_load((HERE / "commands.yaml").read_text(encoding="utf-8"))
    return {name: line.split() for name, line in written.items()}


def predict_training(row: Row, *, in_detail: bool = False) -> Predicted:
    """Predict a row; ``in_detail`` adds what was allocated."""
    try:
        with keep_executed() as executed:
            found = to_json(predict(row.workload()))
    except TrainatomyError as error:
        return Predicted(row.name, error=str(error))
    simulation = executed[-1][1] if executed else None
    figures, details = _split(found, hashed=DETAILS, listed=0)
    return Predicted(
        row.name,
        figures,
        details,
        "" if simulation is None else _hash(_trace_lines(simulation)),
        "" if simulation is None else _hash(_operation_lines(simulation)),
        cudnn="" if simulation is None else simulation.cudnn or "",
        allocations={} if simulation is None or not in_detail else _allocations(simulation),
    )


def run_command(name: str, arguments: list[str]) -> Predicted:
    """Run a command line in a process of its own, and take the JSON that it prints."""
    command = [sys.executable, "-m", "trainatomy", *arguments]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        return Predicted(name, error=done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no output")
    return Predicted(name, *_split(found, listed=LISTED))


def _split(found: Any, *, listed: int, hashed: Collection[str] = ()) -> tuple[dict[str, Any], str]:
    """Return figures by path, and the hash of the rest, of a JSON value; ``listed``: items of a list that are kept."""
    figures: dict[str, Any] = {}
    rest: list[str] = []
    for path, value in _leaves(found):
        keys = path.split(".")
        is_further = any(key.isdecimal() and int(key) >= listed for key in keys)
        if is_further or keys[0] in hashed or (isinstance(value, str) and " " in value):
            rest.append(f"{path}: {value}")
        elif (value or value is False) and path not in DURATIONS:
            figures[path] = value
    return figures, _hash(rest)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key not in UNSTABLE:
                yield from _leaves(part, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{path}.{index}")
    elif not (isinstance(value, float) and math.isnan(value)):
        yield path, value


def _hash(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()[:16]


def _trace_lines(simulation: Simulation) -> Iterator[str]:
    origins = simulation.trace.origins
    for event in simulation.trace.events:
        origin = tuple(origins[event.allocation]) if event.action == "alloc" else ()
        yield f"{event.action} {event.allocation} {event.bytes} {event.stream} {origin}"


def _operation_lines(simulation: Simulation) -> Iterator[str]:
    calls = simulation.operations.calls
    for operation in simulation.operations.operations:
        call = calls[operation.call]
        arrays = [(array.shape, array.strides, array.dtype) for array in (*call.inputs, *call.outputs)]
        place = (operation.phase, operation.module, operation.micro_step, operation.repeats, operation.stream)
        yield f"{call.name} {arrays} {call.numbers} {place}"


def _allocations(simulation: Simulation) -> Allocations:
    number: Counter[tuple[str, str, str]] = Counter()
    size: Counter[tuple[str, str, str]] = Counter()
    for event in simulation.trace.events:
        if event.action == "alloc":
            origin = simulation.trace.origins[event.allocation]
            key = (origin.phase, origin.module, origin.operation)
            number[key] += 1
            size[key] += event.bytes
    return {key: (number[key], size[key]) for key in number}
