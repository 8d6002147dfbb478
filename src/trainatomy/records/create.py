"""Create the record of a measurement."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from trainatomy.results.record import Record, Summary

if TYPE_CHECKING:
    from trainatomy.results.measurement import Measurement
    from trainatomy.results.prediction import Prediction

KEY_DIGITS = 4
"""Digits of its key in a record's id, so that a search need not open every file."""


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
    """Return a record, created now, of ``measurement`` and of the ``prediction`` of the same workload.

    Args:
        measurement: The measurement.
        prediction: The prediction, if there is one.
        command: The command that requested the measurement.
        group: See ``Record``.
        repeat: See ``Record``.
        steps: See ``key_of``; to find the record later, pass the same there.
        components: See ``key_of``.
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
    """Return an id such as ``20261121-122005481-3fa9c1b7``.

    It is UTC to the millisecond, then the first digits of the key and four random ones, which distinguish equal runs
    that end at the same time.
    """
    return f"{now:%Y%m%d-%H%M%S}{now.microsecond // 1000:03d}-{key[:KEY_DIGITS]}{secrets.token_hex(2)}"


def key_of(workload: Mapping[str, object], *, steps: int | None = None, components: bool = True) -> str:
    """Return a hash of a requested run, by which an interrupted comparison finds the runs that it already has.

    The result of the run (status, steps, versions) is not part of it.

    Args:
        workload: The mapping of a workload file; its ``name`` does not count.
        steps: Requested optimizer steps (``None``: as the workload says).
        components: Whether memory by component was requested.

    Returns:
        SHA-256 (hex) of the canonical JSON.
    """
    content = {key: value for key, value in workload.items() if key != "name"}
    canonical = json.dumps([content, steps, components], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def summarize(record: Record, file: str = "") -> Summary:
    """Return the record's row in a history; ``file``: where the record is."""
    measured, prediction = record.measurement, record.prediction
    predicted = prediction.memory.device_bytes if prediction else None
    comparable = measured.status == "completed" and predicted is not None
    return Summary(
        id=record.id,
        file=file,
        created=record.created,
        name=measured.name,
        gpu=measured.gpu,
        status=measured.status,
        group=record.group,
        repeat=record.repeat,
        key=record.key,
        device_bytes=measured.device_bytes,
        predicted_device_bytes=predicted,
        gap=predicted / measured.device_bytes - 1 if comparable and predicted and measured.device_bytes else None,
        step_seconds=measured.step_seconds,
        samples_per_second=measured.samples_per_second,
    )
