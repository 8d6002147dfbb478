"""A measured row: its two runs merged, as a line of a file, and as a line of a table."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from grid import Row

    from trainatomy.results.measurement import Measurement


def with_record(control: Measurement, recorded: Measurement) -> Measurement:
    """Merge the control run with the memory breakdown of the recorded run and its step times.

    A note says where the peak of the recorded run differs from the control run's.
    """
    notes = list(control.notes)
    if recorded.peak_allocated_bytes != control.peak_allocated_bytes:
        notes.append(f"allocated {recorded.peak_allocated_bytes:,} B at the peak of the recorded run")
    return replace(
        control,
        memory=recorded.memory,
        modules=recorded.modules,
        recorded_step_seconds=recorded.recorded_step_seconds or recorded.step_seconds,
        notes=(*notes, *recorded.notes),
    )


def line_of(measurement: Measurement, row: Row, *, alone: bool, occasion: str = "") -> dict[str, Any]:
    """Return the line to keep; ``occasion``: a session's name in records/occasions.yaml, default the date."""
    fields = {"held_out": row.held_out, "family": row.family, "alone": alone, "occasion": occasion or measurement.date}
    return asdict(measurement) | fields | {"tape_file": None}


def append(path: Path, content: Mapping[str, Any]) -> None:
    """Append one JSON line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")


def table(done: Sequence[Measurement]) -> str:
    """Format one short line per measurement, MiB."""
    lines = [f"{'row':40} {'allocated':>10} {'reserved':>10} {'device':>10} {'context':>8} {'step ms':>8}"]
    for one in done:
        sizes = (one.peak_allocated_bytes, one.peak_reserved_bytes, one.device_bytes, one.context_bytes)
        cells = ["-" if size is None else f"{size / 2**20:.1f}" for size in sizes]
        seconds = "-" if one.step_seconds is None else f"{one.step_seconds * 1000:.0f}"
        lines.append(f"{one.name:40} {cells[0]:>10} {cells[1]:>10} {cells[2]:>10} {cells[3]:>8} {seconds:>8}")
    return "\n".join(lines)
