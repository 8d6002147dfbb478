"""A record of a measurement that was just made."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from trainatomy.records.key import key_of
from trainatomy.results.record import Record

if TYPE_CHECKING:
    from trainatomy.results.measurement import Measurement
    from trainatomy.results.prediction import Prediction

KEY_DIGITS = 4
"""How many digits of its key a record's id holds, so that a search need not open every file."""


def make_record(
    measurement: Measurement,
    prediction: Prediction | None,
    command: str,
    group: str = "",
    repeat: int = 0,
    *,
    steps: int | None = None,
    components: bool = True,
) -> Record:
    """A record, made now, of ``measurement`` and of the ``prediction`` of the same workload.

    ``command``: how it was asked for; ``group``, ``repeat``: see ``Record``; ``steps``, ``components``: see ``key_of``,
    which a caller that looks for the record later is to give the same.
    """
    now = datetime.now(UTC)
    key = key_of(measurement.workload, steps=steps, components=components)
    return Record(
        id=new_id(now, key),
        created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=command,
        group=group,
        repeat=repeat,
        key=key,
        measurement=measurement,
        prediction=prediction,
    )


def new_id(now: datetime, key: str) -> str:
    """``20261121-122005481-3fa9c1b7``: UTC to the millisecond, then a short hash: the key's first digits and four
    drawn at random, by which equal runs that end at once differ."""
    return f"{now:%Y%m%d-%H%M%S}{now.microsecond // 1000:03d}-{key[:KEY_DIGITS]}{secrets.token_hex(2)}"
