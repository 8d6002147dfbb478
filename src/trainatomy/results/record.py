"""A record: one measured run, with all that is needed to read it again without the machine it was made on."""

from __future__ import annotations

from dataclasses import dataclass

from trainatomy.results.bill import Measurement, Prediction


@dataclass(frozen=True, slots=True)
class Record:
    """``id``: sorts by time, unique in its folder; ``created``: UTC, ISO 8601, seconds; ``command``: how it was asked
    for; ``group``: name of the comparison that it belongs to, or nothing; ``repeat``: from 0, of the same workload in
    that group; ``key``: a hash of what was asked for (workload, steps), by which an interrupted comparison knows what
    it has.
    """

    id: str
    created: str
    command: str
    group: str
    repeat: int
    key: str
    measurement: Measurement
    prediction: Prediction | None
