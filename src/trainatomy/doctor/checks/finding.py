"""Making a finding of a check's facts."""

from __future__ import annotations

from trainatomy.catalog.machine import findings
from trainatomy.results.diagnosis import Finding


def finding(name: str, *gpus: int, **values: str | int | float | None) -> Finding:
    """Return a finding with the severity and costs of the catalogue; values that are unknown are left out."""
    entry = findings()[name]
    known = {key: value for key, value in values.items() if value is not None}
    return Finding(name, entry.severity, gpus, known, entry.costs)
