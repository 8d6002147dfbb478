"""Measured values, predictions and errors: (predicted - measured) / measured.

``device`` is the figure of the whole GPU for rows that had it to themselves.  For others it is NVML's figure for the
process, compared with the prediction minus the part that NVML omits there (``records/cards.yaml``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grid
import steps
import yaml
from steps import Line, Step

import trainatomy
from trainatomy import api
from trainatomy.requests.predicting import COMPARED_PACES
from trainatomy.results.memory import Components

if TYPE_CHECKING:
    from trainatomy.results.memory import Memory
    from trainatomy.workload.schema import Workload

RECORDS = steps.RECORDS
SETS = {
    "fresh": "Fresh",
    "unseen": "Unseen",
    "held out": "Held out",
    "tuning": "Tuned on",
    "H100": "Sample of both, on an H100",
    "notebook": "Notebook",
}
"""The sets of rows, with their titles on the page."""
FIGURES = ("allocated", "reserved", "device")
TASKS_PER_PROCESS = 40
"""Predictions per process; then it is replaced, which returns the memory that libraries keep."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Predicted and measured figures of one row.

    Attributes:
        predicted: Bytes by figure (``None``: unknown).
        measured: Bytes by figure.
        problem: The error that the prediction ended in, or the status of a run that did not complete.
        parts: Predicted and measured bytes of each component at the peak, where allocations were recorded.
        same_instant: Both peaks are in the same phase of the same step.
        step: Step time (``None``: not predicted).
    """

    name: str
    set: str
    predicted: Mapping[str, int | None]
    measured: Mapping[str, int | None]
    problem: str = ""
    seconds: float = field(default=0.0, compare=False)
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    same_instant: bool | None = None
    step: Step | None = None

    def error(self, figure: str) -> float | None:
        """Return the relative error; positive where the prediction is too high."""
        predicted, measured = self.predicted.get(figure), self.measured.get(figure)
        return None if predicted is None or not measured else (predicted - measured) / measured

    def errors(self) -> dict[str, float | None]:
        """Return all known errors: of each figure, and of the step time in each measurement session."""
        of_time = (
            {f"step, {occasion}": self.step.error(occasion) for occasion in self.step.measured} if self.step else {}
        )
        return {figure: self.error(figure) for figure in FIGURES} | of_time

    def gaps(self) -> dict[str, float]:
        """Return predicted minus measured bytes of each component, as a share of the measured total."""
        total = sum(measured for _, measured in self.parts.values())
        return {name: (predicted - measured) / total for name, (predicted, measured) in self.parts.items()}


@dataclass(frozen=True, slots=True)
class Run:
    """A run over many rows: versions of the software that predicted, a digest of the records, the outcomes in order."""

    predicted_with: Mapping[str, str]
    records_digest: str
    outcomes: Sequence[Outcome]


def read_records(paths: Sequence[Path]) -> list[Line]:
    """Read the lines of measured.jsonl files, in order."""
    return [json.loads(text) for path in paths for text in path.read_text(encoding="utf-8").splitlines()]


def digest(lines: Sequence[Line]) -> str:
    """Return a digest of measured lines."""
    return hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest()[:16]


def cards() -> dict[str, dict[str, Any]]:
    """Return ``records/cards.yaml``, by the driver's name of the GPU."""
    found: dict[str, dict[str, Any]] = yaml.safe_load((RECORDS / "cards.yaml").read_text(encoding="utf-8"))
    return found


def set_of(line: Line) -> str:
    """Return the set (a key of ``SETS``) of a row."""
    return str(line.get("set") or ("held out" if line["held_out"] else "tuning"))


def workload_of(line: Line, gpu: str) -> Workload:
    """Return the measured training, with the GPU and the PyTorch version that it ran on."""
    row = grid.Row(line["name"], line["family"], line["workload"], line["alone"], line["held_out"])
    software = {"torch": line["versions"]["torch"].split("+")[0]}
    mapping = {"name": line["name"], **row.mapping, "gpu": gpu, "software": software}
    return replace(row, mapping=mapping).workload()


def measured(line: Line) -> dict[str, int | None]:
    """Return the measured bytes of each figure."""
    return {
        "allocated": line["peak_allocated_bytes"],
        "reserved": line["peak_reserved_bytes"],
        "device": line["device_bytes"] if has_card(line) else line["process_bytes"],
    }


def has_card(line: Line) -> bool:
    """Return whether NVML's figure for the whole GPU belongs to the row alone."""
    return line["nvml_used_bytes"] is not None and line["idle_bytes"] is not None


