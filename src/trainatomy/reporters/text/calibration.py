"""What a calibration found, beside the card's data sheet."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from trainatomy.catalog.calibrations import Calibration
from trainatomy.reporters.text.rendering import bullets, figures, section
from trainatomy.timing.findings import Finding, findings

_TITLES = {
    "TFLOP/s": "Arithmetic",
    "TB/s": "Traffic",
    "µs": "What it costs besides",
    "times the reference host": "Host",
}


def calibration_page(calibration: Calibration, left_out: Sequence[str]) -> Group:
    """A headline, then a table for each unit, then what could not be measured."""
    where = calibration.environment
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    told = f"{where['gpu']}, driver {where['driver']}, {versions}, {where['processor']}, {where['date']}"
    parts: list[RenderableType] = [
        Text(f"{len(calibration.points):,} operations measured", style="bold"),
        Text(told, style="dim"),
    ]
    found = findings(calibration)
    for unit, title in _TITLES.items():
        rows = [one for one in found if one.unit == unit]
        if rows:
            parts.append(section(title, _table(rows, unit)))
    if left_out:
        parts.append(section("Left out", bullets(tuple(left_out))))
    return Group(*parts)


def _table(rows: Sequence[Finding], unit: str) -> RenderableType:
    compared = any(row.data_sheet for row in rows)
    table = figures("", "", numbers=(unit, *(("data sheet", "share") if compared else ())))
    for row in rows:
        beside = (f"{row.data_sheet:,.1f}", f"{row.measured / row.data_sheet:.0%}") if row.data_sheet else ("-", "-")
        table.add_row(row.name, row.at, f"{row.measured:,.1f}", *(beside if compared else ()))
    return table
