"""Calibrations: what ``trainatomy calibrate`` measured on a machine. Those that ship lie in ``calibrations/``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from trainatomy.errors import WorkloadError
from trainatomy.facts.calls import from_text
from trainatomy.facts.data import read_text
from trainatomy.results.operations import Call

SCHEMA = "trainatomy/calibration/1"


class Point(NamedTuple):
    """One operator that was timed: microseconds of its kernels again on the same tensors and, where measured, with the
    L2 cache full of other things; how many kernels; whether fp32 products could use TF32."""

    call: Call
    hot: float
    cold: float | None
    kernels: int
    tf32: bool


@dataclass(frozen=True)
class Calibration:
    """``environment``: card, driver, versions, processor, date; ``points``: operators; ``sections``: the file's other
    parts as they stand there (``device``: launches, waits, memory); ``left_out``: what could not be measured;
    ``content``: the whole file."""

    environment: Mapping[str, Any]
    points: tuple[Point, ...]
    sections: Mapping[str, Any]
    source: str
    left_out: tuple[str, ...] = ()
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def capability(self) -> tuple[int, int]:
        """Of the card's compute."""
        major, minor = self.environment["capability"]
        return int(major), int(minor)


def load(path: Path) -> Calibration:
    """A calibration file; WorkloadError where it is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise WorkloadError(f"calibration {path}: {error.strerror or error}") from None
    return parse(text, str(path))


def parse(text: str, source: str) -> Calibration:
    """What a calibration file holds; ``source`` names it in errors."""
    try:
        content = json.loads(text)
        schema = content["schema"]
        if schema != SCHEMA:
            raise WorkloadError(f"calibration {source}: its schema is {schema!r}, and this version reads {SCHEMA!r}")
        sections = dict(content["sections"])
        kernels = sections.pop("kernels", {})
        points = tuple(_point(entry) for entry in kernels.get("points", ()))
        left_out = tuple(map(str, kernels.get("left_out", ())))
        return Calibration(content["environment"], points, sections, source, left_out, content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WorkloadError(
            f"calibration {source}: not a file that `trainatomy calibrate` wrote ({type(error).__name__}: {error})"
        ) from None


def _point(entry: Mapping[str, Any]) -> Point:
    cold = entry.get("cold_us")
    return Point(
        from_text(entry["call"]),
        float(entry["us"]),
        None if cold is None else float(cold),
        int(entry["kernels"]),
        bool(entry.get("tf32", False)),
    )


@cache
def shipped() -> Mapping[str, Calibration]:
    """The calibrations that ship, by the id of their card."""
    found = {}
    for entry in sorted(files(__package__).joinpath("calibrations").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".json"):
            text = read_text("calibrations", entry.name)
            found[entry.name.removesuffix(".json")] = parse(text, f"shipped: {entry.name}")
    return found