def outcome(line: Line, gpu: str = "") -> Outcome:
    """Predict the training of a measured line; ``gpu``: its GPU, where records/cards.yaml lacks it."""
    known = cards().get(line["gpu"], {})
    try:
        paces: dict[str, Any] = {"host_paces": COMPARED_PACES} if line.get("host_pace") else {}
        prediction = api.predict(workload_of(line, gpu or known["card"]), **paces)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        return Outcome(line["name"], set_of(line), {}, measured(line), problem)
    memory, shortfall = prediction.memory, known.get("process_shortfall_bytes")
    device = memory.device_bytes if has_card(line) else None if shortfall is None else memory.device_bytes - shortfall
    predicted = {"allocated": memory.peak_allocated_bytes, "reserved": memory.peak_reserved_bytes, "device": device}
    problem = "" if line["status"] == "completed" else line["status"]
    step, seconds = steps.step_of(prediction.time, line), prediction.seconds_taken
    return Outcome(
        line["name"], set_of(line), predicted, measured(line), problem, seconds, *compared(line, memory), step
    )


def compared(line: Line, predicted: Memory) -> tuple[dict[str, tuple[int, int]], bool | None]:
    """Return each component predicted and measured, and whether both peaks are in one phase of one step.

    Runs without recorded allocations have neither.  The context is left out where the GPU was shared: NVML's figure for
    a process lacks a part of it.
    """
    bill = line.get("memory")
    if not bill:
        return {}, None
    found = Components(**bill["components"]).as_dict()
    names = [name for name in found if name != "context" or has_card(line)]
    parts = {name: (predicted.components[name], found[name]) for name in names}
    peak = bill["peak"]
    return parts, (peak["step"], peak["phase"]) == (predicted.peak.step, predicted.peak.phase)


def predict_all(lines: Sequence[Line], gpu: str = "", jobs: int = 2) -> Iterator[Outcome]:
    """Yield an outcome for each line, in order, from ``jobs`` processes that are replaced after some rows.

    ``max_tasks_per_child`` is not used: with it, Python 3.11's executor can hang
    (https://github.com/python/cpython/issues/115634).
    """
    share = jobs * TASKS_PER_PROCESS
    for first in range(0, len(lines), share):
        part = lines[first : first + share]
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(outcome, line, gpu) for line in part]
            for line, future in zip(part, futures, strict=True):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    yield Outcome(line["name"], set_of(line), {}, measured(line), "the process that predicted it died")


def software() -> dict[str, str]:
    """Return the versions of the libraries that predictions come from."""
    libraries = ("torch", "transformers", "accelerate", "peft")
    return {"trainatomy": trainatomy.__version__, **{name: metadata.version(name) for name in libraries}}


def write(run: Run, path: Path) -> None:
    """Write a run as JSON, one row per line, so that two runs can be compared as text."""
    rows = []
    for one in run.outcomes:
        content = asdict(one)
        del content["seconds"]
        if not one.parts:
            del content["parts"], content["same_instant"]
        if one.step is None:
            del content["step"]
        elif one.step.pace is None:  # most rows were measured before paces were
            for name in ("pace", "paced_seconds", "paced_occasion"):
                del content["step"][name]
        rows.append(json.dumps(content))
    head = json.dumps({"predicted_with": run.predicted_with, "records_digest": run.records_digest})
    path.write_text(head[:-1] + ', "outcomes": [\n' + ",\n".join(rows) + "\n]}\n", encoding="utf-8")


def read(path: Path) -> Run:
    """Read a run."""
    content = json.loads(path.read_text(encoding="utf-8"))
    outcomes = tuple(_outcome(row) for row in content["outcomes"])
    return Run(content["predicted_with"], content["records_digest"], outcomes)


def _outcome(row: dict[str, Any]) -> Outcome:
    parts = {name: (predicted, measured) for name, (predicted, measured) in row.get("parts", {}).items()}
    step = steps.read_step(row["step"]) if "step" in row else None
    return Outcome(**row | {"parts": parts, "step": step})


def changes(before: Run, after: Run) -> list[str]:
    """Return a line for each error that differs between two runs as printed."""
    old = {(one.name, one.set): one for one in before.outcomes}
    found = []
    for one in after.outcomes:
        if before_it := old.get((one.name, one.set)):
            then, now = before_it.errors(), one.errors()
            found += [
                f"{one.name} {figure}: {first} -> {second}"
                for figure in {**now, **then}
                if (first := _percent(then.get(figure))) != (second := _percent(now.get(figure)))
            ]
    return found


def _percent(error: float | None) -> str:
    return "none" if error is None else f"{error * 100:+.4f} %"


def family(line: Line) -> str:
    """Return the model's family as transformers names it (``Bert``, ``Qwen2``), or the row's own for factories."""
    found = re.match(r"(\w+?)(?=For[A-Z]|LMHead|Model)", line["workload"]["model"].get("class", ""))
    return found[1] if found else str(line["family"])
